"""The machine a command is about: one that is named or described, else this one."""

from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from uma.errors import UnknownName, UsageError
from uma.machine.cards import RESERVED_BYTES, context_bytes, discrete
from uma.machine.facts import Device, Machine
from uma.units import GIB, format_gib

if TYPE_CHECKING:
    from uma.system.nvidia import Card

SPILL_NOTE = (  # nvidia.custhelp.com, answer 5490: drivers from 536.40 on
    "Windows moves what does not fit on the card to shared memory, and is slow instead of failing; "
    "in NVIDIA's control panel, CUDA - Sysmem Fallback Policy turns that off"
)
WSL_NOTE = (
    "WSL does not see what Windows itself holds of the card; give what Windows leaves as --vram"
)

MIG_NOTE = "MIG divides the card: a program sees one instance; give its size as --vram"


def machine_of(
    name: str | None = None,
    *,
    ram_bytes: int | None = None,
    gpu_limit_bytes: int | None = None,
    vram_bytes: int | None = None,
    host_ram_bytes: int | None = None,
    macos: int | None = None,
) -> Machine:
    """The machine of ``--machine``, or of ``--ram``, else this one; with what the others override.

    Raises:
        UnknownName: If nothing is called ``name``.
        UsageError: If the options contradict each other or the machine.
    """
    from uma.machine.named import described_machine, machine_named, with_gpu_limit

    if ram_bytes is not None:
        if name is not None or vram_bytes is not None:
            raise UsageError("--ram describes a whole machine: leave out --machine and --vram")
        return described_machine(ram_bytes, gpu_limit_bytes, macos)
    machine = this_machine() if name is None else machine_named(name, macos=macos)
    if vram_bytes is not None:
        machine = with_vram(machine, vram_bytes, sold=name is not None)
    if host_ram_bytes is not None:
        machine = _with_host(machine, host_ram_bytes)
    return machine if gpu_limit_bytes is None else with_gpu_limit(machine, gpu_limit_bytes)


def this_machine() -> Machine:
    """This machine now, with its NVIDIA cards where it has any.

    ``read_machine`` is the same without them: what MLX runs on.
    """
    from uma.machine.live import read_machine
    from uma.system import nvidia

    here = read_machine()
    if here.backend == "metal":
        return with_speed(here)
    return with_cards(here, nvidia.read_cards(), wsl=nvidia.is_wsl())


def with_speed(mac: Machine) -> Machine:
    """``mac`` with the bandwidth and rate of its chip, where the catalog knows that."""
    from uma.catalog import find_chips
    from uma.machine.named import chip_speed

    if mac.chip is None:
        return mac
    try:
        bins = find_chips(mac.chip, mac.gpu_cores, mac.memory_bytes // GIB)
    except UnknownName:
        return mac
    speeds = {chip_speed(chip) for chip in bins}
    if len(speeds) > 1:
        return mac
    bandwidth, flops = speeds.pop()
    return replace(mac, bandwidth_bytes_per_s=bandwidth, flops_per_s=flops)


def with_cards(here: Machine, cards: "tuple[Card, ...]", *, wsl: bool = False) -> Machine:
    """``here`` with these cards; one memory where they have none of their own (GB10)."""
    own = [card for card in cards if card.memory_bytes is not None]
    if not cards:
        return here
    if not own:
        return replace(
            here,
            name=f"{cards[0].name}, {format_gib(here.memory_bytes)}",
            kind="unified",
            chip=cards[0].name,
            notes=("the file cache counts as free: a program that wants it all may have to wait",),
        )
    limits = [_left(card) for card in own]
    said = (
        (SPILL_NOTE, wsl or here.os == "Windows"),
        (WSL_NOTE, wsl),
        (MIG_NOTE, any(card.mig for card in own)),
    )
    return discrete(
        [_device(card) for card in own],
        (sum(low for low, _ in limits), sum(high for _, high in limits)),
        name=" + ".join(_counted([card.name for card in own])),
        source="memory that the driver reports, less what it keeps",
        notes=tuple(note for note, holds in said if holds),
        host_memory_bytes=here.limit_bytes,
        host_available_bytes=here.available_bytes,
        link_bytes_per_s=min((c.link_bytes_per_s for c in own if c.link_bytes_per_s), default=None),
        cpu=here.cpu,
        os=here.os,
        os_version=here.os_version,
    )


def with_vram(machine: Machine, vram_bytes: int, *, sold: bool = False) -> Machine:
    """``machine`` as if each of its cards, one if it has none, left ``vram_bytes`` to programs.

    With ``sold`` they are what a card of its name has, of which the driver keeps as much as it does
    without.

    Raises:
        UsageError: If its memory is unified, or the size is not positive.
    """
    if machine.kind == "unified":
        raise UsageError("--vram is for cards; a limit of unified memory is given by --gpu-limit")
    if vram_bytes <= 0:
        raise UsageError(f"--vram: a card of {vram_bytes} bytes holds nothing")
    devices = [
        replace(device, memory_bytes=vram_bytes, available_bytes=None)
        for device in machine.devices or (Device("one card", vram_bytes),)
    ]
    own = machine.kind == "host"
    total = vram_bytes * len(devices)
    most, least = _kept(machine) if sold else (0, 0)
    if total <= most:
        raise UsageError(f"--vram: the driver alone keeps {format_gib(most)}; give more")
    return discrete(
        devices,
        (total - most, total - least),
        name=" + ".join(_counted([device.name for device in devices])),
        source="--vram, less what the driver keeps" if sold else "--vram",
        notes=tuple(note for note in machine.notes if note == SPILL_NOTE),
        host_memory_bytes=machine.limit_bytes if own else machine.host_memory_bytes,
        host_available_bytes=machine.available_bytes if own else machine.host_available_bytes,
        link_bytes_per_s=machine.link_bytes_per_s,
        price_usd=machine.price_usd,
        cpu=machine.cpu,
        os=machine.os,
        os_version=machine.os_version,
    )


def _kept(machine: Machine) -> tuple[int, int]:
    """What the drivers of all cards keep, at most and at least."""
    usable = machine.memory_bytes - context_bytes() * (len(machine.devices) - 1)
    high = machine.limit_high_bytes or machine.limit_bytes
    return usable - machine.limit_bytes, usable - high


def _with_host(machine: Machine, host_ram_bytes: int) -> Machine:
    if machine.kind != "discrete":
        raise UsageError("--host-ram is for machines with cards; unified memory is given by --ram")
    return replace(machine, host_memory_bytes=host_ram_bytes, host_available_bytes=None)


def _left(card: "Card") -> tuple[int, int]:
    """What the driver leaves of a card: known where it says what it keeps."""
    assert card.memory_bytes is not None
    if card.reserved_bytes is not None:
        return (card.memory_bytes - card.reserved_bytes,) * 2
    return card.memory_bytes - RESERVED_BYTES[1], card.memory_bytes - RESERVED_BYTES[0]


def _device(card: "Card") -> Device:
    """A card with what the catalog knows of its speed."""
    from uma.catalog import Gpu
    from uma.machine.named import gpu_device
    from uma.machine.names import find

    assert card.memory_bytes is not None
    free = None
    if card.used_bytes is not None:
        free = max(0, card.memory_bytes - (card.reserved_bytes or 0) - card.used_bytes)
    try:
        row = find(card.name).entries[0].row
    except UnknownName:
        row = None
    known = gpu_device(row) if isinstance(row, Gpu) else Device(card.name, card.memory_bytes)
    return replace(known, name=card.name, memory_bytes=card.memory_bytes, available_bytes=free)


def _counted(names: list[str]) -> list[str]:
    """Equal names as ``2 x name``, in their order.

    >>> _counted(["a", "b", "a"])
    ['2 x a', 'b']
    """
    counts = reduce(lambda c, n: c | {n: c.get(n, 0) + 1}, names, dict[str, int]())
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
