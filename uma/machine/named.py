"""Machines that are only described: by a name of the catalog, or by their memory."""

import re
from dataclasses import replace

from uma.catalog import Chip, Gpu, Mac, UnifiedMachine, bytes_per_s, find_chips
from uma.errors import UnknownName, UsageError
from uma.machine.cards import RESERVED_BYTES, discrete
from uma.machine.facts import Device, Machine
from uma.machine.names import Entry, Found, find
from uma.system.working_set import largest_buffer_bytes, working_set_range
from uma.units import GIB, MIB, format_gib, parse_bytes

_TFLOPS = 10**12
_ASIDE = r"\s*(\(.*?\)|\d+\s*GB)"
_PLUS = re.compile(r"\s\+\s|(?<=\w)\+(?=[a-zA-Z]|\d{3})")  # not that of "Max+ 395"
_FIRST_MACOS_26_CHIP = re.compile(r"M([5-9]|\d\d)\b|A18")  # the M5 came out with macOS 26


def sold_bytes(text: str, name: str = "--ram") -> int:
    """Memory as it is sold: ``64GB`` is 64 GiB, as ``64GiB`` is.

    Raises:
        UsageError: If it is not a size.

    >>> sold_bytes("64GB") == sold_bytes("64 GiB") == 64 * GIB
    True
    """
    try:
        return parse_bytes(re.sub(r"(?i)(?<=[kmgt])b\b", "iB", text))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def machine_named(name: str, *, macos: int | None = None, gpu_cores: int | None = None) -> Machine:
    """The machine that ``name`` means, such as ``mac-studio-m3-ultra-512`` or ``2xh100``.

    ``macos`` is the major version, which sets a Mac's GPU limit; a range without it.

    Raises:
        UnknownName: If nothing, or no one thing, is called that.
        UsageError: If its memory is not known.
    """
    parts = [part for part in _PLUS.split(name) if part.strip()]
    found = [find(part) for part in parts] or [find(name)]
    if len(found) == 1:
        return machine_of_rows(found[0], macos=macos, gpu_cores=gpu_cores)
    if not all(isinstance(one.entries[0].row, Gpu) for one in found):
        raise UsageError(f"{name!r}: only graphics cards can be put together, as in 4090+3090")
    return _cards(found)


def machine_of_rows(
    found: Found, *, macos: int | None = None, gpu_cores: int | None = None
) -> Machine:
    """The machine that these rows of the catalog are.

    Raises:
        UnknownName: If it was not made with so many GPU cores.
        UsageError: If its memory is not known.
    """
    row = found.entries[0].row
    if isinstance(row, Gpu):
        return _cards([found])
    if isinstance(row, UnifiedMachine):
        return _unified(row, found)
    return _mac(found, macos or found.macos, gpu_cores or found.cores)


def described_machine(
    ram_bytes: int, gpu_limit_bytes: int | None = None, macos: int | None = None
) -> Machine:
    """A Mac of which only the memory is known, and perhaps its GPU limit.

    Raises:
        UsageError: If there is no memory, or the limit is above it.
    """
    if ram_bytes < GIB:
        raise UsageError(f"--ram: {format_gib(ram_bytes)} is less than a machine has")
    machine = _apple(f"{format_gib(ram_bytes)} of unified memory", ram_bytes, macos)
    return machine if gpu_limit_bytes is None else with_gpu_limit(machine, gpu_limit_bytes)


def with_gpu_limit(machine: Machine, limit_bytes: int) -> Machine:
    """``machine`` with the GPU limit that its owner set or read.

    Raises:
        UsageError: If its memory is not one pool, or smaller.
    """
    if machine.kind != "unified":
        raise UsageError("--gpu-limit is for unified memory; a card's memory is given by --vram")
    if not 0 < limit_bytes <= machine.memory_bytes:
        raise UsageError(
            f"--gpu-limit: {format_gib(limit_bytes)} is not within the machine's "
            f"{format_gib(machine.memory_bytes)}"
        )
    return replace(
        machine, limit_bytes=limit_bytes, limit_high_bytes=None, limit_source="--gpu-limit"
    )


def _apple(name: str, memory_bytes: int, macos: int | None) -> Machine:
    low, high = working_set_range(memory_bytes, macos)
    version = "an unknown version of macOS" if macos is None else f"macOS {macos}"
    return Machine(
        name=name,
        kind="unified",
        backend="metal",
        memory_bytes=memory_bytes,
        limit_bytes=low,
        limit_source=f"the default of {version} for this memory",
        limit_high_bytes=high if high > low else None,
        max_buffer_bytes=largest_buffer_bytes(low),
        os="macOS",
        os_version=None if macos is None else str(macos),
    )


def _mac(found: Found, macos: int | None, cores: int | None) -> Machine:
    """A Mac, or a chip with memory. Of several chips that it was sold with the smallest."""
    entry, memory = found.entries[0], found.memory_gib
    assert memory is not None
    assert isinstance(entry.row, Chip | Mac)
    bins = _bins(found.entries, entry.row.chip, memory, cores)
    chip = bins[0]
    if macos is None and _FIRST_MACOS_26_CHIP.match(chip.chip):
        macos = 26
    label = _family(entry.row) if isinstance(entry.row, Mac) else "Apple"
    machine = _apple(f"{label} {chip.chip}, {memory} GiB", memory * GIB, macos)
    others = sorted({b.gpu_cores for b in bins if b.gpu_cores is not None} - {chip.gpu_cores})
    notes: tuple[str, ...] = ()
    if others:
        listed = " or ".join(map(str, others))
        notes = (
            f"taken with {chip.gpu_cores} GPU cores; also sold with {listed}: say so, as in "
            f"{entry.name}-{others[-1]}-core",
        )
    prices = [e.row.price_usd for e in found.entries if isinstance(e.row, Mac) and e.row.price_usd]
    bandwidth, flops = chip_speed(chip)
    return replace(
        machine,
        chip=f"Apple {chip.chip}",
        gpu_cores=chip.gpu_cores,
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=flops,
        price_usd=min(prices, default=None),
        notes=notes,
    )


def chip_speed(chip: Chip) -> tuple[int | None, int | None]:
    """Bytes per second of its memory, and FLOPs per second in 16 bits, by its fastest units."""
    return _rate(chip.bandwidth_gb_per_s), _flops(chip.neural_fp16_tflops or chip.fp16_tflops)


def _family(mac: Mac) -> str:
    return re.split(r"\s[\d(]", mac.model)[0]


def _bins(entries: tuple[Entry, ...], chip: str, memory: int, cores: int | None) -> list[Chip]:
    """The bins of the chip that these rows have, the fewest GPU cores first.

    Raises:
        UnknownName: If none has so many cores.
    """
    told = {n for e in entries if isinstance(e.row, Mac) for n in e.row.gpu_cores}
    bins = [b for b in find_chips(chip, memory_gib=memory) if not told or b.gpu_cores in told]
    bins = bins or list(find_chips(chip, memory_gib=memory))
    chosen = [b for b in bins if cores in (None, b.gpu_cores)]
    chosen = chosen or [b for b in bins if cores == b.cpu_cores]
    if not chosen:
        known = ", ".join(str(b.gpu_cores) for b in bins)
        raise UnknownName(f"no {entries[0].name} has {cores} GPU cores; known: {known}")
    return sorted(chosen, key=lambda b: b.gpu_cores or 0)


def _unified(row: UnifiedMachine, found: Found) -> Machine:
    """A machine with one memory that is no Mac, or with two tiers of it.

    Raises:
        UsageError: If its memory is not known.
    """
    if row.host_memory_gib is not None:
        return _tiers(row)
    if found.memory_gib is None:
        raise UsageError(
            f"{row.name} is sold with different memory, which is not in the catalog: write it "
            "behind the name, such as 32GB"
        )
    memory = found.memory_gib * GIB
    usable = memory if row.gpu_usable_gib is None else round(row.gpu_usable_gib * GIB)
    high = None if row.gpu_usable_high_gib is None else round(row.gpu_usable_high_gib * GIB)
    notes = () if not row.gpu_limit_note else (row.gpu_limit_note,)
    if row.gpu_usable_gib is None:
        notes = (*notes, "how much of its memory the GPU may use is not known: taken as all of it")
    return Machine(
        name=f"{re.sub(_ASIDE, '', row.name)}, {found.memory_gib} GiB",
        kind="unified",
        backend="cpu",
        memory_bytes=memory,
        limit_bytes=min(usable, memory),
        limit_source="all memory" if row.gpu_usable_gib is None else "what its GPU is given",
        limit_high_bytes=high,
        chip=row.chip,
        notes=notes,
        bandwidth_bytes_per_s=_rate(row.bandwidth_gb_per_s),
        flops_per_s=_flops(row.bf16_tflops or row.fp16_tflops),
        price_usd=row.price_usd,
    )


def _tiers(row: UnifiedMachine) -> Machine:
    """GH200 and its like: the fast tier is a card's memory, the slow one the host's."""
    assert row.gpu_usable_gib is not None
    assert row.host_memory_gib is not None
    fast = Device(
        name=row.chip,
        memory_bytes=round(row.gpu_usable_gib * GIB),
        bandwidth_bytes_per_s=_rate(row.bandwidth_gb_per_s),
        flops_per_s=_flops(row.bf16_tflops or row.fp16_tflops),
    )
    machine = discrete(
        [fast],
        _left_to_programs(fast.memory_bytes, "NVIDIA"),
        name=re.sub(_ASIDE, "", row.name),
        source="memory of its fast tier less what the driver keeps",
        host_memory_bytes=row.host_memory_gib * GIB,
        link_bytes_per_s=_rate(row.link_gb_per_s),
        price_usd=row.price_usd,
        notes=(
            f"two tiers in one address space: {format_gib(fast.memory_bytes)} at full speed, "
            f"{row.host_memory_gib} GiB behind a link; they are never counted as one",
        ),
    )
    return replace(machine, chip=row.chip)


def _cards(found: list[Found]) -> Machine:
    """One card or several, of one kind or more."""
    devices: list[Device] = []
    limits = [0, 0]
    names, notes, prices, links = [], [], [], []
    for one in found:
        row = one.entries[0].row
        assert isinstance(row, Gpu)
        device = gpu_device(row)
        devices += [device] * one.number
        low, high = _left_to_programs(device.memory_bytes, row.vendor)
        limits = [limits[0] + low * one.number, limits[1] + high * one.number]
        names.append(f"{one.number} x {row.name}" if one.number > 1 else row.name)
        prices.append(None if row.price_usd is None else row.price_usd * one.number)
        links.append(_rate(row.pcie_gb_per_s))
        notes += _card_notes(row, one)
    known = [price for price in prices if price is not None]
    slowest = [link for link in links if link is not None]
    return discrete(
        devices,
        (limits[0], limits[1]),
        name=" + ".join(names),
        source="memory that the driver reports, less what it keeps",
        notes=tuple(dict.fromkeys(notes)),
        link_bytes_per_s=min(slowest, default=None),
        price_usd=sum(known) if len(known) == len(prices) else None,
    )


def gpu_device(row: Gpu) -> Device:
    """A card of the catalog; as much memory as is sold where no driver's report is known."""
    mib = row.memory_gb * 1024 if row.memory_mib is None else row.memory_mib
    return Device(
        name=row.name,
        memory_bytes=mib * MIB,
        bandwidth_bytes_per_s=_rate(row.bandwidth_gb_per_s),
        flops_per_s=_flops(row.bf16_tflops or row.fp16_tflops),
    )


def _left_to_programs(memory_bytes: int, vendor: str) -> tuple[int, int]:
    """The least and the most of a card that its driver leaves."""
    least, most = RESERVED_BYTES if vendor == "NVIDIA" else (0, RESERVED_BYTES[1])
    return memory_bytes - most, memory_bytes - least


def _card_notes(row: Gpu, found: Found) -> list[str]:
    notes = []
    if row.memory_mib is None:
        notes.append(f"{row.name}: what its driver reports is not known, taken as sold")
    if found.others:
        notes.append(f"taken as {found.entries[0].name}; could be {', '.join(found.others)}")
    return notes


def _rate(gb_per_s: float | None) -> int | None:
    return None if gb_per_s is None else bytes_per_s(gb_per_s)


def _flops(tflops: float | None) -> int | None:
    return None if tflops is None else round(tflops * _TFLOPS)
