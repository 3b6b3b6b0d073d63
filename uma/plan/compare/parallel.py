"""Every matrix split over several cards, which work at once: vLLM's tensor parallelism."""

from dataclasses import replace
from typing import Any

from uma.architecture.layers import Architecture, Attention, LatentAttention
from uma.engines.vllm import reserved_bytes
from uma.ledger import peak
from uma.memory.term import MemoryTerm
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.plans import NO_ROOM, Plan, no_prompt
from uma.plan.compare.subject import Subject
from uma.plan.engine_case import EngineCase
from uma.plan.estimate import ceiling_bytes
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.processor import OTHER_VENDOR, processors_of
from uma.speed.rate import NotKnown, Rate
from uma.units import format_gib

MOST_CARDS = 8


def vllm_plan(subject: Subject, candidate: Candidate, bits: int) -> Plan | None:
    """The model on all cards, or on the one; ``None`` where it cannot be split so."""
    devices = candidate.machine.devices
    case = subject.other("vllm", bits, candidate.machine)
    if case is None or len({d.name for d in devices}) != 1 or split_refused(subject, len(devices)):
        return None
    if OTHER_VENDOR in processors_of(candidate.machine)[0].notes:
        return None  # memory and speed of vLLM are known on NVIDIA's cards
    plan = _held(subject, case)
    return replace(plan, **_speeds(subject, case)) if plan.runs else plan


def _held(subject: Subject, case: EngineCase) -> Plan:
    """What the cards hold: each its part of weights and cache, and all that one alone would else.

    Latents are not split, nor are fewer heads of keys than there are cards (vllm 0.33.0,
    ``config/model.py``, ``get_num_kv_heads``).
    """
    devices = case.machine.devices
    count = len(devices)
    terms = [_on_one(term, subject.architecture, count) for term in subject.terms(case)]
    needed = peak(terms)[1]
    limit = ceiling_bytes(case.budget) // count
    reserved = min(limit, reserved_bytes(devices[0].memory_bytes, case.settings))
    return Plan(
        technique="tensor parallel" if count > 1 else "resident",
        engine="vllm",
        format=case.format,
        bits=case.bits,
        bits_per_weight=8 * case.weights.size_bytes / subject.architecture.num_parameters,
        device_bytes=needed * count,
        host_bytes=0,
        disk_bytes=0,
        budget_bytes=reserved * count,
        verdict="fits" if needed <= reserved else "exceeds",
        decode=NO_ROOM,
        prompt_of=no_prompt,
        options=("--tensor-parallel-size", str(count)),
        short_bytes=max(0, needed - reserved),
        short_of=f"the part of each card that vLLM reserves, {format_gib(reserved)}",
        sequences=subject.workload.batch_size,
    )


def _speeds(subject: Subject, case: EngineCase) -> dict[str, Any]:
    workload, reads = subject.workload, subject.reads(case)
    processors = processors_of(case.machine)

    def prompt() -> Rate | NotKnown:
        tokens = workload.longest_prompt_tokens
        return prompt_tps(subject.architecture, reads, processors, "vllm", tokens)

    decode = decode_tps(
        subject.architecture,
        reads,
        processors,
        "vllm",
        workload.context_tokens,
        batch_size=workload.batch_size,
        split="row",
        kv_bits=subject.cache_bits("vllm"),
    )
    return {"decode": decode, "prompt_of": prompt}


def split_refused(subject: Subject, count: int) -> str | None:
    """Why heads cannot be split over so many cards; ``None`` if they can.

    vllm 0.33.0, ``config/model.py``, ``verify_with_parallel_config``: attention heads must be
    divisible; ``layers/linear.py``, ``QKVParallelLinear``: so must heads of keys, one way or the
    other.
    """
    if count > MOST_CARDS:
        return f"{count} cards are more than one machine of {MOST_CARDS} has"
    for mixer in (m for layer in subject.architecture.layers for m in layer.mixers):
        if not isinstance(mixer, Attention | LatentAttention):
            continue
        heads = mixer.num_attention_heads
        keys = mixer.num_key_value_heads if isinstance(mixer, Attention) else heads
        if heads % count:
            return f"{heads} attention heads are not divisible by {count} cards"
        if keys % count and count % keys:
            return f"{keys} heads of keys are not divisible by {count} cards, nor those by them"
    return None


def _on_one(term: MemoryTerm, architecture: Architecture, count: int) -> MemoryTerm:
    if term.name == "weights":
        return replace(term, size_bytes=-(-term.size_bytes // count), basis="bound")
    if term.name == "kv_cache":
        return replace(term, size_bytes=-(-term.size_bytes // _cache_parts(architecture, count)))
    return term


def _cache_parts(architecture: Architecture, count: int) -> int:
    """How many different parts the cache has, at least: one where a layer keeps latents."""
    mixers = [m for layer in architecture.layers for m in layer.mixers]
    if any(isinstance(m, LatentAttention) for m in mixers):
        return 1
    keys = [m.num_key_value_heads for m in mixers if isinstance(m, Attention)]
    return min(count, min(keys, default=count))
