"""The memory of a process, and of a process with all that it started.

Which number is the process's own differs by system: on macOS the footprint, which contains Metal's
buffers where the resident size does not; on Linux the proportional share (Pss) of the resident
pages, which can be summed where the resident size counts shared pages each time.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from uma.errors import UmaError
from uma.measurement.metric import Metric, measured, total, unavailable
from uma.system import darwin, linux, linux_process, nvidia
from uma.system.darwin_process import decode_rusage, decode_task_vm_info, parse_footprint

Metrics = dict[str, Metric]

NAMES = ("footprint", "footprint_peak", "resident", "resident_peak", "wired", "swapped", "gpu")
_REFUSED = "another user's process, or it has ended: only root may look into it"


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
    if sys.platform == "darwin":
        usage = decode_rusage(darwin.read_rusage(os.getpid()))
        now, peak = usage["footprint"], usage["footprint_peak"]
        if now is None:
            raise UmaError("no memory figures of this process: proc_pid_rusage was cut")
        return ProcessMemory(now, peak, "footprint", "proc_pid_rusage")
    if sys.platform == "linux":
        now, peak = linux.read_own_memory()
        return ProcessMemory(now, peak, "resident", "/proc/self/smaps_rollup and status")
    import psutil

    info = psutil.Process().memory_info()
    return ProcessMemory(info.rss, getattr(info, "peak_wset", None), "resident", "psutil")


def process_metrics(
    pid: int, cards: dict[int, int] | None = None, *, exact: bool = True
) -> Metrics:
    """All figures of one process; ``cards`` are NVIDIA's bytes by process, where there are any.

    On Linux the exact sizes take the kernel about 5 ms for each GiB: it counts page by page.
    """
    if sys.platform == "darwin":
        return darwin_process_metrics(*_read_darwin(pid))
    if sys.platform == "linux":
        rollup = linux_process.read_rollup(pid) if exact else {}
        status = linux_process.read_status(pid)
        gpu = (cards or {}).get(pid) or linux_process.graphics_bytes(pid)
        return linux_process_metrics(rollup, status, gpu)
    return _psutil_metrics(pid)


def _read_darwin(pid: int) -> tuple[bytes, bytes]:
    """``rusage_info``, and for this process ``task_vm_info``; empty where refused."""
    from uma.system import darwin_native

    try:
        usage = darwin_native.rusage(pid)
        return usage, darwin_native.own_vm_info() if pid == os.getpid() else b""
    except OSError:
        return b"", b""


def darwin_process_metrics(rusage: bytes, vm_info: bytes = b"") -> Metrics:
    """What the structures of a Mac's process say; ``vm_info`` only exists for the own one."""
    usage, source = decode_rusage(rusage), "proc_pid_rusage"
    missing = "this kernel's structure has no such field" if rusage else _REFUSED
    found = {
        name: measured(usage[name], source, missing)
        for name in ("footprint", "footprint_peak", "resident", "wired")
    }
    graphics = decode_task_vm_info(vm_info)["graphics"]
    return found | {
        "resident_peak": unavailable("macOS keeps no such figure of other processes"),
        "swapped": unavailable("macOS does not tell it by process"),
        "gpu": measured(
            graphics, "task_info, graphics ledger", "macOS tells it only of the own process"
        ),
    }


def linux_process_metrics(
    rollup: dict[str, int], status: dict[str, int], gpu: int | None = None
) -> Metrics:
    """What ``smaps_rollup`` and ``status`` of a process say, in bytes by their own names.

    Where the former is refused, ``status`` gives the resident size, whose counters lag by some
    pages for each thread.
    """
    resident = rollup.get("Rss", status.get("VmRSS"))
    exact = "Rss" in rollup
    peak = status.get("VmHWM")
    if peak is not None and resident is not None:
        peak = max(peak, resident)
    pinned = None if "VmLck" not in status else status["VmLck"] + status.get("VmPin", 0)
    source = "smaps_rollup Rss" if exact else "status VmRSS"
    return {
        "footprint": measured(rollup.get("Pss"), "smaps_rollup Pss", _REFUSED),
        "footprint_peak": unavailable("Linux keeps no peak of Pss"),
        "resident": measured(resident, source, _REFUSED, estimated=not exact),
        "resident_peak": measured(peak, "status VmHWM", _REFUSED),
        "wired": measured(pinned, "status VmLck, VmPin", _REFUSED),
        "swapped": measured(rollup.get("SwapPss"), "smaps_rollup SwapPss", _REFUSED),
        "gpu": measured(gpu, "driver, by process", "no GPU driver tells it of this process"),
    }


def with_categories(metrics: Metrics, pid: int) -> Metrics:
    """``metrics`` of a Mac's process with what of it is the GPU's, by the tool ``footprint``."""
    if sys.platform != "darwin" or metrics["gpu"].value is not None:
        return metrics
    return metrics | {"gpu": graphics_metric(darwin.read_footprint(pid))}


def graphics_metric(footprint: str) -> Metric:
    """The categories that ``footprint`` marks as graphics: an estimate of the GPU's part."""
    found, _ = parse_footprint(footprint)
    sizes = (
        [size for name, size in found[0].categories.items() if "(graphics)" in name]
        if found
        else []
    )
    source = "footprint, categories (graphics)"
    return measured(sum(sizes) if sizes else None, source, "footprint shows none", estimated=True)


def _psutil_metrics(pid: int) -> Metrics:
    import psutil

    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return {name: unavailable(_REFUSED) for name in NAMES}
    found = {name: unavailable("psutil does not tell it on this system") for name in NAMES}
    found["resident"] = Metric(info.rss, source="psutil", estimated=True)
    peak = getattr(info, "peak_wset", None)
    found["resident_peak"] = measured(peak, "psutil", "psutil does not tell it on this system")
    private = getattr(info, "private", None)
    found["footprint"] = measured(private, "psutil private", "psutil does not tell it here")
    return found


def sum_metrics(each: Iterable[Metrics]) -> Metrics:
    """The figures of several processes together.

    Resident sizes count a page that two share twice, and peaks need not have met: both sums are
    estimates.
    """
    rows = list(each)
    return {
        name: total(
            (row[name] for row in rows),
            counts_shared=name in ("resident", "resident_peak", "footprint_peak"),
        )
        for name in NAMES
    }


def nvidia_bytes() -> dict[int, int]:
    """Memory on NVIDIA's cards by process; none where there is no card."""
    return {} if sys.platform == "darwin" else nvidia.read_process_bytes()
