"""Plans on several Macs that are joined by Thunderbolt: each is a node with its own memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from uma.architecture.layers import Architecture, Attention, LatentAttention
from uma.ledger import peak
from uma.machine import budget_of, verdict
from uma.memory.term import MemoryTerm
from uma.plan.compare.candidates import Candidate
from uma.plan.compare.plans import NO_ROOM, Plan, Technique, no_prompt
from uma.plan.compare.subject import Subject, cached_bytes
from uma.plan.inference import halvings
from uma.plan.mlx_case import MlxCase
from uma.speed.decode import decode_tps
from uma.speed.links import JACCL, RING
from uma.speed.prefill import prompt_tps
from uma.speed.processor import processors_of
from uma.speed.rate import NotKnown, Rate, Split
from uma.units import format_gib
from uma.workload import Inference

# Modules of mlx-lm 0.32.2 whose models have ``shard``, and those whose inner model has ``pipeline``
# (utils.py, sharded_load); a test compares with the modules themselves.
# fmt: off
SHARDS = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash",
    "longcat_flash_ngram", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "muse_spark",
    "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "step3p5",
})
PIPELINES = frozenset({
    "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe",
    "glm4_moe_lite", "minimax_m3_vl", "ministral3", "mistral4", "muse_spark", "qwen2", "qwen3_5",
    "qwen3_moe", "qwen3_next",
})
# fmt: on
TECHNIQUES: dict[Split, Technique] = {
    "row": "tensor parallel over Thunderbolt",
    "layer": "split by layers over Thunderbolt",
}


NO_LINK = NotKnown("which Thunderbolt it has is not in the catalog")


def _no_link() -> NotKnown:
    return NO_LINK


class _Part(NamedTuple):
    """What the fullest of the nodes holds of all weights, and of all caches."""

    split: Split
    weights: float
    cache: float


def cluster_plans(subject: Subject, candidate: Candidate, bits: int) -> Iterator[Plan]:
    """Every matrix split, or whole layers on each, as far as mlx-lm can do it with the model."""
    case = subject.mlx(bits, candidate.machine)
    if case is None:
        return
    for part in parts_of(subject.architecture, candidate.number):
        yield _plan(subject, candidate, case, part)


def parts_of(architecture: Architecture, number: int) -> list[_Part]:
    """The ways to split a model over ``number`` nodes.

    Embeddings and head are whole on each. A split of matrices divides heads (mlx-lm 0.32.2,
    ``models/llama.py``, ``shard``: ``n_heads //= N``, ``n_kv_heads //= N``), and leaves latents
    whole (``models/deepseek_v3.py``); layers are dealt evenly (``models/pipeline.py``).
    """
    outside = sum(p.size for p in architecture.parameters) / architecture.num_parameters
    layers, found = len(architecture.layers), []
    mixers = [m for layer in architecture.layers for m in layer.mixers]
    heads = [m.num_attention_heads for m in mixers if isinstance(m, Attention | LatentAttention)]
    heads += [m.num_key_value_heads for m in mixers if isinstance(m, Attention)]
    if architecture.module in SHARDS and not any(count % number for count in heads):
        latent = any(isinstance(m, LatentAttention) for m in mixers)
        share = outside + (1 - outside) / number
        found.append(_Part("row", share, 1.0 if latent else 1 / number))
    if architecture.module in PIPELINES and layers >= number:
        share = -(-layers // number) / layers
        found.append(_Part("layer", outside + (1 - outside) * share, share))
    return found


def _plan(subject: Subject, candidate: Candidate, case: MlxCase, part: _Part) -> Plan:
    number, machine = candidate.number, candidate.machine
    workload, needed = _fitting(case, part)
    budget = budget_of(machine)
    ceiling = budget.ceiling_bytes
    weights = case.cases[-1].form.weights.size_bytes
    plan = Plan(
        technique=TECHNIQUES[part.split],
        engine="mlx",
        format=case.format,
        bits=case.bits,
        bits_per_weight=8 * weights / subject.architecture.num_parameters,
        device_bytes=number * needed,
        host_bytes=0,
        disk_bytes=0,
        budget_bytes=number * budget.budget_bytes,
        verdict=verdict(needed, budget),
        decode=NO_ROOM,
        prompt_of=no_prompt,
        notes=tuple(_notes(candidate, part, needed, budget.budget_bytes, weights)),
        short_bytes=max(0, needed - ceiling),
        short_of=f"each of {number} Macs, {format_gib(ceiling)}",
        sequences=subject.workload.batch_size,
        cache_bytes=cached_bytes(case.cases[-1].terms(workload)),
    )
    return _with_speed(subject, candidate, plan, part.split, workload) if plan.runs else plan


def _fitting(case: MlxCase, part: _Part) -> tuple[Inference, int]:
    """The largest prefill step with which a node's part fits, and what it needs then."""
    budget, workload, needed = case.budget.budget_bytes, case.workload, 0
    for step in halvings(workload.prefill_step_size):
        workload = replace(workload, prefill_step_size=step)
        terms = (_share(term, part) for term in case.cases[-1].terms(workload))
        needed = peak(terms)[1] + case.machine.overhead_bytes
        if needed <= budget:
            break
    return workload, needed


def _share(term: MemoryTerm, part: _Part) -> MemoryTerm:
    shares = {"weights": part.weights, "kv_cache": part.cache, "recurrent_state": part.cache}
    share = shares.get(term.name, 1.0)
    return replace(term, size_bytes=-int(-term.size_bytes * share // 1), basis="bound")


def _notes(
    candidate: Candidate, part: _Part, needed: int, budget: int, weights: int
) -> Iterator[str]:
    yield f"each of {candidate.number} Macs holds {format_gib(needed)} of {format_gib(budget)}"
    fast = candidate.thunderbolt == "TB5"
    backend, link = ("jaccl", "Thunderbolt 5, macOS 26.2") if fast else ("ring", "TCP")
    if not candidate.thunderbolt:
        link = "TCP; with Thunderbolt 5 and macOS 26.2 --backend jaccl"
    pipeline = " --pipeline" if part.split == "layer" else ""
    yield f"mlx.launch --backend {backend} --hostfile hosts.json mlx_lm.server{pipeline} ({link})"
    kept = weights if part.split == "row" else round(weights * part.weights)
    yield f"each keeps {format_gib(kept)} of the model on its disk"
    if candidate.number > 2 and fast:
        yield "JACCL needs a cable between each two of them"


def _with_speed(
    subject: Subject, candidate: Candidate, plan: Plan, split: Split, workload: Inference
) -> Plan:
    if not candidate.thunderbolt:
        return replace(plan, decode=NO_LINK, prompt_of=_no_link)
    architecture = subject.architecture
    processors = processors_of(candidate.machine) * candidate.number
    reads = subject.even_reads(round(plan.bits_per_weight * architecture.num_parameters / 8))
    link = JACCL if candidate.thunderbolt == "TB5" else RING

    def prompt() -> Rate | NotKnown:
        return prompt_tps(
            architecture,
            reads,
            processors,
            "mlx",
            subject.tokens,
            pass_tokens=workload.prefill_step_size,
            quantized=plan.bits < 16,
            split=split,
            link=link,
        )

    decode = decode_tps(
        architecture,
        reads,
        processors,
        "mlx",
        subject.tokens,
        batch_size=subject.workload.batch_size,
        kv_bits=subject.cache_bits("mlx"),
        split=split,
        link=link,
    )
    return replace(plan, decode=decode, prompt_of=prompt)
