"""What to change so that a training fits: the cheapest changes in time, none without need."""

from collections.abc import Iterator, Sequence

from uma.errors import UsageError
from uma.frozen import dataclass
from uma.plan.training.case import TrainingCase
from uma.plan.training.changes import KINDS, Change, offloaded_otherwise, with_plain_adamw
from uma.plan.training.checks import OF_BITSANDBYTES, reasons
from uma.plan.training.places import on_host
from uma.plan.training.verdict import Needs
from uma.workload import TrainingWorkload


@dataclass(frozen=True, slots=True)
class Measure:
    """Something to do differently: what it saves after those before it, and its cost in time.

    ``host_saves_bytes`` are those of one host, negative where more lies there. ``fits`` says
    whether the case fits with it and those before it, on the device and the host.
    """

    name: str
    options: tuple[str, ...]
    saves_bytes: int
    host_saves_bytes: int
    cost: str
    workload: TrainingWorkload
    fits: bool


def measures(case: TrainingCase, needs: Needs) -> tuple[Measure, ...]:
    """What to change, the cheapest in time first; all that can be where even that does not do.

    Those are left out again, the costliest first, without which it fits too. Where the weights
    alone are too large, nothing is looked for.
    """
    if case.least_weight_bytes > case.room_bytes:
        return ()
    chosen = _added(case, [], needs)
    replaceable = case.engine == "torch" and case.workload.optimizer in OF_BITSANDBYTES
    if replaceable and not needs.fits(_changed(case, chosen)):
        instead = _with_another_optimizer(case, chosen, needs)
        chosen = instead if needs.fits(_changed(case, instead)) else chosen
    if needs.fits(_changed(case, chosen)):
        chosen = _without_needless(case, chosen, needs)
    return tuple(_described(case, _ordered(case, chosen, needs), needs))


def _added(case: TrainingCase, chosen: list[Change], needs: Needs) -> list[Change]:
    """With more changes in the order of their cost, until the case fits.

    Each is in place of those that it does not go with, or that it does over. Where that does not
    do, the other of FSDP and DeepSpeed may; and all are looked at once more, as some help beside
    later ones alone.
    """
    now = _changed(case, chosen)
    for find in (*KINDS, offloaded_otherwise, *KINDS):
        if needs.fits(now):
            break
        change, beside = find(now, needs), chosen
        if change and not _is_possible(case, (*chosen, change)):
            beside = [other for other in chosen if _is_possible(case, (other, change))]
            change = find(_changed(case, beside), needs)
        if change is None:
            continue
        then = _changed(case, (*beside, change))
        if _is_possible(case, (*beside, change)) and _helps(now, then, needs):
            chosen, now = _standing(case, [*beside, change]), then
    return chosen


def _with_another_optimizer(case: TrainingCase, chosen: list[Change], needs: Needs) -> list[Change]:
    """What helps plain AdamW, which comes with the first that the case's own does not go with."""
    plain = case.changed(optimizer="adamw")
    chosen = [one for one in chosen if one.apply(plain).workload.optimizer == "adamw"]
    changes = _added(plain, chosen, needs)
    for place, change in enumerate(changes):
        if not _is_possible(case, changes[: place + 1]):
            return [*changes[:place], with_plain_adamw(change), *changes[place + 1 :]]
    return changes


def _standing(case: TrainingCase, changes: list[Change]) -> list[Change]:
    """Those that the last does not do over."""
    then = _changed(case, changes)
    for one in changes[:-1]:
        rest = [other for other in changes if other is not one]
        changes = rest if _changed(case, rest) == then else changes
    return changes


def _changed(case: TrainingCase, changes: Sequence[Change]) -> TrainingCase:
    for change in changes:
        case = change.apply(case)
    return case


def _is_possible(case: TrainingCase, changes: Sequence[Change]) -> bool:
    """Whether a program does it, and the command line says so: FSDP and ZeRO exclude each other."""
    try:
        then = _changed(case, changes)
    except UsageError:
        return False
    own, spread = case.workload.sharding, then.workload.sharding
    return not (own.zero_stage and own.fsdp != spread.fsdp) and not any(reasons(then))


def _helps(before: TrainingCase, after: TrainingCase, needs: Needs) -> bool:
    """Whether it saves where there is too little: on the device, or on the host."""
    crowded, then = on_host(before).excess_bytes, on_host(after).excess_bytes
    if crowded:
        return then < crowded and needs(after) <= max(needs(before), after.budget_bytes)
    return not then and needs(after) < needs(before)


def _without_needless(case: TrainingCase, chosen: list[Change], needs: Needs) -> list[Change]:
    for one in (*reversed(chosen[:-1]), *chosen[-1:]):  # without the last it did not fit before
        rest = [other for other in chosen if other is not one]
        if _is_possible(case, rest) and needs.fits(_changed(case, rest)):
            chosen = rest
    return chosen


def _ordered(case: TrainingCase, chosen: list[Change], needs: Needs) -> list[Change]:
    """What saves something beside a later one alone after that; without those that save nothing."""
    ordered: list[Change] = []
    left, now = list(chosen), case

    def saves(change: Change) -> bool:
        possible = _is_possible(case, (*ordered, change))
        return possible and _helps(now, change.apply(now), needs)

    while found := next(filter(saves, left), None):
        ordered.append(found)
        left.remove(found)
        now = found.apply(now)
    return [*ordered, *left] if needs.fits(_changed(case, chosen)) else ordered


def _described(case: TrainingCase, chosen: Sequence[Change], needs: Needs) -> Iterator[Measure]:
    """Each change after those before it that are left."""
    for change in chosen:
        after = change.apply(case)
        yield Measure(
            change.name,
            change.options,
            needs(case) - needs(after),
            on_host(case).held_bytes - on_host(after).held_bytes,
            change.cost_of(case, after, needs),
            after.workload,
            needs.fits(after),
        )
        case = after
