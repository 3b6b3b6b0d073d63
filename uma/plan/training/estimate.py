"""Training of one model on one machine: terms by phase, verdict, inverses, and what would help."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uma.frozen import dataclass
from uma.ledger import Ledger, Verdict, peak
from uma.memory.term import Phase
from uma.plan.training.case import Needs, TrainingCase
from uma.plan.training.checks import check, notes
from uma.plan.training.inverses import largest
from uma.plan.training.measures import Measure, measures
from uma.plan.training.places import OnHost, Places, on_host, places
from uma.plan.training.verdict import least_bytes, pool_note, training_verdict
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.plan.training.data import WorstBatch

__all__ = ["Measure", "TrainingCase", "TrainingEstimate", "training_estimate"]


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """What training needs on one device, and the phase that needs most.

    ``measures`` are the cheapest ones, in their order, that make it fit: all of them where even
    together they do not; none where it fits as it is. ``host_room_bytes`` is what the host leaves,
    where something lies there, ``host_held_bytes`` what lies on one host. ``data`` is the worst
    batch of a data set: the case has its length.
    """

    case: TrainingCase
    ledger: Ledger
    phase: Phase
    trainable_parameters: int
    largest: dict[str, int | None]
    measures: tuple[Measure, ...]
    notes: tuple[str, ...]
    places: Places
    host_room_bytes: int | None = None
    host_held_bytes: int = 0
    data: "WorstBatch | None" = None

    @property
    def host_bytes(self) -> int:
        """On the host, or the hosts, of all devices together."""
        return self.places.host_bytes * self.case.workload.sharding.devices

    @property
    def host_excess_bytes(self) -> int:
        """What the host has too little."""
        return OnHost(self.host_held_bytes, self.host_room_bytes).excess_bytes

    @property
    def measures_suffice(self) -> bool:
        """Whether it fits with all measures, on the device and on the host."""
        if self.measures:
            return self.measures[-1].fits
        needed = self.ledger.predicted_peak_bytes
        return needed <= self.case.budget_bytes and not self.host_excess_bytes

    @property
    def disk_bytes(self) -> int:
        return self.places.disk_bytes * self.case.workload.sharding.devices


def training_estimate(case: TrainingCase, data: "WorstBatch | None" = None) -> TrainingEstimate:
    """The estimate of ``case`` with its inverses.

    Raises:
        UsageError: If the workload does not suit the model or the engine.
    """
    check(case)
    needs = Needs()
    terms = case.terms()
    phase, needed = peak(terms)
    least = least_bytes(terms)
    needs.found[needs.key(case)] = needed
    devices = case.machine_devices
    lines = (case.budget.budget_bytes // devices, case.budget.limit_bytes // devices)
    lying, host = places(case), on_host(case)
    crowded = host.excess_bytes > 0
    result: Verdict = "exceeds" if crowded else training_verdict(case, needed, least)
    return TrainingEstimate(
        case,
        Ledger(terms, *lines, result),
        phase,
        case.trainable_parameters,
        largest(case, terms, needs),
        measures(case, needs) if crowded or needed > case.budget_bytes else (),
        (*pool_note(case, needed, least), *_host_notes(host), *notes(case)),
        lying,
        host.room_bytes,
        host.held_bytes,
        data,
    )


def _host_notes(host: OnHost) -> Iterator[str]:
    if not host.held_bytes:
        return
    held = format_gib(host.held_bytes)
    if host.room_bytes is None:
        yield f"{held} lie on the host, whose memory is not known: give --host-ram"
    elif host.excess_bytes:
        yield f"{held} lie on the host, which leaves {format_gib(host.room_bytes)}"
