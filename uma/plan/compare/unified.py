"""Plans on a machine of one memory: it is counted once, and nothing is offloaded to itself."""

from dataclasses import replace

from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.machine import Budget, Machine, default_reserve_bytes, verdict
from uma.machine.named import with_gpu_limit
from uma.memory.reads import WeightReads
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.plans import NO_ROOM, Plan, Technique, no_prompt
from uma.plan.compare.subject import Subject, cached_bytes
from uma.plan.engine_case import EngineCase
from uma.plan.estimate import Asked
from uma.plan.limits import smallest_wired_limit_mb
from uma.plan.mlx_case import MlxCase
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.processor import processors_of
from uma.speed.rate import NotKnown, Rate
from uma.units import MIB, format_gib
from uma.workload import Engine


def unified_plans(subject: Subject, candidate: Candidate, bits: int, engine: Engine) -> list[Plan]:
    """Resident; where that exceeds, on a Mac, with a raised GPU limit."""
    asked = subject.case(engine, bits, candidate.machine)
    if asked is None or (engine == "mlx" and subject.repeats(bits)):
        return []
    plan = _plan(subject, asked, "resident")
    raised = None if plan.runs else _raised(subject, asked, candidate.machine)
    return [plan] if raised is None else [plan, raised]


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one form of a model needs on a machine, by whichever engine."""

    peak_bytes: int
    weights_bytes: int
    cache_bytes: int
    bits_per_weight: float
    verdict: Verdict
    reads: WeightReads
    prefill_step_size: int | None
    short_bytes: int
    short_of: str
    notes: tuple[str, ...]


def _plan(subject: Subject, asked: Asked, technique: Technique) -> Plan:
    needs = _mlx_needs(subject, asked) if isinstance(asked, MlxCase) else _needs(subject, asked)
    runs = needs.verdict != "exceeds"
    decode = _decode(subject, asked, needs) if runs else NO_ROOM
    return Plan(
        technique=technique,
        engine=asked.engine,
        format=asked.format,
        bits=subject.width(asked.bits),
        bits_per_weight=needs.bits_per_weight,
        device_bytes=needs.peak_bytes,
        host_bytes=0,
        disk_bytes=0,
        budget_bytes=asked.budget.budget_bytes,
        verdict=needs.verdict,
        decode=decode,
        prompt_of=(lambda: _prompt(subject, asked, needs)) if runs else no_prompt,
        notes=needs.notes,
        short_bytes=needs.short_bytes,
        short_of=needs.short_of,
        sequences=asked.workload.batch_size,
        cache_bytes=needs.cache_bytes,
    )


def _mlx_needs(subject: Subject, case: MlxCase) -> _Needs:
    """Once for all machines of the same memory."""
    machine = case.machine
    pool = (machine.memory_bytes, machine.limit_bytes, machine.limit_high_bytes)
    left = (machine.available_bytes, machine.max_buffer_bytes, machine.overhead_bytes)
    key = ("needs", case.bits, machine.backend, *pool, *left)
    return subject.once(key, lambda: _mlx_needs_of(subject, case))


def _mlx_needs_of(subject: Subject, case: MlxCase) -> _Needs:
    plan = case.plan()
    most, largest = plan.machine.max_buffer_bytes, plan.largest_buffer_bytes
    short, of = _shortage(plan.ledger.predicted_peak_bytes, plan.budget)
    if not short and most is not None and largest > most:
        short, of = largest - most, f"the largest buffer, {format_gib(most)}"
    weights = plan.form.weights.size_bytes
    return _Needs(
        plan.ledger.predicted_peak_bytes,
        weights,
        cached_bytes(plan.ledger.terms),
        8 * weights / subject.architecture.num_parameters,
        plan.verdict,
        subject.even_reads(weights),
        plan.workload.prefill_step_size,
        short,
        of,
        plan.notes,
    )


def _needs(subject: Subject, case: Asked) -> _Needs:
    assert isinstance(case, EngineCase)
    needed, weights = subject.needed_bytes(case), case.weights.size_bytes
    return _Needs(
        needed,
        weights,
        subject.cache_bytes(case),
        8 * weights / subject.architecture.num_parameters,
        verdict(needed, case.budget),
        subject.reads(case),
        None,
        *_shortage(needed, case.budget),
        (),
    )


def _shortage(needed: int, budget: Budget) -> tuple[int, str]:
    """What is missing to run at all, and of what."""
    ceiling = budget.ceiling_bytes
    return max(0, needed - ceiling), f"the limit of {format_gib(ceiling)}"


def _decode(subject: Subject, asked: Asked, needs: _Needs) -> Rate | NotKnown:
    return decode_tps(
        subject.architecture,
        needs.reads,
        processors_of(asked.machine),
        asked.engine,
        subject.tokens,
        batch_size=subject.workload.batch_size,
        kv_bits=subject.cache_bits(asked.engine),
    )


def _prompt(subject: Subject, asked: Asked, needs: _Needs) -> Rate | NotKnown:
    return prompt_tps(
        subject.architecture,
        needs.reads,
        processors_of(asked.machine),
        asked.engine,
        subject.tokens,
        pass_tokens=needs.prefill_step_size,
        quantized=asked.bits < 16,
    )


def _raised(subject: Subject, asked: Asked, machine: Machine) -> Plan | None:
    """The plan with the smallest GPU limit that holds it, where the system keeps its reserve.

    At most ``tight``: it needs a setting that the next restart takes back.
    """
    if machine.backend != "metal":
        return None
    limit = machine.limit_high_bytes or machine.limit_bytes
    value = smallest_wired_limit_mb(limit + asked.excess_bytes(asked.workload, limit)) * MIB
    if value <= limit or machine.memory_bytes - value < default_reserve_bytes(machine):
        return None
    changed = subject.case(asked.engine, asked.bits, with_gpu_limit(machine, value))
    assert changed is not None
    plan = _plan(subject, changed, "raised wired limit")
    return _tight(plan, machine, value) if plan.runs else None


def with_raised_limit(plan: Plan, machine: Machine) -> Plan:
    """``plan``, which exceeds, with a raised GPU limit if that is a Mac's that holds it then."""
    value = smallest_wired_limit_mb(plan.device_bytes) * MIB
    left = machine.memory_bytes - value
    if machine.backend != "metal" or left < default_reserve_bytes(machine):
        return plan
    raised = replace(plan, technique=f"{plan.technique}, raised wired limit", short_bytes=0)
    return _tight(raised, machine, value)


def _tight(plan: Plan, machine: Machine, limit_bytes: int) -> Plan:
    """It needs a setting that the next restart takes back."""
    left = format_gib(machine.memory_bytes - limit_bytes)
    return replace(
        plan,
        verdict="tight",
        options=(f"sudo sysctl iogpu.wired_limit_mb={limit_bytes // MIB}",),
        notes=(f"leaves {left} to the system", *plan.notes),
    )


def streamed_plan(subject: Subject, candidate: Candidate, bits: int) -> Plan | None:
    """llama.cpp on the CPU, the file mapped: what memory does not hold is read in every step.

    It does not fit, and says so: memory is what it lacks. Pages of the file are dropped in the
    order of their use, and a dense model reads them in the same order again, so that all of them
    have to be read; of experts, which tokens choose, those that are not held.
    """
    machine = candidate.machine
    case = subject.other("llama.cpp", bits, machine)
    if case is None or machine.kind == "discrete":
        return None
    held, weights = subject.needed_bytes(case) - case.weights.size_bytes, case.weights.size_bytes
    room = case.budget.budget_bytes - held
    if not 0 < room < weights:
        return None
    short, of = _shortage(held + weights, case.budget)
    plan = _plan(subject, case, "streamed from the SSD")
    return replace(
        plan,
        device_bytes=held,
        disk_bytes=weights,
        verdict="exceeds",
        decode=_disk_bound(subject, candidate, case, 1 - room / weights),
        prompt_of=lambda: NotKnown("no public measurements of prompts from an SSD"),
        options=("-ngl", "0"),
        notes=("every step waits for the SSD: it does not fit, and is no way to work",),
        short_bytes=short,
        short_of=of,
    )


def _disk_bound(
    subject: Subject, candidate: Candidate, case: EngineCase, missing: float
) -> Rate | NotKnown:
    rate = candidate.ssd_bytes_per_s
    if rate is None:
        return NotKnown("how fast its SSD reads is not known")
    tokens, reads = subject.workload.batch_size, subject.reads(case)
    least = tokens * rate / reads.size_bytes(tokens)
    best = least / missing if reads.experts else least
    return Rate(least, best, least / missing, "bound", "bytes not held, over the SSD's rate")
