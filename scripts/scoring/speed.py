"""Speed of inference: what a row ran and how fast, and what ``uma.speed`` predicts for it.

``decode`` is the rate of generated tokens, ``prefill`` that of the prompt. Rows of several
sequences hold the rate of all together.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from uma.architecture.layers import Architecture
from uma.catalog import find_chips, model_config
from uma.engines import transformers, vllm
from uma.errors import UmaError, UnknownName
from uma.machine.named import machine_named
from uma.memory.reads import Stored, WeightReads, evenly_stored, experts_of, weight_reads
from uma.speed import Host, NotKnown, Processor, Rate, Split, decode_tps, prompt_tps
from uma.speed.fitted import Quantity
from uma.speed.processor import apple_processor, processors_of
from uma.speed.stored import gguf_stored, mlx_stored
from uma.units import GB, GIB, MIB
from uma.workload import Engine

from . import cuda, llama_cpp, mlx
from .rows import (
    ENGINE,
    FORMAT,
    INCOMPLETE,
    MACHINE,
    METRIC,
    UNTRUSTWORTHY,
    Row,
    Skipped,
    Subject,
    cards_of,
    decimal,
    engine_of,
    is_doubtful,
    number,
    outcome_of,
    subject_of,
)
from .summary import Group, source_of

COLUMNS: dict[Quantity, str] = {"decode": "tg_tok_s", "prefill": "pp_tok_s"}
ENGINES = ("llama.cpp", "mlx-lm", "transformers", "vllm")  # programs with coefficients

# llama.cpp's defaults by build. Whole layers on each device since pull request 4766 (12 January
# 2024); every matrix was split before. Flash attention where the device has it since 15434.
LAYER_SPLIT, FLASH_ATTENTION = 1842, 6325

# How llama.cpp's measurement put a context into the cache: main, the server and batched-bench run
# the prompt first, llama-bench generates from an empty one. First runs of main compile kernels.
WITH_PROMPT = re.compile(r"\bmain\b|batched-bench|server|-cli\b")
COLD = re.compile(r"\bmain\b")
NOT_PLAIN = re.compile(r"\bMTP\b|specul|draft", re.IGNORECASE)

# Bandwidth of a host's memory where the row tells its processor or its memory, in bytes a second:
# Intel ARK and AMD's product pages; else channels of DDR times their rate.
HOSTS = ((r"i9-10900X", 94 * GB), (r"Ryzen 7 5700X", round(51.2 * GB)))
DDR = re.compile(r"DDR\d-(\d{4}) (dual|quad) channel")
CHANNELS = {"dual": 2, "quad": 4}

FASTEST = 10**6  # tokens per second that no device of one machine reaches

UNITS = {"GiB": GIB, "MiB": MIB, "bytes": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """A row as ``uma.speed`` needs it; ``tokens`` are those of the prompt, or of the context."""

    row_id: str
    source: str
    quantity: Quantity
    engine: Engine
    model: str
    chip: str
    measured_tps: float
    architecture: Architecture
    reads: WeightReads
    processors: tuple[Processor, ...]
    tokens: float
    cached_tokens: int
    batch_size: int
    pass_tokens: int | None
    flash_attn: bool
    quantized: bool
    split: Split
    pipelined: bool
    host: Host | None

    @property
    def has_experts(self) -> bool:
        return bool(self.reads.experts) or bool(self.host and self.host.reads.experts)


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """The groups of the rows that measured a rate, by name."""
    groups: dict[str, Group] = {}
    rows = list(rows)
    slow = slow_prompts(rows)
    for row in rows:
        for quantity in COLUMNS:
            if row["kind"] != "fit" and decimal(row[COLUMNS[quantity]]):
                _score(row, quantity, groups, slow)
    return groups


def slow_prompts(rows: Iterable[Row]) -> frozenset[str]:
    """Rows whose prompts of 16-bit weights were slower than those of quantized ones.

    On the same devices, of the same model and length: quantized weights are first made 16-bit
    ones, so that the reverse is expected. The collectors call such rows anomalous.
    """
    found: dict[tuple[str, ...], list[tuple[bool, float, str]]] = {}
    for row in rows:
        if rate := decimal(row["pp_tok_s"]):
            same = ("engine", "engine_version", "model", "chip", "gpu_count", "prompt_tokens")
            key = tuple(row[name] for name in (*same, "depth_tokens", "batch", "flash_attn"))
            full = row["quant"] in ("F16", "BF16", "F32")
            found.setdefault(key, []).append((full, rate, row["rec_id"]))
    slow = set()
    for same_run in found.values():
        quantized = max((rate for full, rate, _ in same_run if not full), default=0.0)
        slow |= {row for full, rate, row in same_run if full and rate < quantized}
    return frozenset(slow)


def _score(row: Row, quantity: Quantity, groups: dict[str, Group], slow: frozenset[str]) -> None:
    try:
        if quantity == "prefill" and row["rec_id"] in slow:
            raise Skipped(UNTRUSTWORTHY)
        case = case_of(row, quantity)
        predicted = predict(case)
        if isinstance(predicted, NotKnown):
            raise Skipped(MACHINE)
    except Skipped as skipped:
        name, engine, kind = _group_of_skipped(row, quantity)
        group = groups.setdefault(name, Group(quantity, engine, kind))
        group.skipped[row["rec_id"]] = str(skipped)
        return
    name, kind = group_of(case)
    group = groups.setdefault(name, Group(quantity, case.engine, kind))
    group.errors[row["rec_id"]] = predicted.best / case.measured_tps - 1
    group.sources[row["rec_id"]] = case.source


def predict(case: Case) -> Rate | NotKnown:
    """What ``uma.speed`` says of a case."""
    if case.quantity == "decode":
        return decode_tps(
            case.architecture,
            case.reads,
            case.processors,
            case.engine,
            case.tokens,
            batch_size=case.batch_size,
            flash_attn=case.flash_attn,
            split=case.split,
            host=case.host,
        )
    return prompt_tps(
        case.architecture,
        case.reads,
        case.processors,
        case.engine,
        round(case.tokens),
        cached_tokens=case.cached_tokens,
        batch_size=case.batch_size,
        pass_tokens=case.pass_tokens,
        flash_attn=case.flash_attn,
        quantized=case.quantized,
        pipelined=case.pipelined,
    )


def group_of(case: Case) -> tuple[str, str]:
    """The group of a case, and what it is a group of."""
    kind = _kind(case)
    program = {"mlx": "mlx-lm"}.get(case.engine, case.engine)
    alone = kind in ("one device", "other unified memory")
    if case.quantity == "decode" and alone and case.has_experts:
        return "decode, mixture of experts", "mixture of experts"
    return f"{case.quantity}, {program}, {kind}", kind


def _kind(case: Case) -> str:
    if case.host is not None:
        return "partial offload"
    if case.processors[0].device == "cpu":
        return "on the CPU"
    if len(case.processors) > 1:
        return "several devices"
    if case.batch_size > 1:
        return "several sequences"
    return "other unified memory" if case.processors[0].device == "unified" else "one device"


def _group_of_skipped(row: Row, quantity: Quantity) -> tuple[str, str, str]:
    found = engine_of(row)
    if found is None or found[1] not in ENGINES:
        return f"{quantity}, other engines", "", "other"
    count = "several devices" if number_or_one(row["gpu_count"]) > 1 else "one device"
    return f"{quantity}, {found[1]}, {count}", found[0], count


def number_or_one(text: str) -> int:
    return max(1, round(decimal(text)))


def case_of(row: Row, quantity: Quantity) -> Case:
    """The case of a row.

    Raises:
        Skipped: If its program, format, model, machine or configuration is not told or not claimed.
    """
    found = engine_of(row)
    if found is None or found[1] not in ENGINES:
        raise Skipped(ENGINE)
    if outcome_of(row) in ("exceeds", "other") or NOT_PLAIN.search(row["notes"]):
        raise Skipped(METRIC)
    if is_doubtful(row) or decimal(row[COLUMNS[quantity]]) > FASTEST:
        raise Skipped(UNTRUSTWORTHY)
    engine: Engine = found[0]  # type: ignore[assignment]
    if quantity == "prefill" and engine == "llama.cpp" and COLD.search(row["notes"]):
        raise Skipped(METRIC)
    try:
        return _case(row, quantity, engine, subject_of(row))
    except UmaError as error:
        raise Skipped(INCOMPLETE) from error


def _case(row: Row, quantity: Quantity, engine: Engine, subject: Subject) -> Case:
    architecture = subject.architecture
    processors = _processors(row, engine)
    stored = _stored(row, engine, subject)
    host, here = _host(row, architecture, stored)
    prompt, generated = number(row["prompt_tokens"]), number(row["gen_tokens"])
    depth = number(row["depth_tokens"])
    if quantity == "prefill" and not prompt:
        raise Skipped(INCOMPLETE)
    in_cache = engine != "llama.cpp" or WITH_PROMPT.search(row["notes"])
    context = depth + (prompt if in_cache else 0) + (generated or 128) / 2
    named = subject.format
    return Case(
        row_id=row["rec_id"],
        source=source_of(row["source"]),
        quantity=quantity,
        engine=engine,
        model=subject.model.hf_id,
        chip=processors[0].name,
        measured_tps=decimal(row[COLUMNS[quantity]]),
        architecture=architecture,
        reads=weight_reads(architecture, here),
        processors=processors,
        tokens=context if quantity == "decode" else prompt,
        cached_tokens=depth,
        batch_size=number(row["batch"]) or 1,
        pass_tokens=number(row["ubatch"]) or None,
        flash_attn=_flash_attn(row, engine),
        quantized=named is None or named.scheme != "float",
        split="row" if engine == "vllm" or _build(row) < LAYER_SPLIT else "layer",
        pipelined=_build(row) >= llama_cpp.PIPELINES,
        host=host,
    )


def _build(row: Row) -> int:
    """llama.cpp's build number; the newest where none is told."""
    told = re.match(r"~?b(\d+)", row["engine_version"])
    return int(told[1]) if told else 10**6


def _flash_attn(row: Row, engine: Engine) -> bool:
    """Whether one kernel computes attention: as told, else the default of the program's time."""
    if engine != "llama.cpp":
        return True
    if row["flash_attn"] in ("0", "1"):
        return row["flash_attn"] == "1"
    if re.match(r"~?b\d", row["engine_version"]):
        return _build(row) >= FLASH_ATTENTION
    return row["source_date"][:7] >= "2025-09"


def _processors(row: Row, engine: Engine) -> tuple[Processor, ...]:
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
    one = _device(row["chip"], row["gpu_cores"], row["mem_per_device_gb"], bandwidth)
    if one.bandwidth_bytes_per_s is None:
        raise Skipped(MACHINE)
    return (one,) * cards_of(row)


@cache
def _device(chip: str, cores: str, memory: str, bandwidth: int | None) -> Processor:
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


def _stored(row: Row, engine: Engine, subject: Subject) -> list[Stored]:
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


def _host(
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
