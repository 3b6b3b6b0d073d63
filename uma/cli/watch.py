"""``uma measure --watch``: a screen on a terminal, lines in a pipe, and a log."""

import csv
import json as json_module
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from uma.errors import StorageError, UsageError
from uma.measurement.diagnosis import diagnose
from uma.measurement.finding import Finding
from uma.measurement.peaks import spent_s
from uma.measurement.snapshot import Snapshot, read_snapshot
from uma.report.live import line_text, live_text, log_row
from uma.report.measure import findings_text, measure_json

_KEPT = 600  # snapshots: ten minutes at one a second
_SHARE = 1 / 50  # of one core, at most, on average
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, no cursor
_HOME, _ERASE_LINE, _ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

Write = Callable[[dict[str, Any]], None]
Show = Callable[[Sequence[Snapshot], list[Finding]], None]


def watch_memory(
    pids: list[int],
    names: list[str],
    top: int,
    interval_s: float,
    looks: int | None,
    log: Path | None,
    json: bool,
) -> None:
    """Look every ``interval_s`` seconds until Ctrl-C, so many ``looks``, or the processes' end.

    Where a look takes more than a fiftieth of that, the looks are further apart.
    """
    history: deque[Snapshot] = deque(maxlen=_KEPT)
    first = read_snapshot(pids, names, largest=top, exact=False)
    with _log(log) as write, _screen(json) as show:
        due, done, snapshot, cost = time.monotonic(), 0, first, 0.0
        while snapshot.processes or not (pids or names):
            history.append(snapshot)
            write(log_row(snapshot, first.seconds))
            show(history, diagnose(history))
            done += 1
            if done == looks:
                return
            due = max(due + max(interval_s, cost / _SHARE), time.monotonic())
            time.sleep(due - time.monotonic())
            before = spent_s()
            snapshot = read_snapshot(
                pids, names, largest=top, machine=first.machine, missing_ok=True, exact=False
            )
            cost = spent_s() - before


@contextmanager
def _log(path: Path | None) -> Iterator[Write]:
    """A function that writes a row to the file, of the kind that its name says.

    A file that is there stays as it is: its columns may be others, and its seconds are.

    Raises:
        UsageError: If the name ends in neither ``.csv`` nor ``.jsonl``, or the file is there.
        StorageError: If it cannot be written.
    """
    if path is None:
        yield lambda row: None
        return
    if path.suffix not in (".csv", ".jsonl"):
        raise UsageError(f"--log {path}: the name has to end in .csv or .jsonl")
    try:
        file = open(path, "x", encoding="utf-8", newline="")  # noqa: SIM115 - closed below
    except FileExistsError:
        raise UsageError(
            f"--log {path} is there already; remove it, or --log {_free(path)} is free"
        ) from None
    except OSError as error:
        raise StorageError(f"--log {path}: {error.strerror}") from None
    columns: list[str] = []

    def write(row: dict[str, Any]) -> None:
        try:
            if path.suffix == ".jsonl":
                file.write(json_module.dumps(row) + "\n")
            else:
                if not columns:
                    columns.extend(row)
                    csv.writer(file).writerow(columns)
                csv.writer(file).writerow([row.get(column) for column in columns])
            file.flush()
        except OSError as error:
            raise StorageError(f"--log {path}: {error.strerror}") from None

    try:
        yield write
    finally:
        with suppress(OSError):  # each row was flushed: what is left failed, and was told
            file.close()


def _free(path: Path) -> Path:
    """A name like ``path`` that no file has, with a number."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def _screen(json: bool) -> Iterator[Show]:
    """A function that shows the last snapshot: on a terminal with its course before."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"
    if json:
        yield lambda history, found: _print(json_module.dumps(measure_json(history[-1], found)))
    elif not terminal:
        yield _lines()
    else:
        former = signal.signal(signal.SIGTERM, _end)
        try:
            print(_ENTER, end="")
            yield _draw
        finally:
            print(_LEAVE, end="", flush=True)
            signal.signal(signal.SIGTERM, former)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End by a signal as shells report it, but through each ``finally``: the screen is restored."""
    raise SystemExit(128 + number)


def _lines() -> Show:
    """One line each on stdout; a finding once, when it comes up, on stderr."""
    told: set[str] = set()

    def show(history: Sequence[Snapshot], findings: list[Finding]) -> None:
        _print(line_text(history[-1]))
        new = [finding for finding in findings if finding.name not in told]
        told.update(finding.name for finding in new)
        if new:
            print(findings_text(new), file=sys.stderr)

    return show


def _draw(history: Sequence[Snapshot], findings: list[Finding]) -> None:
    size = shutil.get_terminal_size()
    blocks = (sys.stdout.encoding or "").lower().startswith("utf")
    text = live_text(history, findings, width=size.columns, blocks=blocks)
    lines = text.splitlines()[: size.lines - 1]
    _print(_HOME + "".join(line + _ERASE_LINE + "\n" for line in lines) + _ERASE_BELOW, end="")


def _print(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)
