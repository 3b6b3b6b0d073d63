"""This machine now: its pools, limits, and what other programs leave."""

import sys
from collections.abc import Mapping

from uma.errors import UmaError
from uma.machine.facts import Machine
from uma.system import darwin, linux
from uma.system.working_set import largest_buffer_bytes, working_set_range
from uma.units import GIB, format_gib


def read_machine(device_info: Mapping[str, object] | None = None) -> Machine:
    """This machine now.

    ``device_info`` is MLX's (``mlx.core.device_info()``) where MLX is loaded: on a Mac its working
    set is the limit in force, and needs no rule.

    Raises:
        UmaError: If the system does not tell its memory.
    """
    if sys.platform == "darwin":
        return mac_of(darwin.read(), device_info)
    if sys.platform == "linux":
        return linux_of(linux.read())
    return _other_machine()


def mac_of(readings: darwin.Readings, device_info: Mapping[str, object] | None = None) -> Machine:
    """The Mac that gave these readings.

    Raises:
        UmaError: If neither the readings nor ``device_info`` tell its memory.
    """
    sysctl = darwin.parse_sysctl(readings.sysctl)
    info = {} if device_info is None else device_info
    memory = darwin.installed_bytes(sysctl) or _size(info.get("memory_size"))
    if memory is None:
        raise UmaError("this Mac does not tell its memory: sysctl hw.memsize gave no number")
    chip = sysctl.get("machdep.cpu.brand_string")
    version = sysctl.get("kern.osproductversion")
    available = darwin.available_bytes(readings.vm_stat)
    # Rosetta shows an Intel processor; hw.optional.arm64 tells the machine itself.
    if sysctl.get("hw.optional.arm64") != "1" and not (chip or "").startswith("Apple"):
        return _host(chip, memory, available, "macOS", version)
    limit, high, source, notes = _mac_limit(memory, version, sysctl, info)
    default, _ = working_set_range(memory, darwin.macos_major(version))
    return Machine(
        name=f"{chip or 'Mac'}, {memory // GIB} GiB",
        kind="unified",
        backend="metal",
        memory_bytes=memory,
        limit_bytes=limit,
        limit_source=source,
        limit_high_bytes=high,
        available_bytes=available,
        max_buffer_bytes=_size(info.get("max_buffer_length")) or largest_buffer_bytes(default),
        chip=chip,
        gpu_cores=darwin.gpu_cores(readings.ioreg),
        cpu=darwin.cores_text(sysctl),
        os="macOS",
        os_version=version,
        notes=notes,
    )


def _mac_limit(
    memory_bytes: int, version: str | None, sysctl: Mapping[str, str], info: Mapping[str, object]
) -> tuple[int, int | None, str, tuple[str, ...]]:
    """The GPU limit, its upper end if it is a range, where it was read, and notes.

    The live value first, then what somebody set, then the rule for this memory and version.
    """
    raised, note = darwin.raised_limit(sysctl, memory_bytes)
    notes = () if note is None else (note,)
    told = _size(info.get("max_recommended_working_set_size"))
    if told is not None:
        return told, None, "Metal's recommended working set", notes
    if raised is not None:
        return raised, None, "sysctl iogpu.wired_limit_mb", notes
    low, high = working_set_range(memory_bytes, darwin.macos_major(version))
    source = f"the default of macOS {version or 'of an unknown version'} for this memory"
    return low, high if high > low else None, source, notes


def linux_of(readings: linux.Readings) -> Machine:
    """The Linux machine, or container, that gave these readings; MLX runs on its processor.

    Raises:
        UmaError: If there is no ``MemTotal``.
    """
    meminfo = linux.parse_kib(readings.meminfo)
    memory = meminfo.get("MemTotal")
    if memory is None:
        raise UmaError("this machine does not tell its memory: /proc/meminfo has no MemTotal")
    limit, source = memory, "installed memory"
    available = meminfo.get("MemAvailable")
    for group in readings.groups:
        if group.limit_bytes < limit:
            limit, source = group.limit_bytes, group.source
        if available is not None:
            available = min(available, max(0, group.limit_bytes - group.used_bytes))
    cpu = linux.cpu_model(readings.cpuinfo)
    return Machine(
        name=f"{cpu or 'Linux'}, {format_gib(limit)}",
        kind="host",
        backend="cpu",
        memory_bytes=memory,
        limit_bytes=limit,
        limit_source=source,
        available_bytes=available,
        cpu=cpu,
        os="Linux",
        os_version=readings.release or None,
    )


def _other_machine() -> Machine:
    """Windows and the rest: what psutil tells."""
    import platform

    import psutil

    memory = psutil.virtual_memory()
    cpu = platform.processor() or None
    return _host(cpu, memory.total, memory.available, platform.system(), platform.release())


def _host(
    cpu: str | None, memory_bytes: int, available_bytes: int | None, os: str, version: str | None
) -> Machine:
    """A machine that MLX has no build for."""
    return Machine(
        name=f"{cpu or os}, {format_gib(memory_bytes)}",
        kind="host",
        backend="cpu",
        memory_bytes=memory_bytes,
        limit_bytes=memory_bytes,
        limit_source="installed memory",
        available_bytes=available_bytes,
        cpu=cpu,
        os=os,
        os_version=version,
        notes=("MLX needs Apple silicon or Linux: models can be estimated here, not run",),
    )


def _size(value: object) -> int | None:
    """A positive number of bytes, or ``None``."""
    return value if isinstance(value, int) and value > 0 else None
