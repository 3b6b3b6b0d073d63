"""A model loaded by its plan, under its limits; each answer leaves a measured ledger."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from uma.ledger import Ledger
from uma.plan.inference import Form, InferencePlan, with_tokens
from uma.plan.limits import Limits, mlx_limits
from uma.runtime.bench import Bench
from uma.runtime.cache import PromptCache, prompt_cache
from uma.runtime.generate import Draft, Piece, Settings, Stats, generate
from uma.runtime.limits import memory_limits
from uma.runtime.load import LoadedModel, Progress, load
from uma.runtime.measure import PhaseMeter, measured_by


@dataclass(slots=True)
class Session:
    """A model ready to answer. ``load_peak_bytes`` is the most that loading held."""

    plan: InferencePlan
    limits: Limits
    loaded: LoadedModel
    cache: PromptCache
    draft: Draft | None
    load_s: float
    load_peak_bytes: int


@dataclass(slots=True)
class Measured:
    """Filled in while one answer is generated."""

    meter: PhaseMeter
    stats: Stats | None = None


@contextmanager
def open_session(
    plan: InferencePlan,
    folder: Path,
    *,
    wire: bool = True,
    adapter_path: Path | None = None,
    draft_folder: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Session]:
    """Load the model of ``folder`` as ``plan`` says, within limits that end with the block."""
    limits = _limits(plan, wire=wire)
    with memory_limits(
        wired=limits.wired_limit_bytes,
        cache=limits.cache_limit_bytes,
        memory=limits.memory_limit_bytes,
    ):
        start = time.perf_counter()
        mx.reset_peak_memory()
        loaded = _load(plan.form, folder, adapter_path, progress)
        cache = _cache(plan, loaded)
        draft = None
        if draft_folder is not None:
            assert plan.beside.draft is not None
            draft_loaded = _load(plan.beside.draft.form, draft_folder)
            draft = Draft(draft_loaded, _cache(plan, draft_loaded, draft=True))
        mx.clear_cache()
        load_s, load_peak = time.perf_counter() - start, mx.get_peak_memory()
        yield Session(plan, limits, loaded, cache, draft, load_s, load_peak)


def _load(
    form: Form, folder: Path, adapter_path: Path | None = None, progress: Progress | None = None
) -> LoadedModel:
    return load(
        folder,
        quantization=None if form.kind == "float32" else form.quantization,
        dequantize_to="float32" if form.kind == "float32" else None,
        dtype="float32" if form.kind == "float32_scales" else None,
        adapter_path=adapter_path,
        progress=progress,
    )


def _limits(plan: InferencePlan, *, wire: bool) -> Limits:
    return mlx_limits(
        plan.active_peak_bytes,
        plan.form.weights.size_bytes,
        plan.budget,
        plan.machine,
        wire=wire,
        largest_output_bytes=plan.largest_output_bytes,
    )


def _cache(plan: InferencePlan, loaded: LoadedModel, *, draft: bool = False) -> PromptCache:
    workload = plan.workload
    return prompt_cache(
        loaded.model,
        context_tokens=workload.context_tokens,
        kv_bits=None if draft else workload.kv_bits,
        kv_group_size=workload.kv_group_size,
    )


def answer(
    session: Session,
    prompt_tokens: list[int],
    settings: Settings,
    measured: Measured,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[Piece]:
    """The pieces of one answer; ``measured`` has its statistics and peaks afterwards.

    MLX's memory limit is that of this prompt, which is mostly shorter than what was planned for:
    evaluation would run as far ahead as the limit lets it.
    """
    plan = session.plan
    longest = len(prompt_tokens) + (settings.max_tokens or plan.workload.context_tokens)
    asked = with_tokens(plan, len(prompt_tokens), min(longest, plan.workload.context_tokens))
    try:
        with memory_limits(memory=_limits(asked, wire=False).memory_limit_bytes):
            yield from _answer(session, prompt_tokens, settings, measured, on_prefill)
    finally:
        measured.meter.finish()


def _answer(
    session: Session,
    prompt_tokens: list[int],
    settings: Settings,
    measured: Measured,
    on_prefill: Callable[[int, int], None] | None,
) -> Iterator[Piece]:
    for piece in generate(
        session.loaded,
        prompt_tokens,
        session.cache,
        settings,
        draft=session.draft,
        on_prefill=on_prefill,
        on_phase=measured_by(measured.meter),
    ):
        measured.stats = piece.stats or measured.stats
        yield piece


def measured_ledger(session: Session, measured: Measured) -> Ledger:
    """The plan's terms for the tokens that one answer used, each beside what was measured of it.

    The verdict stays that of the context asked for.
    """
    stats, plan = measured.stats, session.plan
    caches: Measurements = {}
    if stats is not None:
        plan = with_tokens(plan, stats.prompt_tokens, stats.prompt_tokens + stats.generation_tokens)
        state = session.cache.state_nbytes
        caches = {
            ("kv_cache", "prefill"): stats.prefill_cache_bytes - state,
            ("kv_cache", "decode"): stats.cache_bytes - state,
            ("recurrent_state", "always"): state,
        }
        if session.draft is not None:
            caches["draft_weights", "always"] = session.draft.loaded.weights_bytes
            caches["draft_kv_cache", "decode"] = session.draft.cache.nbytes
    return _measured(session, plan, caches, measured.meter)


def bench_ledger(session: Session, bench: Bench) -> Ledger:
    """The plan's terms beside what the trials of ``bench`` held."""
    caches: Measurements = {
        ("kv_cache", "decode"): bench.cache_bytes - bench.state_bytes,
        ("recurrent_state", "always"): bench.state_bytes,
    }
    return _measured(session, session.plan, caches, bench.meter)


Measurements = dict[tuple[str, str], int]
"""Bytes by name and phase of a term."""


def _measured(
    session: Session, plan: InferencePlan, caches: Measurements, meter: PhaseMeter
) -> Ledger:
    found: Measurements = {
        ("weights", "always"): session.loaded.weights_bytes - session.loaded.adapter_bytes,
        ("adapters", "always"): session.loaded.adapter_bytes,
        ("buffer_pool", "always"): meter.pool_bytes,
        **caches,
    }
    if caches:
        found |= _transient_bytes(plan.ledger, found, meter.peaks)
    highest = (meter.active_and_pool_bytes, meter.peak_bytes, session.load_peak_bytes)
    return replace(
        plan.ledger,
        verdict=session.plan.verdict,
        measured=found,
        measured_peak_bytes=max(highest),
    )


_TRANSIENT = ("activations", "attention", "logits")


def _transient_bytes(ledger: Ledger, found: Measurements, peaks: dict[str, int]) -> Measurements:
    """What a phase's peak held beside weights and caches, where a single term stands for it."""
    result: Measurements = {}
    for phase, peak_bytes in peaks.items():
        terms = [t for t in ledger.terms if t.phase in (phase, "always")]
        keys = [(t.name, t.phase) for t in terms if t.name in _TRANSIENT]
        rest = [(t.name, t.phase) for t in terms if t.name not in (*_TRANSIENT, "buffer_pool")]
        if len(keys) == 1 and all(key in found for key in rest):
            result[keys[0]] = max(0, peak_bytes - sum(found[key] for key in rest))
    return result


def settings_record(settings: Settings) -> dict[str, Any]:
    """The sampling settings as they are recorded: no text of the user's."""
    sampling = settings.sampling
    return {
        "temp": sampling.temp,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": settings.max_tokens,
    }
