"""What limits a processor: how fast it reads its memory, and how fast it multiplies."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from uma.catalog import Chip, Gpu, bytes_per_s, find_chips, gpus, unified_machines
from uma.errors import UnknownName, UsageError
from uma.machine.calibration import Calibration
from uma.machine.facts import Device, Machine
from uma.machine.names import find

DeviceClass = Literal["apple", "card", "unified", "cpu"]
"""Apple's GPUs; NVIDIA's, on cards or beside one memory, and other cards; AMD's beside one memory;
cores of a CPU."""

_TERA = 10**12

OTHER_VENDOR = "its speed is taken as that of NVIDIA's cards, which alone were measured"

# What GPUs of one memory were measured to read of the vendor's bandwidth, where a machine's own
# figure is not known: 212 of 256 GB/s, 231.8 of 273 (``bandwidth.csv``, Strix Halo and GB10).
STREAMED = 0.84


@dataclass(frozen=True, slots=True)
class Processor:
    """Its vendor's figures; ``None`` is not known.

    ``vector_flops_per_s`` are in float32, of the units that multiply a matrix with a vector.
    ``matrix_flops_per_s`` are dense, in 16 bits, of the fastest units that a prompt can use: on
    cards they accumulate in 16 bits too, as llama.cpp's do; ``training_flops_per_s`` accumulate in
    32. ``link_bytes_per_s`` joins it with others of its kind, in one direction. ``one_memory`` says
    that the host's cores share its memory, whose bandwidth is then what was measured, if it was.
    ``reads_bytes_per_s`` is what a kernel reached on this very machine (``uma doctor``): it takes
    the place of the part of the bandwidth that its class reaches.
    """

    device: DeviceClass
    name: str
    bandwidth_bytes_per_s: int | None
    vector_flops_per_s: int | None = None
    matrix_flops_per_s: int | None = None
    training_flops_per_s: int | None = None
    link_bytes_per_s: int | None = None
    notes: tuple[str, ...] = ()
    one_memory: bool = False
    reads_bytes_per_s: int | None = None

    @property
    def tile_tokens(self) -> int:
        """Tokens that a product of an expert's matrix is computed for at least, in a long prompt.

        llama.cpp b11434: ``ggml-cuda/mmq.cuh``, ``get_mmq_x_max_host``; ``ggml-vulkan.cpp``,
        ``l_warptile``. Metal's tiles are small.
        """
        return 128 if self.device in ("card", "unified") else 1


def processors_of(machine: Machine) -> tuple[Processor, ...]:
    """The processors that run a model on ``machine``: its cards one by one, else its GPU or CPU."""
    if machine.devices:
        return tuple(card_processor(device) for device in machine.devices)
    bandwidth = machine.bandwidth_bytes_per_s
    if machine.backend == "metal":
        bins = _bins(machine.chip, machine.gpu_cores)
        reads = _measured(machine.calibration)
        found = replace(apple_processor(bins), bandwidth_bytes_per_s=bandwidth)
        return (found if reads is None else replace(found, reads_bytes_per_s=reads),)
    if machine.kind == "unified":
        return (shared_processor(machine),)
    return (host_processor(machine, bandwidth),)


def _measured(calibration: Calibration | None) -> int | None:
    """The bandwidth of the GPU, if it was measured while nothing else was busy."""
    if calibration is None or calibration.device != "gpu" or calibration.busy:
        return None
    return calibration.bandwidth_bytes_per_s


def shared_processor(machine: Machine) -> Processor:
    """The GPU of a machine with one memory that is no Mac, with what the catalog knows of it."""
    rows = [row for row in unified_machines() if row.chip == machine.chip]
    nvidia = any(row.vendor == "NVIDIA" for row in rows)
    achieved = _same(row.achieved_gb_per_s for row in rows)
    bandwidth = machine.bandwidth_bytes_per_s
    if achieved is not None:
        bandwidth = bytes_per_s(achieved)
    elif bandwidth is not None:
        bandwidth = round(STREAMED * bandwidth)
    return Processor(
        "card" if nvidia else "unified",
        machine.name,
        bandwidth,
        _flops(_same(row.fp32_tflops for row in rows)),
        _flops(_same(row.fp16_tflops for row in rows)) or machine.flops_per_s,
        machine.flops_per_s,
        one_memory=True,
    )


def host_processor(machine: Machine, bandwidth_bytes_per_s: int | None) -> Processor:
    """The CPU beside the cards, with the bandwidth of its memory: the catalog has none."""
    return Processor("cpu", machine.cpu or "the host's cores", bandwidth_bytes_per_s)


def apple_processor(bins: Iterable[Chip]) -> Processor:
    """The GPU of these bins of a chip; what differs between them is not known.

    Apple's GPUs multiply in 16 bits as fast as in 32 (``chips.csv``, M1 and M2), but for the
    neural accelerators from M5 on. A bin of which only the cores are known has the rate of its
    sibling, core for core.
    """
    chosen = tuple(bins)
    vector = _same(_vector_tflops(chip) for chip in chosen)
    neural = _same(chip.neural_fp16_tflops for chip in chosen)
    bandwidth = _same(chip.bandwidth_gb_per_s for chip in chosen)
    return Processor(
        "apple",
        f"Apple {chosen[0].chip}" if chosen else "Apple GPU",
        None if bandwidth is None else bytes_per_s(bandwidth),
        _flops(vector),
        _flops(neural or vector),
        _flops(neural or vector),
        one_memory=True,
    )


def card_processor(device: Device) -> Processor:
    """A card with what the catalog knows of it; its own figures where it is not listed."""
    row = _listed_card(device.name)
    if row is None:
        return Processor("card", device.name, device.bandwidth_bytes_per_s, None, None)
    return Processor(
        "card",
        device.name,
        device.bandwidth_bytes_per_s,
        _flops(row.fp32_tflops),
        _flops(row.fp16_tflops or row.bf16_tflops),
        _flops(row.bf16_tflops or row.fp16_tflops),
        _link(row),
        () if row.vendor == "NVIDIA" else (OTHER_VENDOR,),
    )


@cache
def _listed_card(name: str) -> Gpu | None:
    """The catalog's row of a card, under its own name or its driver's."""
    row: object = next((one for one in gpus() if one.name == name), None)
    if isinstance(row, Gpu):
        return row
    if any(one.chip == name for one in unified_machines()):
        return None  # to look for names that are like it would take longer
    try:
        row = find(name).entries[0].row
    except (UnknownName, UsageError):
        return None
    return row if isinstance(row, Gpu) else None


@cache
def _bins(chip: str | None, gpu_cores: int | None) -> tuple[Chip, ...]:
    try:
        return find_chips(chip or "", gpu_cores)
    except UnknownName:
        return ()


def _vector_tflops(chip: Chip) -> float | None:
    if chip.fp32_tflops is not None:
        return chip.fp32_tflops
    for other in _bins(chip.chip, None):
        if other.fp32_tflops and other.gpu_cores and chip.gpu_cores:
            return other.fp32_tflops * chip.gpu_cores / other.gpu_cores
    return None


def _link(row: Gpu) -> int | None:
    """NVLink where a card has it, else PCI Express; NVLink's figure is that of both directions."""
    if row.nvlink_gb_per_s:
        return bytes_per_s(row.nvlink_gb_per_s / 2)
    return None if row.pcie_gb_per_s is None else bytes_per_s(row.pcie_gb_per_s)


def _same(values: Iterable[float | None]) -> float | None:
    """The one value of all; ``None`` if there are several."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _flops(tflops: float | None) -> int | None:
    return None if tflops is None else round(tflops * _TERA)
