"""A machine as the memory plan sees it: its pool, the device's limit, the budget within it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from uma.errors import UmaError, UsageError
from uma.ledger import Verdict
from uma.system import darwin, linux
from uma.system.working_set import largest_buffer_bytes, working_set_range
from uma.units import GIB, format_gib
from uma.workload import Backend

PoolKind = Literal["unified", "discrete", "host"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of one machine; ``None`` where nothing could tell.

    ``limit_bytes`` is what the device enforces and ``limit_source`` says where it was read;
    ``limit_high_bytes`` is above it when only a range is known (macOS version unknown).
    ``available_bytes`` is what other programs leave now. ``name`` is never the host's name.
    """

    name: str
    kind: PoolKind
    backend: Backend
    memory_bytes: int
    limit_bytes: int
    limit_source: str
    limit_high_bytes: int | None = None
    available_bytes: int | None = None
    max_buffer_bytes: int | None = None
    chip: str | None = None
    gpu_cores: int | None = None
    cpu: str | None = None
    os: str | None = None
    os_version: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """The two lines a peak is held against, and which rule drew the lower one.

    ``lines`` are all rules and their bytes, the winner among them. ``user`` says that the user's
    own budget is the lowest; ``user_bytes`` is that budget, the lowest or not. Where the device's
    limit is a range, ``limit_bytes`` is its upper end: refusal needs certainty.
    """

    limit_bytes: int
    budget_bytes: int
    winner: str
    user: bool = False
    user_bytes: int | None = None
    reserve_bytes: int | None = None
    lines: tuple[tuple[str, int], ...] = ()


def verdict(peak_bytes: int, budget: Budget) -> Verdict:
    """``fits`` within the budget, ``tight`` within the limit, else ``exceeds``.

    A budget that the user set is a limit: above it is ``exceeds``.
    """
    if peak_bytes <= budget.budget_bytes:
        return "fits"
    over_own = budget.user_bytes is not None and peak_bytes > budget.user_bytes
    if budget.user or over_own or peak_bytes > budget.limit_bytes:
        return "exceeds"
    return "tight"


def default_reserve_bytes(machine: Machine) -> int:
    """Memory kept for the system and other programs when nobody says otherwise.

    On a Mac half of the memory, at most 8 GiB, and an eighth from 64 GiB on. 16 GiB Macs froze
    with 10.6 GB wired, and another project's remedy was to leave 8 GB (vmlx-swift pull request
    421); 128 GiB Macs crashed with 125 GB in use (omlx issue 3065). Between the two it is our
    judgment. Elsewhere, where nothing is wired and the limit is all the memory there is, a
    quarter, at most 1 GiB, and a sixteenth from 16 GiB on.
    """
    if machine.backend == "metal":
        return max(min(machine.memory_bytes // 2, 8 * GIB), machine.memory_bytes // 8)
    return max(min(machine.limit_bytes // 4, GIB), machine.limit_bytes // 16)


def budget_of(
    machine: Machine, *, user_budget_bytes: int | None = None, reserve_bytes: int | None = None
) -> Budget:
    """The smallest of the device's limit, what the reserve leaves, what others leave, the user's.

    The reserve stands for the system and the usual programs; when those hold more than it, what
    they leave counts, less 1/32 of the memory (at most 1 GiB) so that nothing is paged out at
    the first allocation.

    Raises:
        UsageError: If the user's budget is not positive, or the reserve leaves nothing.
    """
    if user_budget_bytes is not None and user_budget_bytes <= 0:
        raise UsageError(f"a budget of {user_budget_bytes} bytes leaves no room for a model")
    reserve = default_reserve_bytes(machine) if reserve_bytes is None else reserve_bytes
    pool = machine.memory_bytes if machine.backend == "metal" else machine.limit_bytes
    if not 0 <= reserve < pool:
        raise UsageError(
            f"a reserve of {format_gib(reserve)} does not leave anything of the "
            f"{format_gib(pool)} of memory; give a smaller one"
        )
    lines = [
        (f"limit: {machine.limit_source}", machine.limit_bytes),
        (f"memory less a reserve of {format_gib(reserve)} for the system", pool - reserve),
    ]
    if machine.available_bytes is not None:
        left = machine.available_bytes - min(pool // 32, GIB)
        lines.append(("memory that other programs leave now", max(0, left)))
    if user_budget_bytes is not None:
        lines.append(("your budget", user_budget_bytes))
    winner, budget = min(lines, key=lambda line: line[1])
    return Budget(
        limit_bytes=machine.limit_high_bytes or machine.limit_bytes,
        budget_bytes=budget,
        winner=winner,
        user=winner == "your budget",
        user_bytes=user_budget_bytes,
        reserve_bytes=reserve,
        lines=tuple(lines),
    )


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
