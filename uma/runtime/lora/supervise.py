"""Training in a child process, and what its end means. Needs no MLX.

MLX may end the process that uses it (a Metal error on a callback thread, a system out of memory):
the parent is what can still speak then.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

from uma.measurement.failures import explain
from uma.units import format_gib

PARENT = "UMA_TRAINING_PARENT"
"""Variable by which the child knows its parent; if that is gone, the child saves and leaves."""

TAIL = 64 << 10
SAMPLE_S = 1.0
LAST_WORDS_S = 5.0  # what a tracker of --report-to left behind may hold the pipes for ever
SWAPPING_BYTES = 1 << 30
"""Growth of swap from which training is taken to wait for the disk: our judgment."""

SMALLER_HELPS = {
    *("out_of_memory", "killed", "memory_pressure", "timeout", "interactivity", "gpu_hang"),
    *("aborted", "single_buffer", "crashed"),
}
"""Causes after which less work at a time may go through."""

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
LEAVE = signal.SIGTERM
"""What the child is sent for each of them. SIGINT is lost while MLX's CPU backend looks for a
compiler: ``system`` ignores it meanwhile (mlx 0.32.4, ``backend/cpu/jit_compiler.cpp``)."""


@dataclass(slots=True)
class Samples:
    """Memory of the child as the system told it, last and highest, and swap since it began."""

    last_bytes: int | None = None
    peak_bytes: int | None = None
    swap_growth_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its code (negative for a signal), its output, what was seen of it."""

    code: int
    output: str
    errors: str
    samples: Samples
    out_of_memory_kills: int
    asked_to_stop: bool


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a process ended that could not say it; ``smaller_helps`` with a smaller micro-batch."""

    cause: str
    text: str
    remedy: str
    quote: str = ""

    @property
    def smaller_helps(self) -> bool:
        return self.cause in SMALLER_HELPS


def run_child(
    command: Sequence[str],
    variables: Mapping[str, str] = MappingProxyType({}),
    *,
    allow_sleep: bool,
) -> Ended:
    """Run ``command`` to its end: its errors are shown as they come, its output is kept.

    The signals that ask to leave are passed on to it. It has a session of its own, so that Ctrl-C
    reaches it once. On macOS the machine is kept awake as long as it lives.
    """
    began_kills = _out_of_memory_kills()
    with _passed_on() as signals:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **child_environment(),
                **variables,
                PARENT: str(os.getpid()),
            },
            start_new_session=True,
        )
        signals.pid = child.pid
        if signals.seen:  # it came before there was a child
            child.send_signal(LEAVE)
        _keep_awake(child.pid, allow_sleep)
        watch = _Watch(child)
        code = watch.wait()
    kills = _out_of_memory_kills() - began_kills
    return Ended(code, watch.output, watch.tail, watch.samples, kills, bool(signals.seen))


def cause_of(ended: Ended) -> Cause | None:
    """Why a child ended, or ``None`` where it ended as it should or said so itself."""
    killed = ended.code < 0 or ended.code in (134, 137, 139)
    number = -ended.code if ended.code < 0 else ended.code - 128
    if not killed and ended.code != 1:
        return None
    found = explain(ended.errors, swap_growth_bytes=ended.samples.swap_growth_bytes)
    if found is not None:
        return Cause(found.cause, found.text, found.remedy, found.quote)
    if not killed or (
        ended.asked_to_stop and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ):
        return None
    if number == signal.SIGKILL:
        return _killed(ended.out_of_memory_kills)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGABRT:
        text = "The process was aborted, and left no word that is known."
        return Cause("aborted", text, "Look at its last lines above; try a smaller micro-batch.")
    text = f"The process ended by {name}."
    if number == signal.SIGSEGV and sys.platform == "linux":
        # mlx 0.32.4, backend/no_gpu/allocator.cpp, malloc: a null pointer is not looked at.
        text += " MLX's CPU backend does that where the system gives it no more memory."
    return Cause("crashed", text, "Train with a smaller --budget; if it repeats, report it to MLX.")


def _killed(out_of_memory_kills: int) -> Cause:
    words = "Out of memory: Killed process" if out_of_memory_kills else "Killed: 9"
    found = explain(words)
    assert found is not None
    return Cause(found.cause, found.text, found.remedy)


def awake_command(pid: int) -> list[str]:
    """What keeps a Mac awake while a process lives, on mains too; the display may sleep.

    Never ``-d``: the GPU's watchdog stops long commands while the display is on (case B7).
    """
    return ["caffeinate", "-is", "-w", str(pid)]


def _keep_awake(pid: int, allow_sleep: bool) -> None:
    if sys.platform == "darwin" and not allow_sleep and shutil.which("caffeinate"):
        subprocess.Popen(awake_command(pid), stdin=subprocess.DEVNULL)


def child_environment() -> dict[str, str]:
    """Variables with which a child finds the same ``uma``."""
    here = str(Path(__file__).parents[3])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def leaving_signals() -> list[int]:
    """The signals that ask to leave, without those that this process was begun to ignore.

    ``nohup`` has SIGHUP ignored, and a script that of what it runs in the background SIGINT.
    """
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@dataclass(slots=True)
class _Signals:
    pid: int | None = None
    seen: list[int] = field(default_factory=list)


@contextlib.contextmanager
def _passed_on() -> Iterator[_Signals]:
    """Pass the signals that ask to leave on to the child, once there is one."""
    signals = _Signals()

    def handle(number: int, _: Any) -> None:
        signals.seen.append(number)
        if signals.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(signals.pid, LEAVE)

    former = {}
    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, handle) for number in leaving_signals()}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _Watch:
    """Reads what a child writes, and samples its memory, until it has ended."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self.child, self.samples = child, Samples()
        self._output: list[bytes] = []
        self._tail = b""
        assert child.stdout is not None
        assert child.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(child.stdout, self._keep), daemon=True),
            threading.Thread(target=self._read, args=(child.stderr, self._show), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def output(self) -> str:
        return b"".join(self._output).decode(errors="replace")

    @property
    def tail(self) -> str:
        return self._tail.decode(errors="replace")

    def wait(self) -> int:
        """The exit code."""
        swap = _swap_bytes()
        while True:
            self._sample(swap)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.child.wait(SAMPLE_S)
                break
        for thread in self._threads:
            thread.join(LAST_WORDS_S)
        return code

    def _sample(self, swap_before: int) -> None:
        found = _memory_bytes(self.child.pid)
        if found is None:
            return
        samples = self.samples
        samples.last_bytes = found
        samples.peak_bytes = max(samples.peak_bytes or 0, found)
        grown = _swap_bytes() - swap_before
        if samples.swap_growth_bytes < SWAPPING_BYTES <= grown:
            self._show(swapping_text(grown).encode())
        samples.swap_growth_bytes = max(samples.swap_growth_bytes, grown)

    @staticmethod
    def _read(stream: IO[bytes], use: Any) -> None:
        while chunk := os.read(stream.fileno(), TAIL):
            use(chunk)
        stream.close()

    def _keep(self, chunk: bytes) -> None:
        self._output.append(chunk)

    def _show(self, chunk: bytes) -> None:
        self._tail = (self._tail + chunk)[-TAIL:]
        with contextlib.suppress(OSError, ValueError):  # training goes on without what it says
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


def swapping_text(grown_bytes: int) -> str:
    """What is said once when the system begins to swap: slow is not the model (case E21)."""
    return (
        f"note: swap grew by {format_gib(grown_bytes)} since training began: each step now waits "
        "for the disk; end other programs, or stop this (Ctrl-C saves) and go on with --resume and "
        "a smaller --budget\n"
    )


def _memory_bytes(pid: int) -> int | None:
    """What a process holds: on macOS its footprint, which contains Metal's buffers."""
    from uma.measurement.process import process_metrics

    found = process_metrics(pid, exact=False)
    names: tuple[Literal["footprint", "resident"], ...] = ("footprint", "resident")
    return next((found[name].size for name in names if found[name].size), None)


def _swap_bytes() -> int:
    import psutil

    try:
        return int(psutil.swap_memory().used)
    except (OSError, RuntimeError):
        return 0


def _out_of_memory_kills() -> int:
    """How often the kernel has ended a process for want of memory; 0 where it does not count."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(counts.get("oom_kill", 0))
