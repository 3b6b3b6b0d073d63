"""Training on one machine: of all recipes the best that fits, and why better ones do not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.machine import default_reserve_bytes
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.plans import Plan, no_prompt
from uma.plan.compare.recipes import GIVES_UP, Recipe, mlx_recipes
from uma.plan.compare.training_subject import TrainingSubject
from uma.plan.compare.unified import with_raised_limit
from uma.plan.training.case import TrainingCase
from uma.plan.training.checks import without_bfloat16
from uma.plan.training.places import on_host
from uma.plan.training.verdict import pool_note, training_verdict
from uma.speed.processor import processors_of
from uma.speed.rate import NotKnown, Rate
from uma.speed.training import HostMemory, training_tps
from uma.units import format_gib
from uma.workload import Place

if TYPE_CHECKING:
    from uma.plan.compare.search import Wanted

NO_DISK_RATE = NotKnown("how fast the host's disk is is not told: --disk-bandwidth GB/s")
NO_LINK = NotKnown("the link between host and card is not known")


@dataclass(frozen=True, slots=True)
class _Need:
    """Bytes of one device, and of host and disk for all devices together.

    Of ``device_bytes`` the device can do with ``least_bytes``, see ``training_verdict``.
    ``moved_bytes`` of each device's states cross the link both ways in every step.
    """

    device_bytes: int
    least_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes: int = 0


def best_training(
    subject: TrainingSubject, candidate: Candidate, wanted: "Wanted"
) -> tuple[Plan | None, tuple[tuple[Plan, str], ...]]:
    """The best recipe that fits, and those before it with what they lack.

    Best is the least quantized, by the most exact optimizer, then the fastest, of those that are
    about as fast the simplest; ``prefer`` of ``speed`` looks at that alone, of ``context`` at the
    memory to spare. Those that are slower than was wanted come last.
    """
    tried: list[Plan] = []
    for recipe, rate in _in_order(subject, candidate, wanted):
        plan = _plan(subject, candidate, recipe, rate)
        tried.append(plan)
        if plan.verdict == "fits" and wanted.prefer != "context":
            break
    if not tried:
        return None, ()
    best = max(tried, key=lambda plan: _merit(plan, wanted))  # the first of equals
    others = tried if wanted.prefer == "context" else tried[: tried.index(best)]
    reasons = ((plan, plan.shortcoming(wanted.min_tps)) for plan in others if plan is not best)
    return best, tuple((plan, why or "tight") for plan, why in reasons)


def _merit(plan: Plan, wanted: "Wanted") -> tuple[float, ...]:
    """Of those that were tried, in the order of their worth."""
    if not plan.runs:
        return (0, -plan.short_bytes)
    spare = plan.headroom_bytes if wanted.prefer == "context" else 0
    return (1, plan.verdict == "fits", spare)


def _in_order(
    subject: TrainingSubject, candidate: Candidate, wanted: "Wanted"
) -> list[tuple[Recipe, Rate | NotKnown]]:
    """Every recipe with its speed, which is quicker to know than its memory, the best first."""
    found = [
        (recipe, _rate(subject, candidate, recipe))
        for recipe in _recipes(subject, candidate)
        if recipe.bits >= wanted.min_bits and wanted.trainer in (None, recipe.trainer)
    ]

    def worth(one: tuple[Recipe, Rate | NotKnown]) -> tuple[float, ...]:
        recipe, rate = one
        tps = 0.0 if isinstance(rate, NotKnown) else float(f"{rate.best:.2g}")
        slow = not isinstance(rate, NotKnown) and tps < wanted.min_tps
        if wanted.prefer == "speed":
            return (not slow, tps, recipe.bits, recipe.quality)
        return (not slow, recipe.bits, recipe.quality, tps)

    return sorted(found, key=worth, reverse=True)


def _recipes(subject: TrainingSubject, candidate: Candidate) -> Iterator[Recipe]:
    machine, host = candidate.machine, candidate.host
    if machine.backend == "metal" or machine.kind == "host":
        if subject.architecture.module is not None and candidate.number == 1 and subject.has_form:
            stored = subject.stored_bits
            recipes = mlx_recipes(subject.workload, subject.kind)
            yield from (one for one in recipes if stored in (None, one.bits))
        return
    if len({device.name for device in machine.devices}) > 1:
        return  # of different cards the slowest and the smallest would decide
    where: tuple[Place, ...] = ()
    if candidate.discrete and machine.host_memory_bytes is not None:
        where = ("host", "disk") if host is not None and host.disk_bytes else ("host",)
    yield from subject.torch_recipes(candidate, where)


def _plan(
    subject: TrainingSubject, candidate: Candidate, recipe: Recipe, rate: Rate | NotKnown
) -> Plan:
    case = subject.case(recipe, candidate)
    need, devices, budget = _need(subject, case), case.machine_devices, case.budget
    found, short, of = _lacking(candidate, case, need)
    weights = subject.weights_bytes(case)
    plan = Plan(
        technique=recipe.technique,
        engine="mlx" if recipe.engine == "mlx" else "transformers",
        format=recipe.format,
        bits=recipe.bits,
        bits_per_weight=8 * weights / subject.architecture.num_parameters,
        device_bytes=need.device_bytes * devices,
        host_bytes=need.host_bytes,
        disk_bytes=need.disk_bytes,
        budget_bytes=budget.budget_bytes,
        verdict=found,
        decode=rate,
        prompt_of=no_prompt,
        notes=(*_notes(recipe, need, case), *without_bfloat16(case.machine)),
        short_bytes=short,
        short_of=of,
        quality=recipe.quality,
        recipe=recipe,
    )
    return with_raised_limit(plan, case.machine) if found == "exceeds" else plan


def _need(subject: TrainingSubject, case: TrainingCase) -> _Need:
    """What lies where. A paged optimizer's states are on the host as far as there is no room.

    Where MLX's weights have no room, what is computed with them is not looked at: it takes long.
    """
    devices, beside = case.machine_devices, subject.places(case)
    if _by_weights(case):
        return _Need(beside.device_bytes, beside.device_bytes)
    device, least = subject.needed_bytes(case)
    if not case.workload.optimizer.startswith("paged"):
        return _Need(device, least, beside.host_bytes * devices, beside.disk_bytes * devices)
    forced = on_host(case).stays_bytes
    host = on_host(case, case.budget_bytes - device)
    moved = beside.host_bytes - host.stays_bytes
    return _Need(device + host.stays_bytes, least + forced, host.held_bytes, 0, moved)


def _by_weights(case: TrainingCase) -> bool:
    """Whether MLX's weights alone are more than any limit of the machine could hold."""
    most = case.machine.memory_bytes - default_reserve_bytes(case.machine)
    return case.weights is not None and case.weights.size_bytes > max(most, case.room_bytes)


def _lacking(candidate: Candidate, case: TrainingCase, need: _Need) -> tuple[Verdict, int, str]:
    """The verdict, and what is most short: a device, the host's memory, or its disk."""
    host, disk = candidate.machine.host_room_bytes, 0
    if candidate.host is not None:
        disk = candidate.host.disk_bytes or 0
    devices = case.machine_devices
    where = "the GPU's part" if not case.machine.devices else "the card"
    rooms = (
        (need.least_bytes, case.room_bytes, where if devices == 1 else "each card"),
        (need.host_bytes, host, "the host's memory"),
        (need.disk_bytes, disk, "the host's disk"),
    )
    needed, room, where = max(rooms, key=lambda one: one[0] - one[1])
    if needed > room:
        of = f"{where}, {format_gib(room)}{', by the state alone' if _by_weights(case) else ''}"
        return "exceeds", needed - room, of
    return training_verdict(case, need.device_bytes, need.least_bytes), 0, ""


def _rate(subject: TrainingSubject, candidate: Candidate, recipe: Recipe) -> Rate | NotKnown:
    """Tokens of all devices together."""
    machine, spread = candidate.machine, recipe.workload.sharding
    link, bandwidth = machine.link_bytes_per_s, candidate.host_bandwidth_bytes_per_s
    host = None if link is None or bandwidth is None else HostMemory(bandwidth, link)
    if "disk" in (spread.offload_optimizer, spread.offload_parameters):
        disk = None if candidate.host is None else candidate.host.disk_bytes_per_s
        if disk is None or link is None:
            return NO_DISK_RATE
        host = HostMemory(disk, min(link, disk / spread.data))  # all devices share the disk
    found = training_tps(
        subject.architecture,
        subject.reads,
        processors_of(machine),
        recipe.engine,
        recipe.workload,
        trained_elements=subject.trained_elements(recipe),
        host=host,
    )
    if not recipe.workload.optimizer.startswith("paged"):
        return found
    case = subject.case(recipe, candidate)
    return _paged(found, case, _need(subject, case).moved_bytes)


def _paged(rate: Rate | NotKnown, case: TrainingCase, moved_bytes: int) -> Rate | NotKnown:
    """The rate where ``moved_bytes`` of each device go to the host and come back in every step."""
    if not moved_bytes or isinstance(rate, NotKnown):
        return rate
    link, workload = case.machine.link_bytes_per_s, case.workload
    if link is None:
        return NO_LINK
    tokens = workload.tokens * workload.grad_accumulation_steps * workload.sharding.data
    waited_s = 2 * moved_bytes / link

    def beside(tps: float) -> float:
        return tokens / (tokens / tps + waited_s)

    return replace(rate, low=beside(rate.low), best=beside(rate.best), high=beside(rate.high))


def _notes(recipe: Recipe, need: _Need, case: TrainingCase) -> Iterator[str]:
    yield from pool_note(case, need.device_bytes, need.least_bytes)
    if recipe.workload.method == "full" and recipe.quality in GIVES_UP:
        yield GIVES_UP[recipe.quality]
    if need.moved_bytes:
        moved = format_gib(need.moved_bytes)
        yield f"{moved} of states go to the host and back in every step, at the link's full rate"
    paged_or_small = recipe.workload.optimizer not in ("adam", "adamw")
    if recipe.engine == "torch" and (paged_or_small or recipe.workload.quantized):
        yield "needs bitsandbytes"
