"""A model loaded by its plan, under its limits; each answer leaves a measured ledger."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from uma.checkpoint import Progress
from uma.ledger import Ledger
from uma.measurement.generation import Stats
from uma.memory.kv_cache import STEP
from uma.plan.forms import Form
from uma.plan.inference import InferencePlan, with_tokens
from uma.plan.limits import Limits, mlx_limits, phase_limits_bytes
from uma.runtime.batch import BatchAnswer, BatchResult, batch
from uma.runtime.bench import Bench
from uma.runtime.cache import PromptCache, prompt_cache
from uma.runtime.generate import Draft, Phase, Piece, Settings, generate
from uma.runtime.limits import memory_limits
from uma.runtime.load import LoadedModel, load
from uma.runtime.measure import PhaseMeter
from uma.runtime.measured import (
    Measurements,
    with_kept_cache,
    with_measurements,
    with_shared_cache,
)


@dataclass(slots=True)
class Session:
    """A model ready to answer. ``load_peak_bytes`` is the most that loading held.

    ``longest_tokens`` is the longest text that the cache has held so far.
    """

    plan: InferencePlan
    limits: Limits
    loaded: LoadedModel
    cache: PromptCache
    draft: Draft | None
    load_s: float
    load_peak_bytes: int
    longest_tokens: int = 0


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
    on_tokenizer: Callable[[Any], None] | None = None,
) -> Iterator[Session]:
    """Load the model of ``folder`` as ``plan`` says, within limits that end with the block.

    ``on_tokenizer`` is called before the weights are read.
    """
    limits = _limits(plan, wire=wire)
    with memory_limits(
        wired=limits.wired_limit_bytes,
        cache=limits.cache_limit_bytes,
        memory=limits.memory_limit_bytes,
    ):
        start = time.perf_counter()
        mx.reset_peak_memory()
        loaded = _load(plan.form, folder, adapter_path, progress, on_tokenizer)
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
    form: Form,
    folder: Path,
    adapter_path: Path | None = None,
    progress: Progress | None = None,
    on_tokenizer: Callable[[Any], None] | None = None,
) -> LoadedModel:
    return load(
        folder,
        quantization=None if form.kind == "float32" else form.quantization,
        dequantize_to="float32" if form.kind == "float32" else None,
        dtype="float32" if form.kind == "float32_scales" else None,
        adapter_path=adapter_path,
        progress=progress,
        on_tokenizer=on_tokenizer,
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

    MLX's limits are those of this prompt, which is mostly shorter than what was planned for; that
    of memory is the phase's too: evaluation runs as far ahead as the limit lets it.
    """
    plan = session.plan
    session.longest_tokens = max(session.longest_tokens, len(session.cache.tokens))
    prompt = max(len(prompt_tokens), session.longest_tokens)
    longest = prompt + (settings.max_tokens or plan.workload.context_tokens)
    asked = with_tokens(plan, prompt, min(longest, plan.workload.context_tokens))
    phases = _phases(asked, measured.meter)
    pool = _pool_limit_bytes(plan, prompt)
    try:
        with memory_limits(cache=pool, memory=_limits(asked, wire=False).memory_limit_bytes):
            yield from _answer(session, prompt_tokens, settings, measured, on_prefill, phases)
    finally:
        measured.meter.finish()
        session.longest_tokens = max(session.longest_tokens, len(session.cache.tokens))


def _pool_limit_bytes(plan: InferencePlan, prompt_tokens: int) -> int:
    """The pool of a prompt whose answer may end at once: no longer one has a smaller pool."""
    return _limits(with_tokens(plan, prompt_tokens, prompt_tokens), wire=False).cache_limit_bytes


def _phases(asked: InferencePlan, meter: PhaseMeter) -> Callable[[Phase], None]:
    """Called with the phase that begins: its memory limit, and its own peak."""
    limits = phase_limits_bytes(
        asked.ledger.terms, _limits(asked, wire=False), asked.machine, asked.largest_output_bytes
    )

    def on_phase(phase: Phase) -> None:
        if phase == "end":
            meter.finish()
        else:
            meter.enter(phase)
            mx.set_memory_limit(limits[phase])

    return on_phase


def _answer(
    session: Session,
    prompt_tokens: list[int],
    settings: Settings,
    measured: Measured,
    on_prefill: Callable[[int, int], None] | None,
    on_phase: Callable[[Phase], None],
) -> Iterator[Piece]:
    def progress(done: int, total: int) -> None:
        if done == total - 1:  # the last token is a step of decode: it may grow the caches
            on_phase("decode")
        if on_prefill is not None:
            on_prefill(done, total)

    for piece in generate(
        session.loaded,
        prompt_tokens,
        session.cache,
        settings,
        draft=session.draft,
        on_prefill=progress,
        on_phase=on_phase,
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
        if stats.reused_tokens:
            plan = with_kept_cache(session.plan, stats, session.longest_tokens)
        state = session.cache.state_nbytes
        caches = {
            ("kv_cache", "prefill"): stats.prefill_cache_bytes - state,
            ("kv_cache", "decode"): stats.cache_bytes - state,
            ("recurrent_state", "always"): state,
        }
        if session.draft is not None:
            caches["draft_weights", "always"] = session.draft.loaded.weights_bytes
            caches["draft_kv_cache", "decode"] = session.draft.cache.nbytes
    return with_measurements(session, plan, caches, measured.meter)


def bench_ledger(session: Session, bench: Bench) -> Ledger:
    """The plan's terms beside what the trials of ``bench`` held."""
    caches: Measurements = {
        ("kv_cache", "decode"): bench.cache_bytes - bench.state_bytes,
        ("recurrent_state", "always"): bench.state_bytes,
    }
    return with_measurements(session, session.plan, caches, bench.meter)


def answer_all(
    session: Session,
    prompts: list[list[int]],
    settings: Settings,
    on_answer: Callable[[int, BatchAnswer], None] | None = None,
) -> BatchResult:
    """Answers to all prompts, as many at a time as planned, within the pool of the longest."""
    workload = session.plan.workload
    pool = _pool_limit_bytes(session.plan, max(map(len, prompts)))
    with memory_limits(cache=pool):
        return batch(
            session.loaded,
            prompts,
            context_tokens=workload.context_tokens,
            settings=settings,
            batch_size=workload.batch_size,
            on_answer=on_answer,
        )


def batch_ledger(session: Session, result: BatchResult) -> Ledger:
    """The plan's terms for the longest prompt and answer of a batch, beside what its caches held.

    Temporaries are not told apart: some sequences are read while others are answered.
    """
    prompt = max(a.prompt_tokens for a in result.answers)
    longest = max(a.prompt_tokens + a.generation_tokens for a in result.answers)
    plan = with_shared_cache(session.plan, prompt, longest)
    caches: Measurements = {
        ("kv_cache", "decode"): result.held_bytes - result.state_bytes,
        ("recurrent_state", "always"): result.state_bytes,
    }
    return with_measurements(session, plan, caches, result.meter)


def longer_context(plan: InferencePlan) -> int | None:
    """A context beyond that of ``plan`` which the model was made for and the limit allows.

    Double, else half as much more, else one growth step of the caches.
    """
    context = plan.workload.context_tokens
    longest = plan.architecture.max_position_embeddings or 2 * context
    for more in (context, context // 2, STEP):
        wanted = min(context + more, longest)
        if wanted > context and with_tokens(plan, wanted, wanted).verdict != "exceeds":
            return wanted
    return None


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
