"""Run a command, and measure it with all that it starts.

Signals reach it as if it had been started alone, and its exit status is passed on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from uma.machine import read_machine
from uma.measurement.metric import Metric
from uma.measurement.peaks import Sampler, keep_highest
from uma.measurement.process import process_metrics
from uma.measurement.record import Record, record_of
from uma.measurement.snapshot import read_snapshot

_PASSED_ON = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells answer


@dataclass(frozen=True, slots=True)
class Measured:
    """The command's status, 128 and its number for a signal, and what was seen."""

    status: int
    record: Record


def measure_command(command: Sequence[str], stdout: Any = None) -> Measured:
    """Run ``command`` with this process's streams (``stdout`` in its place) and measure it.

    Raises:
        OSError: If it cannot be started.
    """
    machine = read_machine()
    before = read_snapshot(largest=0, machine=machine)
    with _signals() as pass_on:
        began = time.monotonic()
        child = subprocess.Popen(list(command), stdout=stdout)
        pass_on.append(child.pid)
        own_peak = process_metrics(os.getpid())["resident_peak"].size
        sampler = Sampler(child.pid, machine)
        sampler.start()
        code, usage = _wait(child, sampler)
        seconds = time.monotonic() - began
        sampler.stop()
    last = _last_peak(usage, own_peak)
    if last is not None:
        keep_highest(sampler.tree, "resident_peak", last)
    record = record_of(sampler, seconds, before, code)
    return Measured(code if code >= 0 else 128 - code, record)


def _wait(child: "subprocess.Popen[bytes]", sampler: Sampler) -> tuple[int, Any]:
    """The exit code, negative for a signal, and the kernel's account; ``None`` on Windows."""
    if not hasattr(os, "wait4"):
        return child.wait(), None
    _await_exit(child.pid)
    if sys.platform == "darwin":  # the kernel keeps a footprint's peak until the child is reaped
        sampler.look()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage


def _await_exit(pid: int) -> None:
    """Wait until a child has ended, and leave it to be reaped."""
    if sys.platform != "darwin" or hasattr(os, "waitid"):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    import select  # macOS before Python 3.13

    flags = select.KQ_EV_ADD | select.KQ_EV_ONESHOT
    event = select.kevent(pid, select.KQ_FILTER_PROC, flags, select.KQ_NOTE_EXIT)
    queue = select.kqueue()
    with contextlib.suppress(ProcessLookupError), contextlib.closing(queue):  # ended already
        queue.control([event], 1)


def _last_peak(usage: Any, own_peak: int | None) -> Metric | None:
    """The kernel's peak of the child, and of those it waited for, exact to its very end.

    It begins with what this process held, since the child was a copy of it before it ran its
    program, and says something only above that.
    """
    if usage is None or own_peak is None:
        return None
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Metric(peak, source="wait4 ru_maxrss") if peak > own_peak else None


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """While a command runs: its signals are its own affair, and ours are passed on to it.

    Ctrl-C reaches every process in the terminal's foreground by itself; one that was sent to this
    process alone is passed on.
    """
    children: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not _in_foreground():
            for pid in children:
                with contextlib.suppress(OSError):  # it has ended, or changed its user
                    os.kill(pid, number)

    names = [*_PASSED_ON, "SIGINT"]
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    former = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield children
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether this process belongs to the job that the terminal's keys reach."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
