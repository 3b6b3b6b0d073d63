"""The GPU: what all programs hold of it, what it allows, how busy it is."""

import sys
from collections.abc import Sequence

from uma.machine.facts import Machine
from uma.measurement.metric import Metric, Unit, measured, unavailable
from uma.system import amdgpu, nvidia
from uma.system.darwin_gpu import Accelerator, parse_ioreg
from uma.system.darwin_profiler import parse_displays

Metrics = dict[str, Metric]

UNITS: dict[str, Unit] = {
    "allocated": "bytes",
    "in_use": "bytes",
    "limit": "bytes",
    "utilization": "percent",
    "power": "W",
    "cores": "cores",
    "recoveries": "count",
}


def read_gpu(machine: Machine, ioreg: str | None = None) -> Metrics:
    """The GPU of this machine now. ``ioreg`` is its text where it was read already."""
    if sys.platform == "darwin":
        return darwin_gpu(parse_ioreg(_ioreg() if ioreg is None else ioreg), machine)
    cards = nvidia.read_cards()
    if cards:
        return nvidia_gpu(cards, machine)
    amd = amdgpu.read_cards() if sys.platform == "linux" else ()
    return amd_gpu(amd, machine) if amd else no_gpu()


def _ioreg() -> str:
    from uma.system import darwin

    return darwin.read_ioreg()


def no_gpu() -> Metrics:
    return {n: unavailable("no GPU whose driver we can ask", unit) for n, unit in UNITS.items()}


def darwin_gpu(found: Accelerator | None, machine: Machine) -> Metrics:
    """Of a Mac, from the IORegistry. It tells no program's share: only all of them together."""
    source, missing = "ioreg AGXAccelerator", "ioreg shows no accelerator's statistics"
    if found is not None:
        missing = "ioreg's statistics lack it"

    def of(name: str) -> int | None:
        value: int | None = getattr(found, name, None)
        return value

    return {
        "allocated": measured(of("alloc"), source, missing),
        "in_use": measured(of("in_use"), source, missing),
        "limit": _limit(machine),
        "utilization": measured(of("device_util_pct"), source, missing, "percent"),
        "power": unavailable("needs two samples, which only a page takes", "W"),
        "cores": measured(machine.gpu_cores or of("gpu_cores"), source, missing, "cores"),
        "recoveries": measured(of("recovery_count"), source, missing, "count"),
    }


def with_profiler(cores: Metric) -> Metric:
    """The cores of the GPU, asked of ``system_profiler`` where nothing quicker told them."""
    if cores.value is not None or sys.platform != "darwin":
        return cores
    from uma.system.darwin import read_displays

    told = parse_displays(read_displays())["gpu_cores"]
    return measured(told, "system_profiler", "neither ioreg nor system_profiler tells", "cores")


def _limit(machine: Machine) -> Metric:
    """The limit in force; an estimate where a rule gives it, or only a range is known."""
    ruled = machine.limit_high_bytes is not None or "default of macOS" in machine.limit_source
    return Metric(machine.limit_bytes, source=machine.limit_source, estimated=ruled)


def nvidia_gpu(cards: Sequence[nvidia.Card], machine: Machine) -> Metrics:
    """Of NVIDIA's cards together. GB10 has no memory of its own: then the machine's counts."""
    own = [card for card in cards if card.memory_bytes is not None]
    if own:
        used = [card.used_bytes for card in own]
        held = None if None in used else sum(size or 0 for size in used)
        allocated = measured(held, "NVML", "the driver does not tell it")
        limit = Metric(sum(card.memory_bytes or 0 for card in own), source="NVML")
    else:
        reason = "NVML: not supported, the card shares the machine's memory"
        allocated = unavailable(reason)
        limit = Metric(machine.memory_bytes, source="meminfo (UMA)")
    busy = [card.busy_percent for card in cards if card.busy_percent is not None]
    power = [card.power_w for card in cards if card.power_w is not None]
    missing = "the driver does not tell it"
    return no_gpu() | {
        "allocated": allocated,
        "in_use": unavailable(missing),
        "limit": limit,
        "utilization": measured(max(busy, default=None), "NVML", missing, "percent"),
        "power": measured(sum(power) if power else None, "NVML", missing, "W"),
        "cores": unavailable(missing, "cores"),
        "recoveries": unavailable(missing, "count"),
    }


def amd_gpu(cards: Sequence[amdgpu.AmdGpu], machine: Machine) -> Metrics:
    """Of AMD's cards together: both pools, which on an APU are parts of the machine's memory."""
    source, missing = "amdgpu mem_info_vram, mem_info_gtt", "the driver has no such file"
    totals = [size for card in cards for size in (card.vram_total, card.gtt_total)]
    used = [size for card in cards for size in (card.vram_used, card.gtt_used)]
    busy = [card.busy_percent for card in cards if card.busy_percent is not None]
    return no_gpu() | {
        "allocated": measured(_sum(used), source, missing),
        "limit": measured(_sum(totals), source, missing),
        "utilization": measured(
            max(busy, default=None), "amdgpu gpu_busy_percent", missing, "percent"
        ),
    }


def _sum(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes or not sizes else sum(size or 0 for size in sizes)
