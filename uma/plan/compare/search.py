"""For each machine the best plan that fits; of all the cheapest, and those that nothing beats."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from uma.frozen import dataclass
from uma.plan.compare import unified
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.costs import Cost, Use, cheapest_rented, cost_of
from uma.plan.compare.discrete import accelerate_plan, llama_cpp_plans
from uma.plan.compare.parallel import vllm_plan
from uma.plan.compare.plans import Plan
from uma.plan.compare.subject import Subject
from uma.plan.estimate import default_engine
from uma.units import format_gib
from uma.workload import Engine

if TYPE_CHECKING:
    from uma.plan.compare.training_subject import TrainingSubject

Preference = Literal["quality", "speed", "price", "context"]
Trainer = Literal["uma", "deepspeed", "fsdp"]
WIDTHS = (16, 8, 6, 5, 4, 3, 2)
SHOWN = 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """What makes a plan the better one. ``engine`` and ``trainer`` ask for one program's alone.

    The cheapest machine is that of the least price, or with ``use`` of the least cost of it.
    """

    min_bits: int = 4
    min_tps: float = 10
    prefer: Preference = "quality"
    launch_prices: bool = False
    engine: Engine | None = None
    trainer: Trainer | None = None
    use: Use = Use()


@dataclass(frozen=True, slots=True)
class Row:
    """A machine with its best plan, ``None`` where no engine has one, and why others are not it."""

    candidate: Candidate
    plan: Plan | None
    rejected: tuple[tuple[Plan, str], ...] = ()

    @property
    def runs(self) -> bool:
        return self.plan is not None and self.plan.runs

    @property
    def decode_tps(self) -> float | None:
        return None if self.plan is None or not self.plan.runs else self.plan.decode_tps

    def reaches(self, min_tps: float) -> bool:
        """Whether it is known to be fast enough."""
        return self.decode_tps is not None and self.decode_tps >= min_tps

    @property
    def price_usd(self) -> int | None:
        return None if self.candidate.price is None else self.candidate.price.usd


@dataclass(frozen=True, slots=True)
class Comparison:
    """``hidden`` counts rows that are not shown; ``cheapest`` is ``None`` for its ``reason``.

    ``rented`` is the cheapest machine of those that are rented and do the work.
    """

    subject: "Subject | TrainingSubject"
    wanted: Wanted
    rows: tuple[Row, ...]
    cheapest: Row | None
    cheapest_reason: str | None
    front: tuple[Row, ...]
    hidden: int = 0
    rented: Candidate | None = None

    def cost(self, row: Row) -> Cost:
        return cost_of(row.candidate, self.wanted.use, self.rented)


def compare(
    subject: "Subject | TrainingSubject",
    found: Sequence[Candidate],
    wanted: Wanted,
    shown: int | None = None,
    first: Candidate | None = None,
) -> Comparison:
    """The best plan of each machine, in the order that is preferred.

    ``first`` is this machine, which stands before the others; of those at most ``shown`` are kept:
    the smallest that do the work, of one memory and of cards in turn, beside what is rented.
    """
    rows = _rows(subject, found, wanted)
    rented = [row for row in rows if row.candidate.rent_usd_per_h is not None]
    bought = [row for row in rows if row.candidate.rent_usd_per_h is None]
    kept = rows if shown is None else [*rented, *_smallest(bought, wanted, shown)]
    ordered = sorted(kept, key=lambda row: _order(row, wanted))
    if first is not None:
        ordered.insert(0, best_plan(subject, first, wanted))
    able = [row for row in rows if row.reaches(wanted.min_tps)]
    cheapest, reason = _cheapest(able, wanted)
    return Comparison(
        subject,
        wanted,
        tuple(ordered),
        cheapest,
        reason,
        _front(rows),
        len(rows) - len(kept),
        cheapest_rented(row.candidate for row in able),
    )


def _rows(
    subject: "Subject | TrainingSubject", found: Sequence[Candidate], wanted: Wanted
) -> list[Row]:
    """A row for each, but for pairs of a card that is enough alone."""
    rows: list[Row] = []
    enough = set()
    for one in found:
        if one.alone in enough:
            continue
        row = best_plan(subject, one, wanted)
        rows.append(row)
        if row.reaches(wanted.min_tps):
            enough.add(one.name)
    return rows


def best_plan(subject: "Subject | TrainingSubject", candidate: Candidate, wanted: Wanted) -> Row:
    """The least quantized plan that fits and is fast enough, else the fastest that runs.

    With ``prefer`` of ``speed`` the fastest, with ``context`` that with most memory to spare.
    Where nothing runs it is the plan that comes closest.
    """
    if not isinstance(subject, Subject):
        from uma.plan.compare.training import best_training

        return Row(candidate, *best_training(subject, candidate, wanted))
    plans: list[Plan] = []
    for bits in WIDTHS:
        if bits < wanted.min_bits:
            break
        tried = list(_plans(subject, candidate, bits, wanted.engine))
        plans += tried
        enough = any(p.verdict == "fits" and (p.decode_tps or 0) >= wanted.min_tps for p in tried)
        if enough and wanted.prefer in ("quality", "price"):
            break
    if not plans:
        return Row(candidate, None)
    best = max(plans, key=lambda plan: _merit(plan, wanted))
    if candidate.number == 1 and not best.runs:
        best = unified.streamed_plan(subject, candidate, plans[-1].bits) or best
    reasons = (
        (plan, plan.shortcoming(wanted.min_tps) or _less(plan, best, wanted))
        for plan in plans
        if plan is not best and (plan.bits >= best.bits or not best.runs)
    )
    return Row(candidate, best, tuple(reasons))


def _plans(
    subject: Subject, candidate: Candidate, bits: int, engine: Engine | None
) -> Iterator[Plan]:
    if not candidate.discrete:
        chosen = engine or default_engine(candidate.machine)
        if engine is None and subject.architecture.module is None:
            chosen = "llama.cpp"  # mlx-lm has no module for it
        if chosen in ("transformers", "vllm"):
            return  # whose memory is known on cards
        if candidate.number > 1:
            if chosen == "mlx":
                from uma.plan.compare.cluster import cluster_plans

                yield from cluster_plans(subject, candidate, bits)
            return
        yield from unified.unified_plans(subject, candidate, bits, chosen)
        return
    if engine in (None, "llama.cpp"):
        yield from llama_cpp_plans(subject, candidate, bits)
    several = len(candidate.machine.devices) > 1 or subject.workload.batch_size > 1
    if engine == "vllm" or (engine is None and several):
        split = vllm_plan(subject, candidate, bits)
        if split is not None:
            yield split
    alone = len(candidate.machine.devices) == 1
    if engine == "transformers" or (engine is None and bits == 16 and alone):
        streamed = accelerate_plan(subject, candidate, bits)
        if streamed is not None and (engine or streamed.host_bytes):
            yield streamed


def _merit(plan: Plan, wanted: Wanted) -> tuple[float, ...]:
    speed, fits = plan.decode_tps or 0.0, plan.verdict == "fits"
    if not plan.runs:
        return (0, 0, 0, -plan.short_bytes, speed)
    if wanted.prefer == "speed":
        return (3, fits, speed, plan.bits)
    if wanted.prefer == "context":
        return (3, fits, plan.headroom_bytes, speed)
    if plan.decode_tps is None:
        return (2, fits, plan.bits, 0)
    if speed < wanted.min_tps:
        return (1, 0, speed, 0)
    return (3, fits, plan.bits, speed)


def _less(plan: Plan, best: Plan, wanted: Wanted) -> str:
    """Why a plan that would do was not taken."""
    if plan.verdict == "tight" and best.verdict == "fits":
        return "tight"
    if plan.decode_tps is None:
        return "its speed is not known"
    if wanted.prefer == "context":
        return f"{format_gib(best.headroom_bytes - plan.headroom_bytes)} less to spare"
    return f"slower, {plan.decode_tps:.1f} tokens/s"


def _order(row: Row, wanted: Wanted) -> tuple[float, ...]:
    plan, speed = row.plan, row.decode_tps or 0.0
    price = float("inf") if row.price_usd is None else row.price_usd
    if plan is None or not plan.runs:
        return (2, price)
    if wanted.prefer == "price":
        return (0, price, -speed)
    if wanted.prefer == "context":
        return (0, -plan.headroom_bytes, -speed)
    if wanted.prefer == "speed":
        return (0, -speed, price)
    return (not row.reaches(wanted.min_tps), -plan.bits, -speed)


def _smallest(rows: Sequence[Row], wanted: Wanted, shown: int) -> list[Row]:
    """Those that reach the speed, the smallest first; then those that run; then the others."""

    def size(row: Row) -> tuple[bool, bool, int, float]:
        return (
            not row.reaches(wanted.min_tps),
            not row.runs,
            row.candidate.machine.memory_bytes,
            row.price_usd or 0,
        )

    pools = [
        sorted((row for row in rows if row.candidate.discrete == discrete), key=size)
        for discrete in (False, True)
    ]
    kept = [pools[0][: shown - min(len(pools[1]), shown // 2)]]
    kept.append(pools[1][: shown - len(kept[0])])
    return [row for pool in kept for row in pool]


def _cheapest(able: Sequence[Row], wanted: Wanted) -> tuple[Row | None, str | None]:
    """The cheapest of those that do the work, at a price of today, or why there is none."""
    costs = ((row, spent_usd(row, wanted)) for row in able)
    priced = [(row, usd) for row, usd in costs if usd is not None]
    if priced:
        return min(priced, key=lambda one: one[1])[0], None
    if not able:
        fast = f" at {wanted.min_tps:g} tokens/s" if wanted.min_tps else ""
        return None, f"no machine does it{fast}"
    return None, (
        "no price of today is known of those that reach the speed: give --price NAME=USD, for "
        "cards --host-price USD too, or --launch-prices for what they once cost"
    )


def spent_usd(row: Row, wanted: Wanted) -> float | None:
    """What the work costs on a machine, bought at a price of today or rented, whichever is less.

    Over the years of its use where that is told, else the price alone; ``None`` is not known.
    """
    cost = cost_of(row.candidate, wanted.use, None)
    bought = cost.owned_usd if wanted.use.hours is not None else row.price_usd
    if not (wanted.launch_prices or row.candidate.price_of_today):
        bought = None
    return min((usd for usd in (bought, cost.rented_usd) if usd is not None), default=None)


def _front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows that no other beats in price, speed and memory to spare at once; priced ones alone."""
    priced = [row for row in rows if row.runs and row.price_usd is not None]
    front = [row for row in priced if not any(_beats(other, row) for other in priced)]
    return tuple(sorted(front, key=lambda row: row.price_usd or 0))


def _beats(other: Row, row: Row) -> bool:
    mine, theirs = _virtues(row), _virtues(other)
    return theirs != mine and all(a >= b for a, b in zip(theirs, mine, strict=True))


def _virtues(row: Row) -> tuple[float, float, int]:
    assert row.plan is not None
    return -(row.price_usd or 0), row.decode_tps or 0.0, row.plan.headroom_bytes
