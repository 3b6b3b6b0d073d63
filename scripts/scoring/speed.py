"""Speed of inference: what a row ran and how fast, and what ``uma.speed`` predicts for it.

``decode`` is the rate of generated tokens, ``prefill`` that of the prompt. Rows of several
sequences hold the rate of all together.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from uma.architecture.layers import Architecture
from uma.errors import UmaError
from uma.memory.reads import WeightReads, weight_reads
from uma.speed import Host, NotKnown, Processor, Rate, Split, decode_tps, prompt_tps
from uma.speed.fitted import Quantity
from uma.workload import Engine

from . import llama_cpp
from .rows import (
    ENGINE,
    INCOMPLETE,
    MACHINE,
    METRIC,
    UNTRUSTWORTHY,
    Row,
    Skipped,
    Subject,
    decimal,
    engine_of,
    is_doubtful,
    number,
    outcome_of,
    subject_of,
)
from .speed_devices import host_part, processors_told, stored_weights
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

FASTEST = 10**6  # tokens per second that no device of one machine reaches


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
    first = case.processors[0]
    return "other unified memory" if first.one_memory and first.device != "apple" else "one device"


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
    processors = processors_told(row)
    stored = stored_weights(row, engine, subject)
    host, here = host_part(row, architecture, stored)
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
