"""What a run showed: memory of this process, and MLX's counters while it worked."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from uma.system import darwin, linux


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process now and at its highest; the highest is ``None`` where nobody keeps it.

    ``footprint`` (macOS) contains Metal's buffers and compressed pages. ``resident`` is what lies
    in memory now, files that are mapped included. One says nothing about the other.
    """

    current_bytes: int
    peak_bytes: int | None
    kind: Literal["footprint", "resident"]
    source: str


def read_process_memory() -> ProcessMemory:
    """Memory of this process.

    Raises:
        UmaError: If the system does not tell.
    """
    import os

    if sys.platform == "darwin":
        now, peak = darwin.footprint(darwin.read_rusage(os.getpid()))
        return ProcessMemory(now, peak, "footprint", "proc_pid_rusage")
    if sys.platform == "linux":
        now, peak = linux.read_own_memory()
        return ProcessMemory(now, peak, "resident", "/proc/self/smaps_rollup and status")
    import psutil

    info = psutil.Process().memory_info()
    return ProcessMemory(info.rss, getattr(info, "peak_wset", None), "resident", "psutil")


class Sampler:
    """Highest values of two counters while a block runs, read every few milliseconds.

    ``read`` gives (active, pool) in bytes: on MLX ``get_active_memory`` and ``get_cache_memory``,
    whose sum has no high-water mark of its own. Peaks shorter than the interval can be missed.
    An error of ``read`` ends the sampling and is raised at the end of the block.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], interval_s: float = 0.005) -> None:
        self.max_total_bytes = 0
        self.max_active_bytes = 0
        self.max_pool_bytes = 0
        self.samples = 0
        self._read = read
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="uma-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._sample()
            while not self._stop.wait(self._interval_s):
                self._sample()
            self._sample()
        except Exception as error:
            self._error = error

    def _sample(self) -> None:
        active, pool = self._read()
        self.samples += 1
        self.max_active_bytes = max(self.max_active_bytes, active)
        self.max_pool_bytes = max(self.max_pool_bytes, pool)
        self.max_total_bytes = max(self.max_total_bytes, active + pool)
