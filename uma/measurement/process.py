"""What a run showed: the memory of this process."""

import sys
from dataclasses import dataclass
from typing import Literal

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
