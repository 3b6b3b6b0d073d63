"""Training of one model on one machine: terms by phase, verdict, inverses, and what would help."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uma.frozen import dataclass
from uma.ledger import Ledger, Verdict, peak
from uma.memory.term import MemoryTerm, Phase
from uma.plan.training.case import TrainingCase
from uma.plan.training.checks import check, notes
from uma.plan.training.inverses import largest
from uma.plan.training.places import OnHost, Places, on_host, places
from uma.plan.training.verdict import Needs, least_bytes, pool_note, training_verdict
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.plan.training.data import WorstBatch
    from uma.plan.training.measures import Measure

__all__ = ["TrainingCase", "TrainingEstimate", "training_estimate"]


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """What training needs on one device, and the phase that needs most.

    ``measures`` are the cheapest ones, in their order, that make it fit: all of them where even
    together they do not; none where it fits as it is. ``host`` is one host with what lies there.
    ``data`` is the worst batch of a data set: the case has its length.
    """

    case: TrainingCase
    ledger: Ledger
    phase: Phase
    trainable_parameters: int
    largest: dict[str, int | None]
    measures: "tuple[Measure, ...]"
    notes: tuple[str, ...]
    places: Places
    host: OnHost
    data: "WorstBatch | None" = None

    @property
    def host_bytes(self) -> int:
        """On the host, or the hosts, of all devices together."""
        return self.places.host_bytes * self.case.workload.sharding.devices

    @property
    def measures_suffice(self) -> bool:
        """Whether it fits with all measures, on the device and on the host."""
        if self.measures:
            return self.measures[-1].fits
        needed = self.ledger.predicted_peak_bytes
        return needed <= self.case.budget_bytes and not self.host.excess_bytes

    @property
    def disk_bytes(self) -> int:
        return self.places.disk_bytes * self.case.workload.sharding.devices


def training_estimate(case: TrainingCase, data: "WorstBatch | None" = None) -> TrainingEstimate:
    """The estimate of ``case`` with its inverses.

    Raises:
        UsageError: If the workload does not suit the model or the engine.
    """
    check(case)
    needs, terms = Needs(), case.terms()
    computed = peak(terms)[1]
    needs(case, computed)
    inverses = largest(case, terms, needs)
    meant, counted = places(case), on_host(case)
    host = on_host(case, case.budget_bytes - _device_bytes(case, computed, meant))
    if case.workload.mem_kind == "device":  # torch's allocator has no part in what is paged
        counted = host
    terms = (*terms, *_staying_terms(counted.stays_bytes, meant))
    (phase, needed), least = peak(terms), least_bytes(terms)
    crowded = host.excess_bytes > 0
    result: Verdict = "exceeds" if crowded else training_verdict(case, needed, least)
    advice: tuple[Measure, ...] = ()
    if crowded or needed > case.budget_bytes:
        from uma.plan.training.measures import measures

        advice = measures(case, needs)
    return TrainingEstimate(
        case,
        Ledger(terms, case.budget_bytes, case.budget.limit_bytes // case.machine_devices, result),
        phase,
        case.trainable_parameters,
        inverses,
        advice,
        (
            *pool_note(case, needed, least),
            *_weights_note(case),
            *_host_notes(host, meant),
            *notes(case),
        ),
        meant.with_staying(host.stays_bytes),
        host,
        data,
    )


def _device_bytes(case: TrainingCase, computed_bytes: int, meant: Places) -> int:
    """What leaves a paged optimizer's states no room: all that the device shows."""
    if not meant.paged_bytes or case.workload.mem_kind == "device":
        return computed_bytes
    return case.changed(mem_kind="device").needed_bytes()


def _staying_terms(stays_bytes: int, meant: Places) -> Iterator[MemoryTerm]:
    """What is meant for a host, and a device holds: paged states are the first to stay."""
    paged = min(stays_bytes, meant.paged_bytes)
    if paged:
        source = "paged states, as far as they stay on the device"
        yield MemoryTerm("optimizer_states", paged, "bound", source)
    if stays_bytes > paged:
        source = "what a host would hold, in the one memory"
        yield MemoryTerm("other", stays_bytes - paged, "bound", source)


def _weights_note(case: TrainingCase) -> Iterator[str]:
    """That no measure is looked for, and what else there is."""
    weights, workload = case.least_weight_bytes, case.workload
    if weights <= case.room_bytes:
        return
    others = []
    if workload.method == "full":
        others.append("adapters on a base in 4 bits (--train qlora)")
    elif case.mlx_bits > 2:
        others.append("a base in fewer bits (--bits)")
    if workload.sharding.devices > 1:
        others.append("sharded weights (--fsdp full)")
    others.append("a smaller model (--largest-model)")
    sizes = f"{format_gib(weights)} of {format_gib(case.room_bytes)}"
    yield f"the weights alone take {sizes}; what is left to try: {', '.join(others)}"


def _host_notes(host: OnHost, meant: Places) -> Iterator[str]:
    if host.stays_bytes > meant.paged_bytes:
        stays = format_gib(host.stays_bytes)
        yield f"{stays} are meant for a host, and stay: the machine has one memory"
    if not host.held_bytes:
        return
    held = format_gib(host.held_bytes)
    if host.room_bytes is None:
        yield f"{held} lie on the host, whose memory is not known: give --host-ram"
    elif host.excess_bytes:
        yield f"{held} lie on the host, which leaves {format_gib(host.room_bytes)}"
