"""Which processes there are, which belong together, and what each is called."""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from uma.errors import UsageError
from uma.measurement.process import (
    Metrics,
    nvidia_bytes,
    process_metrics,
    sum_metrics,
    with_categories,
)
from uma.system import darwin, linux_process
from uma.system.process import Process
from uma.units import printable


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """A process with all that it started, down to the last, and what they hold together."""

    pid: int
    label: str
    pids: tuple[int, ...]
    metrics: Metrics


def read_processes() -> list[Process]:
    """All processes of this machine."""
    if sys.platform == "darwin":
        return darwin.read_processes()
    if sys.platform == "linux":
        return linux_process.read_processes()
    import psutil

    rows = psutil.process_iter(["pid", "ppid", "name", "memory_info"])
    return [
        Process(p.info["pid"], p.info["ppid"] or 0, p.info["name"] or "", _rss(p.info))
        for p in rows
    ]


def _rss(info: dict[str, object]) -> int:
    return int(getattr(info["memory_info"], "rss", 0))


def tree_of(processes: Iterable[Process], pid: int) -> tuple[int, ...]:
    """``pid`` and the processes that it started, and those that these started."""
    children = defaultdict(list)
    for process in processes:
        if process.pid != process.parent:
            children[process.parent].append(process.pid)
    found, waiting = {pid: None}, [pid]
    while waiting:
        for child in children[waiting.pop()]:
            if child not in found:
                found[child] = None
                waiting.append(child)
    return tuple(found)


def roots_named(processes: Sequence[Process], name: str) -> list[int]:
    """The processes of that name, or with it in their command, that no other of them started.

    Letters' case does not matter. This process, whose command has the name too, and those that
    started it are none.
    """
    parents = {process.pid: process.parent for process in processes}
    wanted = name.casefold()
    own = set(_ancestors(os.getpid(), parents))
    found = {
        process.pid
        for process in processes
        if process.pid not in own
        and (wanted in process.name.casefold() or wanted in _command(process.pid).casefold())
    }
    return [pid for pid in sorted(found) if not found & set(_ancestors(parents[pid], parents))]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterable[int]:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        yield pid
        pid = parents[pid]


def _command(pid: int) -> str:
    return " ".join(command_line(pid))


def command_line(pid: int) -> list[str]:
    """The words of a process's command, or none."""
    if sys.platform == "linux":
        return linux_process.command_line(pid)
    import psutil

    try:
        return list(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return []


def label(name: str, command: Sequence[str]) -> str:
    """What to call a process: its name, and for an interpreter the module or script it runs.

    Nothing else of the command, which may hold a prompt or a key. Any program can choose these
    names, so that control characters in them are written out.

    >>> label("python3.12", ["/usr/bin/python3", "-m", "mlx_lm.server", "--model", "m"])
    'python3.12 mlx_lm.server'
    """
    return printable(_label(name, command), kept="")


def _label(name: str, command: Sequence[str]) -> str:
    if not re.match(r"(?i)python|node|ruby|uv\b", name):
        return name
    words = list(command[1:])
    while words:
        word = words.pop(0)
        if word == "-c":
            break
        if word == "-m" and words:
            return f"{name} {words[0]}"
        if not word.startswith("-"):
            return f"{name} {PurePath(word).name}"
    return name


def read_trees(
    processes: Sequence[Process],
    pids: Sequence[int] = (),
    names: Sequence[str] = (),
    *,
    missing_ok: bool = False,
) -> list[ProcessTree]:
    """The trees of these processes, and of those with these names.

    Raises:
        UsageError: If there is no such process, and that is not ``missing_ok``.
    """
    known = {process.pid: process for process in processes}
    roots = [pid for pid in pids if pid in known]
    for pid in pids:
        if pid not in known and not missing_ok:
            raise UsageError(f"there is no process {pid}")
    for name in names:
        found = roots_named(processes, name)
        if not found and not missing_ok:
            raise UsageError(f"no process has {name!r} in its name or command")
        roots += found
    cards = nvidia_bytes()
    return [_tree(known, pid, tree_of(processes, pid), cards) for pid in dict.fromkeys(roots)]


def _tree(
    known: dict[int, Process], pid: int, pids: tuple[int, ...], cards: dict[int, int]
) -> ProcessTree:
    metrics = sum_metrics(with_categories(process_metrics(one, cards), one) for one in pids)
    return ProcessTree(pid, label(known[pid].name, command_line(pid)), pids, metrics)


def read_largest(
    processes: Sequence[Process], count: int, *, exact: bool = True
) -> list[ProcessTree]:
    """The ``count`` processes that hold most, each by itself, the largest first.

    On Linux those with the largest resident size are looked into, unless not ``exact``; on a Mac,
    where it says little, all of this user's.
    """
    by_size = sorted(processes, key=lambda process: -process.resident_bytes)
    if sys.platform != "darwin":
        by_size = [process for process in by_size if process.resident_bytes][:count]
    cards = nvidia_bytes()
    rows = [(process, process_metrics(process.pid, cards, exact=exact)) for process in by_size]
    rows.sort(key=lambda row: -held_bytes(row[1]))
    return [
        ProcessTree(p.pid, label(p.name, command_line(p.pid)), (p.pid,), metrics)
        for p, metrics in rows[:count]
        if held_bytes(metrics)
    ]


def held_bytes(metrics: Metrics) -> int:
    """What a process holds: its footprint, else its resident size, else 0."""
    return metrics["footprint"].size or metrics["resident"].size or 0
