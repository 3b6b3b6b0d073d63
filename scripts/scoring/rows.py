"""A measured row, and what is read from its free text by tables.

Columns are those of ``uma/data/truth/*.csv``. Whatever a table does not explain is a reason to
skip the row, never a guess.
"""

import csv
import math
import re
from collections import defaultdict
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

IDS = ("rec_id", "record_id", "mlx_repo")  # columns that name a row

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
    (
        r"\boom\b|out of memory|(does not|doesn't|won't|cannot) (fit|load|run|allocate)"
        r"|fail|refused|killed|crash|exceeds|insufficient|too (big|large)",
        "exceeds",
    ),
    (r"\bok\b|100% gpu|\bfits?\b|\b(works?|runs?|ran|loaded|success|completed|passed)\b", "fits"),
)

PLAIN = frozenset({"bits", "float"})  # formats that a row may tell twice: by a width alone

# Notes with which the collectors took a number back.
DOUBTS = re.compile(r"verify before use|may be inferred|exact repo not stated|before the|rounded")


NOT_TOLD = frozenset({"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown"})
MOST = 10**7  # tokens of a context
MOST_CARDS = 256
MOST_BYTES = 2**50


class Skipped(Exception):
    """The row is not scored; the argument is one of ``REASONS``."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a row is about, and the format of its weights."""

    model: Model
    architecture: Architecture
    format: NamedFormat | None


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, each with an id of its own; a first line with ``#`` is a comment.

    A column that a file or a row lacks is empty.
    """
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        lines: Iterable[str] = (line for line in file if not line.startswith("#"))
        found = [_row(row) for row in csv.DictReader(lines)]
    seen: set[str] = set()
    for place, row in enumerate(found, 1):
        name = next((row[key] for key in IDS if row[key]), "row")
        own = f"{name} ({place})" if name in seen or name == "row" else name
        row["rec_id"] = row["record_id"] = own
        seen.add(own)
    return found


def _row(read: dict[str, str | None]) -> Row:
    """Its cells without spaces around them, and none for what follows the last column."""
    row: Row = defaultdict(str)
    row.update({key: value.strip() for key, value in read.items() if key and value is not None})
    return row


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


def is_mixed(row: Row) -> bool:
    """Whether its format is a recipe of which the name does not tell the widths."""
    named = find_format(row["model"]) or find_format(row["model_file"])
    return named is not None and named.scheme == "mixed"


def subject_of(row: Row) -> Subject:
    """The model and format of an inference row.

    Raises:
        Skipped: If the name is not known, the row's own shapes contradict it, or its format is
            told twice and differently.
    """
    model, architecture = known_model(row["model"])
    if contradicts(row["arch"], architecture):
        raise Skipped(MODEL)
    named = find_format(row["model"]) or find_format(row["model_file"])
    told = find_format(row["quant"])
    if named and told and named.bits != told.bits and {named.scheme, told.scheme} <= PLAIN:
        raise Skipped(INCOMPLETE)
    found = named or told
    group = number(row["group_size"])
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
    size = decimal(row["mem_gib_norm"]) * GIB
    if not 1 <= size <= MOST_BYTES:
        raise Skipped(METRIC)
    return round(size)


def decimal(text: str) -> float:
    """A number above zero and finite, else 0.

    >>> decimal("1.5e3"), decimal("n/a"), decimal("nan"), decimal("-1")
    (1500.0, 0.0, 0.0, 0.0)
    """
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def number(text: str, reason: str = INCOMPLETE) -> int:
    """A whole number, 0 where none is told.

    Raises:
        Skipped: For ``reason`` if it is told in other words, or is more than any row can mean.

    >>> number("2,048"), number("n/a")
    (2048, 0)
    """
    plain = text.replace(",", "").lower()
    if plain in NOT_TOLD:
        return 0
    value = decimal(plain)
    if not (value or re.fullmatch(r"0+(\.0+)?", plain)) or value > MOST:
        raise Skipped(reason)
    return int(value)


def cards_of(row: Row) -> int:
    """How many devices ran it, 1 where the row does not say.

    Raises:
        Skipped: If it is no number of cards in one machine.
    """
    count = number(row["gpu_count"], MACHINE) or 1
    if count > MOST_CARDS:
        raise Skipped(MACHINE)
    return count


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
