"""The devices of a measured rate, the weights on each, and what the host computes."""

import re
from dataclasses import replace
from functools import cache

from uma.architecture.layers import Architecture
from uma.catalog import find_chips, model_config
from uma.engines import transformers, vllm
from uma.errors import UmaError, UnknownName
from uma.machine.named import machine_named
from uma.memory.reads import Stored, evenly_stored, experts_of, weight_reads
from uma.speed import Host, Processor
from uma.speed.processor import apple_processor, processors_of
from uma.speed.stored import gguf_stored, mlx_stored
from uma.units import GB, GIB, MIB
from uma.workload import Engine

from . import cuda, llama_cpp, mlx
from .rows import FORMAT, INCOMPLETE, MACHINE, Row, Skipped, Subject, cards_of, decimal, number

# Bandwidth of a host's memory where the row tells its processor or its memory, in bytes a second:
# Intel ARK and AMD's product pages; else channels of DDR times their rate.
HOSTS = ((r"i9-10900X", 94 * GB), (r"Ryzen 7 5700X", round(51.2 * GB)))
DDR = re.compile(r"DDR\d-(\d{4}) (dual|quad) channel")
CHANNELS = {"dual": 2, "quad": 4}

UNITS = {"GiB": GIB, "MiB": MIB, "bytes": 1}


def processors_told(row: Row) -> tuple[Processor, ...]:
    """The devices of a row, all alike.

    Raises:
        Skipped: If the chip or its bandwidth is not told, or not known.
    """
    bandwidth = round(decimal(row["bandwidth_gbs"]) * GB) or None
    if row["backend"] == "CPU" or row["offload_layers"].startswith("0 "):
        rate = bandwidth or _host_bandwidth(row)
        if rate is None:
            raise Skipped(MACHINE)
        return (Processor("cpu", row["chip"], rate),)
    one = device_named(row["chip"], row["gpu_cores"], row["mem_per_device_gb"], bandwidth)
    if one.bandwidth_bytes_per_s is None:
        raise Skipped(MACHINE)
    return (one,) * cards_of(row)


@cache
def device_named(chip: str, cores: str, memory: str, bandwidth: int | None) -> Processor:
    """The device of that name; of several bins those that the row's figures leave.

    Raises:
        Skipped: If the catalog has none.
    """
    size = round(decimal(memory))
    if chip.startswith("Apple"):
        return _apple(chip, number(cores) or None, size, bandwidth)
    plain = re.sub(r"\(.*?\)", "", chip).strip()
    for name in (plain, f"{plain} {size}GB", chip):
        try:
            found = processors_of(machine_named(name))[0]
        except UmaError:
            continue
        return replace(found, bandwidth_bytes_per_s=found.bandwidth_bytes_per_s or bandwidth)
    raise Skipped(MACHINE)


def _apple(chip: str, cores: int | None, memory: int, bandwidth: int | None) -> Processor:
    try:
        bins = find_chips(chip, cores)
    except UnknownName:
        raise Skipped(MACHINE) from None
    if memory:
        bins = tuple(one for one in bins if memory in one.memory_gib) or bins
    if bandwidth:
        near = (
            one
            for one in bins
            if one.bandwidth_gb_per_s and abs(one.bandwidth_gb_per_s * GB / bandwidth - 1) < 0.05
        )
        bins = tuple(near) or bins
    found = apple_processor(bins)
    return replace(found, bandwidth_bytes_per_s=found.bandwidth_bytes_per_s or bandwidth)


def stored_weights(row: Row, engine: Engine, subject: Subject) -> list[Stored]:
    """Every parameter with its bytes.

    A mixture of types that no program's rules give is taken as even, where the row tells its size.

    Raises:
        Skipped: If the format is not told or not claimed.
    """
    try:
        return list(_cached_stored(engine, subject))
    except Skipped as skipped:
        unit = UNITS.get(row["weights_unit"])
        if str(skipped) != FORMAT or unit is None or not decimal(row["weights_size"]):
            raise
        size = decimal(row["weights_size"]) * unit
        return list(evenly_stored(subject.architecture, size))


@cache
def _cached_stored(engine: Engine, subject: Subject) -> tuple[Stored, ...]:
    architecture = subject.architecture
    if engine == "mlx":
        config = model_config(subject.model).values
        chosen = mlx.mlx_format(architecture, subject.format, config)
        return tuple(mlx_stored(architecture, chosen))
    if engine == "llama.cpp":
        return tuple(gguf_stored(architecture, _mix(subject)))
    module = transformers if engine == "transformers" else vllm
    try:
        weights = module.weights_term(architecture, cuda.quant_name(subject.format))
    except UnknownName as error:
        raise Skipped(FORMAT) from error
    return tuple(evenly_stored(architecture, weights.size_bytes))


def _mix(subject: Subject) -> str:
    named = subject.format
    mxfp4 = named is not None and named.scheme == "mxfp4"
    return "MXFP4_MOE" if mxfp4 else llama_cpp.mix_of(named)


def host_part(
    row: Row, architecture: Architecture, stored: list[Stored]
) -> tuple[Host | None, list[Stored]]:
    """What the host computes, and the weights that are left to the devices.

    Raises:
        Skipped: If the row does not say which, or nothing tells how fast the host's memory is.
    """
    told = row["offload_layers"]
    if row["backend"] == "CPU" or told == "" or told.startswith(("all", "0 ")):
        if "CPU" in row["backend"] and row["backend"] != "CPU":
            raise Skipped(INCOMPLETE)
        return None, stored
    experts = re.search(r"n-cpu-moe (\d+)", told)
    layers = re.fullmatch(r"ngl (\d+)", told)
    bandwidth = _host_bandwidth(row)
    if not (experts or layers):
        raise Skipped(INCOMPLETE)
    if bandwidth is None:
        raise Skipped(MACHINE)
    moved = _moved(len(architecture.layers), experts, layers)
    on_host = [one for one in stored if _is_moved(architecture, one, moved, bool(experts))]
    rest = [one for one in stored if one not in on_host]
    processor = Processor("cpu", row["machine"], bandwidth)
    reads = weight_reads(architecture, on_host)
    return Host(processor, reads, moved, whole=not experts), rest


def _moved(count: int, experts: re.Match[str] | None, layers: re.Match[str] | None) -> int:
    """Layers that the host has a part in; the head is the first that ``-ngl`` puts on a card."""
    if experts is not None:
        return min(count, int(experts[1]))
    return max(0, count + 1 - int(layers[1])) if layers is not None else 0


def _is_moved(architecture: Architecture, one: Stored, layers: int, experts_only: bool) -> bool:
    if one.layer is None or one.layer >= layers:
        return False
    routed = experts_of(architecture, one.layer)
    stacked = routed is not None and len(one.shape) == 3 and one.shape[0] == routed.num_experts
    return stacked or not experts_only


def _host_bandwidth(row: Row) -> int | None:
    for pattern, rate in HOSTS:
        if re.search(pattern, row["machine"]):
            return rate
    told = DDR.search(row["machine"])
    return int(told[1]) * CHANNELS[told[2]] * 8 * 10**6 if told else None
