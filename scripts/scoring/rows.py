"""A measured row, and what is read from its free text by tables.

Columns are those of ``uma/data/truth/*.csv``. Whatever a table does not explain is a reason to
skip the row, never a guess.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture, Attention, LatentAttention
from uma.catalog import Model, model_config
from uma.checkpoint.free_names import NamedFormat, find_format, find_free
from uma.errors import UmaError
from uma.units import GIB

ENGINE = "engine not claimed"
FORMAT = "format not claimed"
MODEL = "model unknown"
MACHINE = "machine unknown"
METRIC = "metric not comparable"
INCOMPLETE = "configuration incomplete"
UNTRUSTWORTHY = "marked untrustworthy"
REASONS = (ENGINE, FORMAT, MODEL, MACHINE, METRIC, INCOMPLETE, UNTRUSTWORTHY)

Row = dict[str, str]

# The program that measured: our engine, and the group its rows go to. Forks and programs that only
# use an engine's library hold other buffers, so they are not claimed.
ENGINES: tuple[tuple[str, str, str], ...] = (
    (r"mlx-lm", "mlx", "mlx-lm"),
    (r"mlx-swift-lm( \(fork(, NAX on)?\))?", "mlx", "mlx-swift"),
    (r"llama\.cpp( \(llama-server\))?", "llama.cpp", "llama.cpp"),
    (r"transformers", "transformers", "transformers"),
    (r"vllm", "vllm", "vllm"),
)

# What was measured, by engine: the name of its group, empty where it counts what no term of ours
# does (idle use of a card, a preallocation, a scheduler's guess).
METRICS: tuple[tuple[str, str, str], ...] = (
    ("mlx", r"mlx (gpu )?peak memory", "peak"),
    ("llama.cpp", r"total VRAM used|GPU buffers: sum", "buffers"),
    ("llama.cpp", r"Metal currentAllocatedSize", "Metal allocated"),
    ("llama.cpp", r"nvidia-smi|GTT peak", "whole device"),
    # Qwen3's page: weights and cache to 40 MiB at every length, less than any prefill needs, so it
    # was read while decoding. Qwen2.5's page and older ones hold the peak.
    ("transformers", r"GPU memory reported by docs \(MB", "allocated in decode"),
    ("transformers", r"max_memory_allocated|torch max allocated", "torch peak"),
    ("transformers", r"nvidia-smi", "whole device"),
    ("vllm", r"profile per GPU: weights|Loading model weights", "weights of one card"),
)
NOT_COMPARABLE = frozenset({"whole device", ""})

# Outcomes of a run: whether it fitted, or a third thing (paged, split, limited, never run).
OUTCOMES: tuple[tuple[str, str], ...] = (
    (r"swap|spill|paging|limit|panic|recommended|when split", "other"),
    (r"oom|does not fit|won't load|fails|refused", "exceeds"),
    (r"ok|100% gpu", "fits"),
)

PLAIN = frozenset({"bits", "float"})  # formats that a row may tell twice: by a width alone

# Notes with which the collectors took a number back.
DOUBTS = re.compile(r"verify before use|may be inferred|exact repo not stated|before the|rounded")


class Skipped(Exception):
    """The row is not scored; the argument is one of ``REASONS``."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a row is about, and the format of its weights."""

    model: Model
    architecture: Architecture
    format: NamedFormat | None


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; a first line that starts with ``#`` is a comment."""
    with open(path, encoding="utf-8", newline="") as file:
        lines: Iterable[str] = (line for line in file if not line.startswith("#"))
        return [{key: value or "" for key, value in row.items()} for row in csv.DictReader(lines)]


def engine_of(row: Row) -> tuple[str, str] | None:
    """Our engine and the group of the program that measured; ``None`` if it is not claimed."""
    for pattern, engine, group in ENGINES:
        if re.fullmatch(pattern, row["engine"].strip(), re.IGNORECASE):
            return engine, group
    return None


def metric_of(row: Row, engine: str) -> str:
    """The group of what was measured; empty if it is not in the table."""
    for wanted, pattern, name in METRICS:
        if wanted == engine and re.search(pattern, row["mem_metric"], re.IGNORECASE):
            return name
    return ""


def outcome_of(row: Row) -> str:
    """``fits``, ``exceeds`` or ``other``; empty where the row says nothing of it."""
    for pattern, name in OUTCOMES:
        if re.search(pattern, row["outcome"], re.IGNORECASE):
            return name
    return ""


def is_doubtful(row: Row) -> bool:
    return row["confidence"] == "C" or bool(DOUBTS.search(row["notes"]))


def subject_of(row: Row) -> Subject:
    """The model and format of an inference row.

    Raises:
        Skipped: If the name is not known, the row's own shapes contradict it, or its format is
            told twice and differently.
    """
    model, architecture = known_model(row["model"])
    if contradicts(row["arch"], architecture):
        raise Skipped(MODEL)
    named = find_format(row["model"]) or find_format(row.get("model_file", ""))
    told = find_format(row["quant"])
    if named and told and named.bits != told.bits and {named.scheme, told.scheme} <= PLAIN:
        raise Skipped(INCOMPLETE)
    found = named or told
    group = number(row.get("group_size", ""))
    if found is not None and found.group_size is None and group and found.scheme == "bits":
        found = NamedFormat(found.scheme, found.name, found.bits, group)
    return Subject(model, architecture, found)


@cache
def known_model(name: str) -> tuple[Model, Architecture]:
    """The catalog's model of that name.

    Raises:
        Skipped: If there is none, or its shapes as we read them are not those of the model: the
            parameters differ from the published number.
    """
    try:
        model = find_free(name)
        architecture = architecture_from_config(model_config(model).values)
    except UmaError as error:
        raise Skipped(MODEL) from error
    counted = architecture.num_parameters
    if model.parameters and abs(counted / model.parameters - 1) > 0.02:
        raise Skipped(MODEL)
    return model, architecture


def contradicts(arch: str, architecture: Architecture) -> bool:
    """Whether the shapes that a row was measured with are other ones than the catalog's."""
    told = {key: int(value) for key, value in re.findall(r"\b(L|H|A|KV|V)(\d+)\b", arch)}
    mixers = [m for layer in architecture.layers for m in layer.mixers]
    heads = {m.num_attention_heads for m in mixers if isinstance(m, Attention | LatentAttention)}
    kv_heads = {m.num_key_value_heads for m in mixers if isinstance(m, Attention)}
    return any(
        (
            told.get("L", len(architecture.layers)) != len(architecture.layers),
            told.get("H", architecture.hidden_size) != architecture.hidden_size,
            "A" in told and bool(heads) and told["A"] not in heads,
            "KV" in told and bool(kv_heads) and told["KV"] not in kv_heads,
        )
    )


def measured_bytes(row: Row) -> int:
    """The measured memory; the column is filled where the unit is certain.

    Raises:
        Skipped: If it is not.
    """
    if not row["mem_gib_norm"]:
        raise Skipped(METRIC)
    return round(float(row["mem_gib_norm"]) * GIB)


def number(text: str) -> int:
    """A whole number, 0 for none."""
    return int(float(text)) if re.fullmatch(r"\d+(\.\d+)?", text) else 0


def tokens_of(row: Row) -> tuple[int, int]:
    """Tokens of the prompt and of the whole text.

    Raises:
        Skipped: If the row tells neither.
    """
    prompt, generated = number(row["prompt_tokens"]), number(row["gen_tokens"])
    if not prompt and not generated:
        raise Skipped(INCOMPLETE)
    depth = number(row["depth_tokens"])
    return max(1, prompt + depth), max(1, prompt + depth) + max(1, generated)


def rows_of_kind(rows: Iterable[Row], kind: str) -> Iterator[Row]:
    return (row for row in rows if row["kind"] == kind)
