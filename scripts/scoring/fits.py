"""Whether a model fits: verdicts against what happened.

Rows that say so, and every other row whose run ended well, since it fitted. ``tight`` counts as
``fits``.
"""

import re
from collections.abc import Callable, Iterable

from uma.catalog import Gpu, gpus, words
from uma.errors import UmaError
from uma.ledger import peak
from uma.system.working_set import working_set_range
from uma.units import GIB, MIB

from . import cuda, llama_cpp, mlx
from .rows import (
    ENGINE,
    INCOMPLETE,
    MACHINE,
    METRIC,
    UNTRUSTWORTHY,
    Row,
    Skipped,
    Subject,
    engine_of,
    is_doubtful,
    number,
    outcome_of,
    subject_of,
)
from .summary import Group

MACOS_26 = "2025-09"  # when it came out: Macs before had the older, lower limits

SUFFIXES = frozenset({"ti", "super", "ada", "d", "laptop", "blackwell", "max", "q"})  # other cards

Need = Callable[[Row, Subject, str], int]

NEED: dict[str, Need] = {
    "mlx": lambda row, subject, group: peak(mlx.terms(row, subject, group))[1],
    "llama.cpp": llama_cpp.buffer_bytes,
    "transformers": cuda.allocated_bytes,
    "vllm": cuda.vllm_needed_bytes,
}


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """The groups of the rows that tell an outcome: by kind of device, and the third outcomes."""
    groups: dict[str, Group] = {}
    for row in rows:
        outcome = outcome_of(row)
        if outcome == "":
            continue
        name = "swapped, spilled or limited" if outcome == "other" else f"fits, {_device(row)}"
        group = groups.setdefault(name, Group("fit", "", _device(row)))
        try:
            found = _verdict(row, outcome)
        except Skipped as skipped:
            group.skipped[row["rec_id"]] = str(skipped)
            continue
        group.confusion[found] += 1
        if found.startswith("false"):
            group.wrong[row["rec_id"]] = found
    return groups


def _device(row: Row) -> str:
    if row["chip"].startswith("Apple"):
        return "Apple"
    return "cards" if re.match("NVIDIA|AMD Radeon", row["chip"]) else "others"


def _verdict(row: Row, outcome: str) -> str:
    """A cell of the confusion matrix."""
    if outcome == "other" or not (row["offload_layers"] or "all").startswith("all"):
        raise Skipped(METRIC)
    engine = engine_of(row)
    if engine is None or engine[0] not in NEED:
        raise Skipped(ENGINE)
    if is_doubtful(row):
        raise Skipped(UNTRUSTWORTHY)
    limit = limit_bytes(row)
    name, group = engine
    try:
        needed = NEED[name](row, subject_of(row), group)
    except UmaError as error:
        raise Skipped(INCOMPLETE) from error
    says = "fits" if needed <= limit else "exceeds"
    return f"{'true' if says == outcome else 'false'}_{says}"


def limit_bytes(row: Row) -> int:
    """What the device enforces; its upper end where the macOS version leaves a range.

    Raises:
        Skipped: If the device or its memory is not known.
    """
    size = number(row["mem_per_device_gb"])
    if row["chip"].startswith("Apple"):
        if not size:
            raise Skipped(MACHINE)
        before = bool(row["source_date"]) and row["source_date"][:7] < MACOS_26
        return working_set_range(size * GIB, 15 if before else None)[1]
    limits = {card.memory_mib or card.memory_gb * 1024 for card in _cards(row["chip"], size)}
    if len(limits) != 1:
        raise Skipped(MACHINE)
    return limits.pop() * MIB * (number(row["gpu_count"]) or 1)


def _cards(name: str, memory_gb: int) -> list[Gpu]:
    """Catalog cards with all words of ``name``, and no number that it does not have."""
    wanted = set(words(re.sub(r"^(NVIDIA|AMD)\s+|\(.*?\)", "", name))) - {"gb"}
    found = []
    for card in gpus():
        have = set(words(card.name))
        sizes = {str(card.memory_gb)}
        more = {word for word in have - wanted if word in SUFFIXES}
        if wanted - sizes <= have and not more and memory_gb in (0, card.memory_gb):
            found.append(card)
    return found
