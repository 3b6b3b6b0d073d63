"""Every matrix split over several cards, which work at once: vLLM's tensor parallelism."""

from dataclasses import replace
from typing import Any

from uma.engines.vllm import on_devices, reserved_bytes, splits_heads
from uma.ledger import Verdict, peak
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.plans import NO_ROOM, Plan, no_prompt
from uma.plan.compare.subject import Subject
from uma.plan.engine_case import EngineCase
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.processor import OTHER_VENDOR, processors_of
from uma.speed.rate import NotKnown, Rate
from uma.units import format_gib

MOST_CARDS = 8


def vllm_plan(subject: Subject, candidate: Candidate, bits: int) -> Plan | None:
    """The model on all cards, or on the one; ``None`` where it cannot be split so."""
    devices = candidate.machine.devices
    count = len(devices)
    case = subject.other("vllm", bits, candidate.machine)
    if case is None or subject.repeats(bits):
        return None
    if len({device.name for device in devices}) != 1 or count > MOST_CARDS:
        return None
    if not subject.once(("heads", count), lambda: splits_heads(subject.architecture, count)):
        return None
    if OTHER_VENDOR in processors_of(candidate.machine)[0].notes:
        return None  # memory and speed of vLLM are known on NVIDIA's cards
    plan = replace(_held(subject, case), bits=subject.width(bits))
    if not plan.runs:
        return plan
    return replace(plan, **_speeds(subject, case), notes=(_paged(subject, case, plan),))


def _paged(subject: Subject, case: EngineCase, plan: Plan) -> str:
    """How many requests the blocks have room for, in what vLLM reserves anyway."""
    count = len(case.machine.devices)
    caches = [term for term in subject.terms(case) if term.name == "kv_cache"]
    held = on_devices(caches, subject.architecture, count)
    each = max(1, sum(term.size_bytes for term in held) // plan.sequences)
    left = count * _reserved_bytes(case) - plan.device_bytes
    number = plan.sequences + left // each
    requests = "one such request" if number == 1 else f"{number:,} such requests"
    return f"what vLLM reserves has room for {requests}, in blocks as they grow"


def _held(subject: Subject, case: EngineCase) -> Plan:
    """What the cards hold: each its part of weights and cache, and all that one alone would.

    The budget is that of ``uma estimate``, but with the contexts of all cards, which that leaves
    out on both sides. What vLLM reserves beyond it is tight.
    """
    count, reserved = len(case.machine.devices), _reserved_bytes(case)
    needed = subject.once(("each", case.format, count), lambda: _each_bytes(subject, case))
    budget = case.budget.budget_bytes + (count - 1) * _context_bytes(subject, case)
    budget = min(budget, reserved * count)
    found: Verdict = "fits" if needed * count <= budget else "tight"
    return Plan(
        technique="tensor parallel" if count > 1 else "resident",
        engine="vllm",
        format=case.format,
        bits=case.bits,
        bits_per_weight=8 * case.weights.size_bytes / subject.architecture.num_parameters,
        device_bytes=needed * count,
        host_bytes=0,
        disk_bytes=0,
        budget_bytes=budget,
        verdict=found if needed <= reserved else "exceeds",
        decode=NO_ROOM,
        prompt_of=no_prompt,
        options=("--tensor-parallel-size", str(count)),
        short_bytes=max(0, needed - reserved),
        short_of=f"the part of each card that vLLM reserves, {format_gib(reserved)}",
        sequences=subject.workload.batch_size,
        cache_bytes=subject.cache_bytes(case),
    )


def _reserved_bytes(case: EngineCase) -> int:
    """What vLLM takes of each card at its start, at most what the driver leaves."""
    devices = case.machine.devices
    limit = case.budget.ceiling_bytes // len(devices)
    return min(limit, reserved_bytes(devices[0].memory_bytes, case.settings))


def _each_bytes(subject: Subject, case: EngineCase) -> int:
    terms, count = subject.terms(case), len(case.machine.devices)
    together = peak(on_devices(terms, subject.architecture, count))[1]
    return -(-(together + (count - 1) * _context_bytes(subject, case)) // count)


def _context_bytes(subject: Subject, case: EngineCase) -> int:
    return sum(t.size_bytes for t in subject.terms(case) if t.name == "runtime_context")


def _speeds(subject: Subject, case: EngineCase) -> dict[str, Any]:
    workload, reads = subject.workload, subject.reads(case)
    processors = processors_of(case.machine)

    def prompt() -> Rate | NotKnown:
        tokens = subject.tokens
        return prompt_tps(subject.architecture, reads, processors, "vllm", tokens)

    decode = decode_tps(
        subject.architecture,
        reads,
        processors,
        "vllm",
        subject.tokens,
        batch_size=workload.batch_size,
        split="row",
        kv_bits=subject.cache_bits("vllm"),
    )
    return {"decode": decode, "prompt_of": prompt}
