"""The facts of a capacity report: what a machine holds, how fast, and what a raised limit buys.

Field names are the keys of the report's JSON (docs/report.md, "What is in the JSON"): renderers
show these values and compute none of their own.
"""

from collections.abc import Sequence

from uma.frozen import dataclass
from uma.ledger import Verdict, peak
from uma.machine import Budget, Machine, budget_of, default_reserve_bytes
from uma.machine.named import with_gpu_limit
from uma.memory.term import MemoryTerm
from uma.plan.limits import smallest_wired_limit_mb
from uma.speed.rate import NotKnown, Rate
from uma.units import GIB, MIB
from uma.workload import Engine

WIDTHS = (16, 8, 6, 5, 4, 3)
CONTEXTS = (8192, 32_768)
RAISED_STEPS = 5  # between the limit as it is and what the reserve leaves


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second; eight in ten measurements are within. ``None`` for the ``reason``."""

    tps: float | None = None
    tps_low: float | None = None
    tps_high: float | None = None
    reason: str | None = None


NO_SPEED = Speed(reason="it does not fit")


@dataclass(frozen=True, slots=True)
class Line:
    """One of the rules that may draw the budget."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A GPU limit, the first of a machine's being the one that it has now.

    ``left_bytes`` is what it leaves to the system, which ``reserve_bytes`` is kept for;
    ``command`` sets it.
    """

    wired_limit_mb: int | None
    limit_bytes: int
    budget_bytes: int
    left_bytes: int
    command: str | None = None


@dataclass(frozen=True, slots=True)
class BudgetFacts:
    """What draws the two lines that a peak is held against."""

    memory_bytes: int
    limit_bytes: int
    limit_low_bytes: int
    limit_source: str
    reserve_bytes: int
    budget_bytes: int
    budget_source: str
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class CellAt:
    """A model in one format at one context; ``verdicts`` has one for each of the limits."""

    context_tokens: int
    total_bytes: int
    headroom_bytes: int
    verdict: Verdict
    verdicts: tuple[Verdict, ...]
    decode: Speed


@dataclass(frozen=True, slots=True)
class Cell:
    """A model in one width, at each context that it was made for."""

    bits: int
    format: str
    weights_bytes: int
    bits_per_weight: float
    at: tuple[CellAt, ...]


@dataclass(frozen=True, slots=True)
class MapRow:
    """A model in every width that it can be had in; none for the ``reason``."""

    model: str
    cells: tuple[Cell, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """A term of the binding phase; of a point they sum to its total."""

    name: str
    size_bytes: int
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class Point:
    """One choice of the page: bits, cache, sequences and context of a model."""

    bits: int
    kv_bits: int
    batch_size: int
    context_tokens: int
    total_bytes: int
    headroom_bytes: int
    verdict: Verdict
    verdicts: tuple[Verdict, ...]
    phase: str
    terms: tuple[Term, ...]
    decode: Speed
    prompt: Speed


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest context within the budget, and within the limit."""

    bits: int
    kv_bits: int
    max_context_tokens: int | None
    tight_context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences that fit at once, each with a cache for the whole context.

    ``cache_bytes`` is that of one. ``paged_sequences`` is how many would fit with pages of 16
    tokens and requests that hold ``paged_mean_tokens`` on average: what an engine that pages could
    make of the same memory.
    """

    bits: int
    context_tokens: int
    max_batch_size: int | None
    cache_bytes: int
    paged_sequences: int | None
    paged_mean_tokens: int
    decode: Speed


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A chosen model on one machine; no points for the ``reason``."""

    model: str
    points: tuple[Point, ...] = ()
    longest: tuple[Longest, ...] = ()
    sequences: tuple[Sequences, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One method for one model; the largest length and batch are each alone, at 1 and 2,048."""

    model: str
    method: str
    options: str
    engine: str
    batch_size: int
    max_seq_length: int
    total_bytes: int | None
    headroom_bytes: int | None
    verdict: Verdict
    largest_seq_length: int | None
    largest_batch_size: int | None
    trainable_parameters: int | None
    train: Speed
    measures: tuple[str, ...] = ()
    reason: str | None = None


NO_PLAN = Speed(reason="no engine that is modelled runs it")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A machine's best plan for a model, as ``uma compare`` finds it; without one, no technique.

    ``power_w`` is the most that the machine draws, of cards that of the cards alone.
    """

    model: str
    machine: str
    kind: str
    price_usd: int | None
    price_kind: str | None
    price_date: str | None
    price_note: str | None
    power_w: int | None
    technique: str | None = None
    engine: str | None = None
    format: str | None = None
    bits: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    budget_bytes: int | None = None
    verdict: Verdict = "unknown"
    decode: Speed = NO_PLAN
    prompt: Speed = NO_PLAN
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """What one limit of a machine buys at one context, the widths of ``FEW_BITS`` or more counted.

    ``model`` is the largest that fits, in its widest format; ``models`` is how many fit in some.
    """

    context_tokens: int
    limit: int
    models: int
    formats: int
    model: str | None = None
    format: str | None = None
    bits: int | None = None
    total_bytes: int | None = None
    decode: Speed = NO_SPEED


@dataclass(frozen=True, slots=True)
class MachineReport:
    """All that is told of one machine. ``name`` is how it was asked for."""

    name: str
    title: str
    kind: str
    backend: str
    engine: Engine
    chip: str | None
    gpu_cores: int | None
    os: str | None
    os_version: str | None
    bandwidth_bytes_per_s: int | None
    price_usd: int | None
    power_w: int | None
    calibration: str | None
    budget: BudgetFacts
    best: tuple[Best, ...]
    rows: tuple[MapRow, ...]
    models: tuple[ModelReport, ...]
    training: tuple[TrainingRow, ...]
    notes: tuple[str, ...]


def budget_facts(machine: Machine, budget: Budget) -> BudgetFacts:
    """The lines of ``budget``, and the limits that its owner could set instead."""
    reserve = budget.reserve_bytes
    return BudgetFacts(
        memory_bytes=machine.memory_bytes,
        limit_bytes=budget.limit_bytes,
        limit_low_bytes=machine.limit_bytes,
        limit_source=machine.limit_source,
        reserve_bytes=default_reserve_bytes(machine) if reserve is None else reserve,
        budget_bytes=budget.budget_bytes,
        budget_source=budget.winner,
        lines=tuple(Line(name, size) for name, size in budget.lines),
        limits=tuple(limits_of(machine, budget)),
    )


def limits_of(machine: Machine, budget: Budget) -> list[Limit]:
    """The limit that a machine has, and on a Mac those up to what its reserve leaves.

    Where the limit as it is is only known as a range they start above its upper end: a value within
    the range might lower it.
    """
    now = Limit(
        None, budget.limit_bytes, budget.budget_bytes, machine.memory_bytes - budget.limit_bytes
    )
    if machine.backend != "metal":
        return [now]
    low, most = now.limit_bytes, machine.memory_bytes - (budget.reserve_bytes or 0)
    sizes = [low + (most - low) * step // RAISED_STEPS for step in range(1, RAISED_STEPS + 1)]
    values = sorted({smallest_wired_limit_mb(size // GIB * GIB) for size in sizes if size > low})
    return [now, *(_raised(machine, budget, value) for value in values if value * MIB > low)]


def _raised(machine: Machine, budget: Budget, value: int) -> Limit:
    changed = budget_of(
        with_gpu_limit(machine, value * MIB),
        user_budget_bytes=budget.user_bytes,
        reserve_bytes=budget.reserve_bytes,
    )
    return Limit(
        value,
        changed.limit_bytes,
        changed.budget_bytes,
        machine.memory_bytes - changed.limit_bytes,
        f"sudo sysctl iogpu.wired_limit_mb={value}",
    )


def speed(found: Rate | NotKnown, number: int = 1) -> Speed:
    """A rate of each of ``number`` sequences, to four digits."""
    if isinstance(found, NotKnown):
        return Speed(reason=found.reason)
    best, low, high = (
        float(f"{value / number:.4g}") for value in (found.best, found.low, found.high)
    )
    return Speed(best, low, high)


def binding_terms(terms: Sequence[MemoryTerm]) -> tuple[str, tuple[Term, ...]]:
    """The phase that needs most, and what is held in it: the terms sum to the peak."""
    phase, total = peak(terms)
    held = [t for t in terms if t.phase in ("always", phase) and t.size_bytes]
    assert sum(t.size_bytes for t in held) == total
    return phase, tuple(Term(t.name, t.size_bytes, t.basis, t.source) for t in held)
