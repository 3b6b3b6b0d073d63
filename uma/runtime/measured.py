"""A plan's ledger beside what MLX held, and what of it a kept or a shared cache makes a bound."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from uma.ledger import Ledger
from uma.measurement.generation import Stats
from uma.memory.kv_cache import STEP
from uma.plan.inference import InferencePlan, with_tokens
from uma.runtime.measure import PhaseMeter, overhead_bytes

if TYPE_CHECKING:
    from uma.runtime.session import Session

Measurements = dict[tuple[str, str], int]
"""Bytes by name and phase of a term."""

KEPT = "cache kept from before, up to one growth step more"
SHARED = "cache of all sequences, each as wide as the longest"


def with_kept_cache(plan: InferencePlan, stats: Stats, longest_tokens: int) -> InferencePlan:
    """``plan`` for an answer that found a cache which has held up to ``longest_tokens``.

    mlx-lm 0.32.2 trims a cache without shrinking its arrays and grows it from where it stands
    (``models/cache.py``), and the chunks of the prompt begin there: as large as the last chunk
    here, which finds as many tokens and grows the caches.
    """
    step = plan.workload.prefill_step_size
    chunk = min(step, _rounded_up(stats.prompt_tokens - stats.reused_tokens, STEP))
    cached = _rounded_up(max(0, stats.prompt_tokens - chunk), max(chunk, STEP))
    prompt = cached + chunk + 1
    chunked = replace(plan, workload=replace(plan.workload, prefill_step_size=chunk))
    reused = with_tokens(chunked, prompt, prompt + stats.generation_tokens + STEP)
    longest = with_tokens(plan, longest_tokens, longest_tokens + STEP)
    return _bounded(reused, _sizes(longest, reused), ("kv_cache", "draft_kv_cache"), KEPT)


def with_shared_cache(plan: InferencePlan, prompt: int, longest_tokens: int) -> InferencePlan:
    """``plan`` for a batch whose prompts have up to ``prompt`` tokens.

    Sequences come and go, so some are read while others are answered: each phase can find the
    caches of all.
    """
    longest = with_tokens(plan, longest_tokens, longest_tokens + STEP)
    batch = with_tokens(plan, prompt, longest_tokens)
    return _bounded(batch, _sizes(longest), ("kv_cache", "recurrent_state"), SHARED)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _sizes(*plans: InferencePlan) -> dict[str, int]:
    """The largest size of each term in any phase of any plan, by name."""
    sizes: dict[str, int] = {}
    for term in (term for plan in plans for term in plan.ledger.terms):
        sizes[term.name] = max(sizes.get(term.name, 0), term.size_bytes)
    return sizes


def _bounded(
    plan: InferencePlan, sizes: dict[str, int], names: Collection[str], source: str
) -> InferencePlan:
    terms = tuple(
        replace(term, size_bytes=sizes[term.name], basis="bound", source=source)
        if term.name in names
        else term
        for term in plan.ledger.terms
    )
    return replace(plan, ledger=replace(plan.ledger, terms=terms))


def with_measurements(
    session: "Session", plan: InferencePlan, caches: Measurements, meter: PhaseMeter
) -> Ledger:
    """The ledger of ``plan`` with ``caches`` and all else that was measured of its terms."""
    found: Measurements = {
        ("weights", "always"): session.loaded.weights_bytes - session.loaded.adapter_bytes,
        ("adapters", "always"): session.loaded.adapter_bytes,
        ("buffer_pool", "always"): meter.pool_bytes,
        **caches,
    }
    if caches:
        found |= _transient_bytes(plan.ledger, found, meter.peaks)
    beside = {(term.name, term.phase): overhead_bytes() for term in plan.machine.overhead}
    highest = (meter.active_and_pool_bytes, meter.peak_bytes, session.load_peak_bytes)
    return replace(
        plan.ledger,
        verdict=session.plan.verdict,
        measured=found | beside,
        measured_peak_bytes=max(highest) + sum(beside.values()),
    )


_TRANSIENT = ("activations", "attention", "logits")


def _transient_bytes(ledger: Ledger, found: Measurements, peaks: dict[str, int]) -> Measurements:
    """What a phase's peak held beside weights and caches, where a single term stands for it."""
    result: Measurements = {}
    for phase, peak_bytes in peaks.items():
        terms = [t for t in ledger.terms if t.phase in (phase, "always")]
        keys = [(t.name, t.phase) for t in terms if t.name in _TRANSIENT]
        others = (*_TRANSIENT, "buffer_pool", "runtime_context")
        rest = [(t.name, t.phase) for t in terms if t.name not in others]
        if len(keys) == 1 and all(key in found for key in rest):
            result[keys[0]] = max(0, peak_bytes - sum(found[key] for key in rest))
    return result
