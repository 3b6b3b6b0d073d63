"""What to change so that a training fits: the cheapest changes in time, none without need."""

from collections.abc import Iterator, Sequence

from uma.frozen import dataclass
from uma.plan.training.case import TrainingCase
from uma.plan.training.changes import KINDS, Change
from uma.plan.training.checks import torch_reasons
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

    Changes are added in the order of their cost until the case fits, in place of those that they
    do not go with, and are looked at once more, as some help beside later ones alone. Then those
    are left out again, the costliest first, without which it fits too.
    """
    chosen: list[Change] = []
    now = case
    for find in (*KINDS, *KINDS):
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
            chosen, now = [*beside, change], then
    if needs.fits(now):
        chosen = _without_needless(case, chosen, needs)
    return tuple(_described(case, chosen, needs))


def _changed(case: TrainingCase, changes: Sequence[Change]) -> TrainingCase:
    for change in changes:
        case = change.apply(case)
    return case


def _is_possible(case: TrainingCase, changes: Sequence[Change]) -> bool:
    return case.engine == "mlx" or not any(torch_reasons(_changed(case, changes)))


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
