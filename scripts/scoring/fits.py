"""Whether a model fits: verdicts against what happened.

Rows that say so, and every other row that names its device and whose run ended well, since it
fitted. ``tight`` counts as ``fits``.
"""

import re
from collections.abc import Callable, Iterable

from uma.catalog import find_chips
from uma.errors import UmaError
from uma.ledger import peak
from uma.machine.named import machine_named
from uma.plan.engine_case import LLAMA_CPP_CONTEXT

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
    cards_of,
    engine_of,
    is_doubtful,
    number,
    outcome_of,
    subject_of,
)
from .summary import Group

MACOS_26 = "2025-09"  # when it came out: Macs before had the older, lower limits

LENGTHS = ("ctx_alloc", "prompt_tokens", "gen_tokens", "depth_tokens")

Need = Callable[[Row, Subject, str], int]

NEED: dict[str, Need] = {
    "mlx": lambda row, subject, group: peak(mlx.terms(row, subject, group))[1],
    "llama.cpp": lambda row, subject, group: (
        llama_cpp.buffer_bytes(row, subject, group) + _context_bytes(row)
    ),
    "transformers": cuda.device_bytes,
    "vllm": cuda.vllm_needed_bytes,
}


def _context_bytes(row: Row) -> int:
    """What the driver takes for a process, on the first card: limits count the others'."""
    return LLAMA_CPP_CONTEXT if _device(row) == "cards" else 0


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """The groups of the rows that tell an outcome: by kind of device, and the third outcomes."""
    groups: dict[str, Group] = {}
    for row in rows:
        outcome = outcome_of(row)
        if outcome == "" or (row["kind"] != "fit" and re.match(r"\(|$", row["chip"])):
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
    least, most = limits_bytes(row)
    name, group = engine
    try:
        needed = NEED[name](row, subject_of(row), group)
    except UmaError as error:
        raise Skipped(INCOMPLETE) from error
    if least < needed <= most:
        raise Skipped(MACHINE)
    says = "fits" if needed <= least else "exceeds"
    if says == "fits" and not any(row[column] for column in LENGTHS):
        raise Skipped(INCOMPLETE)  # with what text it was asked decides
    return f"{'true' if says == outcome else 'false'}_{says}"


def limits_bytes(row: Row) -> tuple[int, int]:
    """What the device enforces: of the least and of the most memory that it is sold with.

    Both are the same where the memory is told, or the name has one size only.

    Raises:
        Skipped: If the device is not known, or which of several it is.
    """
    found = [_limit_bytes(name, row) for name in _names(row)]
    return min(found), max(found)


def _limit_bytes(name: str, row: Row) -> int:
    """The limit, its upper end where the version of macOS leaves a range."""
    before = bool(row["source_date"]) and row["source_date"][:7] < MACOS_26
    try:
        machine = machine_named(name, macos=15 if _device(row) == "Apple" and before else None)
    except UmaError as error:
        raise Skipped(MACHINE) from error
    return machine.limit_high_bytes or machine.limit_bytes


def _names(row: Row) -> list[str]:
    """The device in words of the catalog; every size of a Mac whose memory is not told."""
    name = re.sub(r"\(.*?\)", " ", row["chip"]).strip()
    text, count = row["mem_per_device_gb"], cards_of(row)
    size = 0 if "+" in text else number(text, MACHINE)
    if size and not re.search(r"\d\s*GB", name):
        name = f"{name} {size}GB"
    if count > 1 and "+" not in name:
        return [f"{count} x {name}"]
    if _device(row) == "Apple" and not size:
        if re.search(r"\d\s*GB", row["machine"]):
            return [row["machine"]]  # "M4 Mac mini (10 core - 32GB)"
        try:
            sizes = {gib for chip in find_chips(name) for gib in chip.memory_gib}
        except UmaError as error:
            raise Skipped(MACHINE) from error
        return [f"{name} {gib}GB" for gib in sorted(sizes)]
    return [name]
