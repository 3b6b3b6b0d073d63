"""Training of one model on one machine: terms by phase, verdict, inverses, and what would help."""

from collections.abc import Iterator

from uma.frozen import dataclass
from uma.ledger import Ledger, Verdict, peak
from uma.memory.term import Phase
from uma.plan.training_case import Needs, TrainingCase
from uma.plan.training_checks import check, notes
from uma.plan.training_data import WorstBatch
from uma.plan.training_inverses import largest
from uma.plan.training_measures import Measure, measures
from uma.plan.training_places import Places, places
from uma.plan.training_verdict import least_bytes, pool_note, training_verdict
from uma.units import format_gib

__all__ = ["Measure", "TrainingCase", "TrainingEstimate", "training_estimate"]


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """What training needs on one device, and the phase that needs most.

    ``measures`` are the cheapest ones, in their order, that make it fit: all of them where even
    together they do not; none where it fits as it is. ``host_room_bytes`` is what the host leaves,
    where something lies there. ``data`` is the worst batch of a data set: the case has its length.
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
    data: WorstBatch | None = None

    @property
    def host_bytes(self) -> int:
        """On the host, or the hosts, of all devices together."""
        return self.places.host_bytes * self.case.workload.sharding.devices

    @property
    def left_bytes(self) -> int:
        """What it needs with all measures."""
        saved = sum(measure.saves_bytes for measure in self.measures)
        return self.ledger.predicted_peak_bytes - saved

    @property
    def disk_bytes(self) -> int:
        return self.places.disk_bytes * self.case.workload.sharding.devices


def training_estimate(case: TrainingCase, data: WorstBatch | None = None) -> TrainingEstimate:
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
    lying = places(case)
    room = _host_room_bytes(case) if lying.host_bytes else None
    crowded = room is not None and lying.host_bytes * _on_a_host(case) > room
    result: Verdict = "exceeds" if crowded else training_verdict(case, needed, least)
    return TrainingEstimate(
        case,
        Ledger(terms, *lines, result),
        phase,
        case.trainable_parameters,
        largest(case, terms, needs),
        measures(case, needs) if needed > case.room_bytes else (),
        (*pool_note(case, needed, least), *_host_notes(case, lying, room), *notes(case)),
        lying,
        room,
        data,
    )


def _on_a_host(case: TrainingCase) -> int:
    """Devices that share a host."""
    return min(case.machine_devices, case.workload.sharding.devices)


def _host_room_bytes(case: TrainingCase) -> int | None:
    from uma.plan.compare.discrete import host_room_bytes

    return None if case.machine.host_memory_bytes is None else host_room_bytes(case.machine)


def _host_notes(case: TrainingCase, lying: Places, room_bytes: int | None) -> Iterator[str]:
    if not lying.host_bytes:
        return
    held = lying.host_bytes * _on_a_host(case)
    if room_bytes is None:
        yield f"{format_gib(held)} lie on the host, whose memory is not known: give --host-ram"
    elif held > room_bytes:
        yield f"{format_gib(held)} lie on the host, which leaves {format_gib(room_bytes)}"
