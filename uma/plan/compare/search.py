"""For each machine the best plan that fits; of all the cheapest, and those that nothing beats."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from uma.frozen import dataclass
from uma.plan.compare import unified
from uma.plan.compare.candidates import YOURS, Candidate
from uma.plan.compare.choice import cheapest, front_of, left_out, smallest
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
QLORA_BITS = 4
NO_TRAINER = "no trainer that is modelled trains it so, in so many bits"


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
    """A machine with its best plan, ``None`` for the ``reason``, and why others are not it."""

    candidate: Candidate
    plan: Plan | None
    rejected: tuple[tuple[Plan, str], ...] = ()
    reason: str | None = None

    @property
    def runs(self) -> bool:
        return self.plan is not None and self.plan.runs

    @property
    def decode_tps(self) -> float | None:
        return None if self.plan is None or not self.plan.runs else self.plan.decode_tps

    def reaches(self, min_tps: float) -> bool:
        """Whether it is known to be fast enough, or any speed is."""
        if not min_tps:
            return self.runs
        return self.decode_tps is not None and self.decode_tps >= min_tps

    @property
    def price_usd(self) -> int | None:
        return None if self.candidate.price is None else self.candidate.price.usd


@dataclass(frozen=True, slots=True)
class Comparison:
    """``hidden`` counts rows that are not shown; ``cheapest`` is ``None`` for its ``reason``.

    ``left_out`` says of which machines that do the work the cheapest was not chosen, and why.
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
    left_out: tuple[tuple[str, str], ...] = ()

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

    ``first`` is this machine, which stands before the others; of those at most ``shown`` are kept.
    """
    rows = _rows(subject, found, wanted)
    ordered = sorted(rows, key=lambda row: _order(row, wanted))
    if first is not None:
        ordered.insert(0, best_plan(subject, first, wanted))
    able = [row for row in rows if row.reaches(wanted.min_tps)]
    best, reason = cheapest(rows, able, wanted)
    parameters = subject.architecture.num_parameters if isinstance(subject, Subject) else 0
    whole = Comparison(
        subject,
        wanted,
        tuple(ordered),
        best,
        reason,
        front_of(able, parameters),
        rented=cheapest_rented(row.candidate for row in able),
        left_out=tuple(left_out(able, best, wanted)),
    )
    return whole if shown is None else only(whole, kept_names(whole, shown))


def kept_names(found: Comparison, shown: int) -> set[str]:
    """The cheapest, what is rented, this machine, and the smallest that do the work.

    Of the last at most ``shown``, of one memory and of cards in turn.
    """
    best = found.cheapest
    chosen = set() if best is None else {best.candidate.name}
    chosen |= {r.candidate.name for r in found.rows if r.candidate.rent_usd_per_h is not None}
    chosen |= {r.candidate.name for r in found.rows if r.candidate.price_reason == YOURS}
    bought = [row for row in found.rows if row is best or row.candidate.name not in chosen]
    return chosen | {row.candidate.name for row in smallest(bought, found, shown)}


def only(found: Comparison, names: Container[str]) -> Comparison:
    """The rows of these machines alone; what was found among all stays."""
    kept = tuple(row for row in found.rows if row.candidate.name in names)
    return replace(found, rows=kept, hidden=found.hidden + len(found.rows) - len(kept))


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

        plan, rejected = best_training(subject, candidate, wanted)
        reason = no_plan(subject, candidate, wanted) if plan is None else None
        return Row(candidate, plan, rejected, reason)
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
        return Row(candidate, None, reason=no_plan(subject, candidate, wanted))
    best = max(plans, key=lambda plan: _merit(plan, candidate, wanted))
    if candidate.number == 1 and not best.runs:
        best = unified.streamed_plan(subject, candidate, plans[-1].bits) or best
    reasons = (
        (plan, plan.shortcoming(wanted.min_tps) or _less(plan, best, candidate, wanted))
        for plan in plans
        if plan is not best and _told(plan, best, wanted)
    )
    return Row(candidate, best, tuple(reasons))


def _told(plan: Plan, best: Plan, wanted: Wanted) -> bool:
    """Whether somebody would ask why it is not ``plan``: it is wider, or else faster."""
    if plan.bits >= best.bits or not best.runs:
        return True
    return wanted.prefer == "speed" and (plan.decode_tps or 0) > (best.decode_tps or 0)


def no_plan(subject: "Subject | TrainingSubject", candidate: Candidate, wanted: Wanted) -> str:
    """Why a machine has no plan at all."""
    kinds = {device.name for device in candidate.machine.devices}
    if isinstance(subject, Subject):
        return f"no engine that is modelled runs it in {wanted.min_bits} bits or more"
    if candidate.number > 1:
        return "training on several Macs together is not planned"
    if len(kinds) > 1:
        return "training on cards of several kinds is not planned"
    stored = subject.stored_bits
    if stored and not candidate.discrete and (subject.kind == "full" or stored < wanted.min_bits):
        return f"its weights are stored in {stored} bits, of which MLX makes no more"
    if not candidate.discrete and not subject.has_form:
        return f"mlx-lm has no {subject.kind} for stacked experts"
    if subject.kind == "qlora" and wanted.min_bits > QLORA_BITS and candidate.discrete:
        return f"the base of qlora is in {QLORA_BITS} bits on cards, below --min-bits"
    return NO_TRAINER


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
    tried: list[Plan] = []
    if engine in (None, "llama.cpp"):
        tried += llama_cpp_plans(subject, candidate, bits)
    several = len(candidate.machine.devices) > 1 or subject.workload.batch_size > 1
    if engine == "vllm" or (engine is None and several):
        split = vllm_plan(subject, candidate, bits)
        tried += [] if split is None else [split]
    alone = engine is None and bits == 16 and len(candidate.machine.devices) == 1
    if engine == "transformers" or (alone and _may_stream(subject, candidate, tried)):
        streamed = accelerate_plan(subject, candidate, bits)
        if streamed is not None and (engine or streamed.host_bytes):
            tried.append(streamed)
    yield from tried


def _may_stream(subject: Subject, candidate: Candidate, tried: Sequence[Plan]) -> bool:
    """Whether weights in 16 bits could cross the link in every step faster than what was tried."""
    machine, weights = candidate.machine, 2 * subject.architecture.num_parameters
    crossing = weights - machine.memory_bytes
    disk = 0 if candidate.host is None else candidate.host.disk_bytes or 0
    if machine.link_bytes_per_s is None or crossing > machine.host_room_bytes + disk:
        return False
    fit = [plan for plan in tried if plan.verdict == "fits"]
    if not all(plan.host_bytes for plan in fit):
        return False
    fastest = max((plan.decode_tps or 0.0 for plan in fit), default=0.0)
    return crossing * fastest < machine.link_bytes_per_s


def _merit(plan: Plan, candidate: Candidate, wanted: Wanted) -> tuple[float, ...]:
    speed, fits = plan.decode_tps or 0.0, plan.verdict == "fits"
    if not plan.runs:
        return (0, 0, 0, -plan.short_bytes, speed)
    if wanted.prefer == "context":
        return (3, fits, spare_bytes(plan, candidate), speed)
    if plan.decode_tps is None:  # what crosses the link least is fastest by any rate
        bytes_ = plan.device_bytes + plan.host_bytes
        return (2, fits, -plan.host_bytes, -bytes_ if wanted.prefer == "speed" else plan.bits)
    if speed < wanted.min_tps:
        return (1, 0, speed, 0)
    if wanted.prefer == "speed":
        return (3, fits, speed, plan.bits)
    return (3, fits, plan.bits, speed)


def spare_bytes(plan: Plan, candidate: Candidate) -> int:
    """Room for a longer context: on the host too, where llama.cpp can put more layers there."""
    beside = 0
    if candidate.discrete and plan.engine == "llama.cpp":
        beside = candidate.machine.host_room_bytes - plan.host_bytes
    return plan.headroom_bytes + beside


def _less(plan: Plan, best: Plan, candidate: Candidate, wanted: Wanted) -> str:
    """Why a plan that would do was not taken."""
    if plan.verdict == "tight" and best.verdict == "fits":
        speed = f", {plan.decode_tps:.1f} tokens/s" if plan.decode_tps is not None else ""
        return f"tight{speed if wanted.prefer == 'speed' else ''}"
    if wanted.prefer == "context":
        less = spare_bytes(best, candidate) - spare_bytes(plan, candidate)
        return f"{format_gib(less)} less to spare"
    if plan.decode_tps is None:
        return "its speed is not known"
    return f"slower, {plan.decode_tps:.1f} tokens/s"


def _order(row: Row, wanted: Wanted) -> tuple[float, ...]:
    plan, speed = row.plan, row.decode_tps or 0.0
    price = float("inf") if row.price_usd is None else row.price_usd
    if plan is None or not plan.runs:
        return (2, price)
    if wanted.prefer == "price":
        return (0, price, -speed)
    if wanted.prefer == "context":
        return (0, -spare_bytes(plan, row.candidate), -speed)
    if wanted.prefer == "speed":
        return (0, -speed, price)
    return (not row.reaches(wanted.min_tps), -plan.bits, -speed)
