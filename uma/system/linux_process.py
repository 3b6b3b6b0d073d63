"""Linux: the processes and the memory of each, from ``/proc``.

Functions that read take the root of the file tree; a process that ends while it is looked at is
left out.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from uma.system.linux import parse_kib, read_text
from uma.system.process import Process

_ROOT = Path("/")
# /proc/PID/stat: the name in parentheses, which may contain any character, then state, parent;
# the resident pages are the 24th field (man proc_pid_stat). Z and X are the states of those that
# have ended and wait to be reaped.
_STAT = re.compile(r"([0-9]{1,9}) \((.*)\) [A-WYa-wy] ([0-9]{1,9}) (.*)", re.DOTALL)
_PAGES_AFTER_PARENT = 24 - 5


def read_processes(root: Path = _ROOT) -> list[Process]:
    """All processes; resident sizes are approximate (the kernel's per-thread counters)."""
    page = os.sysconf("SC_PAGE_SIZE")
    texts = (read_text(f"{root}/proc/{name}/stat") for name in _pids(root))
    return [found for text in texts if text and (found := parse_stat(text, page))]


def _pids(root: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (name for name in os.listdir(root / "proc") if name.isdecimal())


def parse_stat(text: str, page_size: int) -> Process | None:
    """The process of a ``/proc/PID/stat``, or ``None`` where it has ended, or the text is cut.

    >>> parse_stat("7 (a) b) S 1 " + "0 " * 19 + "3 0", 4096)
    Process(pid=7, parent=1, name='a) b', resident_bytes=12288)
    """
    match = _STAT.match(text)
    if match is None:
        return None
    rest = match[4].split()
    pages = rest[_PAGES_AFTER_PARENT] if len(rest) > _PAGES_AFTER_PARENT else ""
    resident = int(pages) * page_size if re.fullmatch(r"[0-9]{1,15}", pages) else 0
    return Process(int(match[1]), int(match[3]), match[2], resident)


def command_line(pid: int, root: Path = _ROOT) -> list[str]:
    """The words of a process's command; empty for the kernel's own and for those that ended."""
    text = read_text(f"{root}/proc/{pid}/cmdline") or ""
    return [word for word in text.split("\0") if word]


def read_rollup(pid: int, root: Path = _ROOT) -> dict[str, int]:
    """Bytes of ``smaps_rollup``, counted page by page: about 5 ms per GiB in pages of 4 KiB.

    Empty for the processes of other users, which only root may look into.
    """
    return parse_kib(read_text(f"{root}/proc/{pid}/smaps_rollup") or "")


def read_status(pid: int, root: Path = _ROOT) -> dict[str, int]:
    """Bytes of ``status``: the high-water mark ``VmHWM``, and counters that lag a little."""
    return parse_kib(read_text(f"{root}/proc/{pid}/status") or "")


def graphics_bytes(pid: int, root: Path = _ROOT) -> int | None:
    """What a process holds of AMD and Intel GPUs: ``drm-resident-*``, else ``drm-memory-*``.

    Each ``drm-client-id`` counts once, however many descriptors show it (kernel docs,
    gpu/drm-usage-stats). ``None`` where no descriptor has such lines.
    """
    if not os.path.exists(f"{root}/dev/dri"):
        return None
    clients: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(root / f"proc/{pid}/fdinfo"):
            text = read_text(f"{root}/proc/{pid}/fdinfo/{name}") or ""
            client = re.search(r"^drm-client-id:\s*([0-9]{1,18})$", text, re.MULTILINE)
            size = parse_fdinfo(text)
            if client and size is not None:
                clients[client[1]] = size
    return sum(clients.values()) if clients else None


def parse_fdinfo(text: str) -> int | None:
    """Bytes of GPU memory in one descriptor's text.

    >>> parse_fdinfo("drm-memory-vram:\\t2 KiB\\ndrm-memory-gtt:\\t1 MiB\\n")
    1050624
    """
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for kind in ("resident", "memory"):
        found = re.findall(
            rf"^drm-{kind}-(?:vram|gtt)[0-9]*:\s*([0-9]{{1,15}})\s*([KMG]iB)?$", text, re.MULTILINE
        )
        if found:
            return sum(int(value) * units[unit] for value, unit in found)
    return None
