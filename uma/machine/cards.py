"""Machines whose cards have memory of their own."""

from collections.abc import Sequence

from uma.machine.facts import Device, Machine
from uma.units import MIB, format_gib

# What NVIDIA's drivers keep of a card, smallest and largest: 205 MiB on Windows, 614 on an H200
# (nvidia-smi's memory.reserved on ten machines, utkuozdemir/nvidia_gpu_exporter e656cd8,
# internal/captures).
RESERVED_BYTES = (205 * MIB, 614 * MIB)


def discrete(
    devices: Sequence[Device],
    limits: tuple[int, int],
    *,
    name: str,
    source: str,
    notes: tuple[str, ...] = (),
    host_memory_bytes: int | None = None,
    host_available_bytes: int | None = None,
    link_bytes_per_s: int | None = None,
    price_usd: int | None = None,
    os: str | None = None,
    os_version: str | None = None,
    cpu: str | None = None,
) -> Machine:
    """A machine of these cards, which leave ``limits`` bytes, at least and at most, to programs.

    The context of each card but the first is taken off: an engine's own terms count one.
    """
    others = 0
    if len(devices) > 1:
        others = context_bytes() * (len(devices) - 1)
        notes = (
            f"{len(devices)} cards: {format_gib(others)} are taken off for the contexts of all "
            "but the first",
            *notes,
        )
    free = [device.available_bytes for device in devices]
    low, high = (limit - others for limit in limits)
    return Machine(
        name=name,
        kind="discrete",
        backend="cpu",
        memory_bytes=sum(device.memory_bytes for device in devices),
        limit_bytes=low,
        limit_source=source,
        limit_high_bytes=high if high > low else None,
        available_bytes=None if None in free else max(0, sum(f or 0 for f in free) - others),
        cpu=cpu,
        os=os,
        os_version=os_version,
        notes=notes,
        devices=tuple(devices),
        host_memory_bytes=host_memory_bytes,
        host_available_bytes=host_available_bytes,
        link_bytes_per_s=link_bytes_per_s,
        bandwidth_bytes_per_s=_least([device.bandwidth_bytes_per_s for device in devices]),
        flops_per_s=_least([device.flops_per_s for device in devices]),
        price_usd=price_usd,
    )


def context_bytes() -> int:
    """What a process holds on a card before it computes anything."""
    from uma.engines.cuda import CUDA_CONTEXT

    return CUDA_CONTEXT


def _least(rates: Sequence[int | None]) -> int | None:
    """The slowest, which the layers of the others wait for; ``None`` if one is not known."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None
