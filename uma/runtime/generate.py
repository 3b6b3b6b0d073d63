"""Generate text within a context: prefill what is new, stream pieces, stop where asked."""

import json
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from uma.errors import CheckpointError, UsageError
from uma.measurement.generation import Stats
from uma.runtime.answer import Answer
from uma.runtime.cache import (
    PromptCache,
    check_bound,
    held_tokens,
    never_forgets,
    reset,
    reuse,
    rewind,
)
from uma.runtime.interrupt import Torn, interruptible
from uma.runtime.load import LoadedModel
from uma.runtime.threads import set_faster_threads
from uma.workload import DEFAULT_PREFILL_STEP_SIZE

Phase = Literal["prefill", "decode", "end"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; a temperature of 0 takes the likeliest."""

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """``max_tokens`` of ``None`` means up to the context; ``stop`` strings end the answer.

    With ``logprobs`` each piece carries those of the whole vocabulary, and keeps them in memory.
    """

    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    stop: tuple[str, ...] = ()
    num_draft_tokens: int = 3
    logprobs: bool = False


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Draft:
    """A smaller model that proposes tokens, and its own cache."""

    loaded: LoadedModel
    cache: PromptCache


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of text and the token that completed it; the last piece has ``stats`` and no token."""

    text: str = ""
    token: int | None = None
    thinking: bool = False
    from_draft: bool = False
    logprobs: Any = None
    stats: Stats | None = None


def generate(
    loaded: LoadedModel,
    prompt_tokens: list[int],
    cache: PromptCache,
    settings: Settings = DEFAULTS,
    *,
    draft: Draft | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    on_phase: Callable[[Phase], None] | None = None,
) -> Iterator[Piece]:
    """Yield the answer to ``prompt_tokens`` piece by piece; ``cache`` keeps what was processed.

    The part of the prompt that the cache already holds is not processed again. Prompt and answer
    together never exceed ``cache.context_tokens``. On Ctrl-C the generation ends between two
    tokens or two chunks of the prompt with ``KeyboardInterrupt``, and the cache stays usable.

    Raises:
        UsageError: If the prompt is empty or leaves no room in the context, or the draft model
            cannot be used with this one.
    """
    limit = generation_limit(len(prompt_tokens), cache.context_tokens, settings.max_tokens)
    if draft is not None:
        check_draft(loaded, cache, draft)
    notify = on_phase or (lambda _: None)
    answer = Answer(loaded.tokenizer, prompt_tokens, limit, settings.max_tokens, settings.stop)
    run = _Run(loaded, answer, cache, settings, draft, _reuse(cache, draft, prompt_tokens))
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    with interruptible() as interrupted, _tidy(run):
        _use_faster_threads()
        mx.clear_cache()
        notify("prefill")

        def progress(done: int, total: int) -> None:
            run.prefilled(done, total)
            if on_prefill is not None:
                on_prefill(run.reused + done, run.reused + total)
            if interrupted.is_set():
                raise KeyboardInterrupt

        with closing(_steps(run, progress)) as steps:
            for token, logprobs, from_draft in steps:
                if not answer.tokens:
                    notify("decode")
                yield from run.add(token, logprobs, from_draft)
                if answer.finish_reason is not None:
                    break
                if interrupted.is_set():
                    raise KeyboardInterrupt
    notify("end")
    yield from (Piece(s.text, thinking=s.thinking) for s in answer.rest())
    yield Piece(stats=run.stats())


def _use_faster_threads() -> None:
    x, w = mx.ones((64, 1024)), mx.ones((1024, 1024))
    mx.eval(x, w)
    set_faster_threads(lambda: mx.eval(x @ w.T))


def generation_limit(prompt_tokens: int, context_tokens: int, max_tokens: int | None) -> int:
    """How many tokens may follow the prompt.

    Raises:
        UsageError: If there is no prompt, or no room after it.
    """
    if prompt_tokens == 0:
        raise UsageError("the prompt is empty")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {max_tokens}")
    room = context_tokens - prompt_tokens
    if room < 1:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and leaves no room in a context of "
            f"{context_tokens}; shorten it, or give --context {prompt_tokens + 256} or more"
        )
    return room if max_tokens is None else min(room, max_tokens)


def sampling_defaults(folder: Path) -> Sampling:
    """Sampling of the model's ``generation_config.json``; greedy where it names none.

    Raises:
        CheckpointError: If the file cannot be read or is not JSON, or a value is no number.
    """
    path = folder / "generation_config.json"
    try:
        if not path.is_file():
            return Sampling()
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("do_sample") is False:
            return Sampling()
        temp = config.get("temperature")
        if temp is None:
            temp = 1.0 if config.get("do_sample") is True else 0.0
        return Sampling(
            temp=_within("temperature", float(temp), math.inf),
            top_p=_within("top_p", float(config.get("top_p") or 0.0), 1),
            min_p=_within("min_p", float(config.get("min_p") or 0.0), 1),
            top_k=max(0, int(config.get("top_k") or 0)),
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be used: {error}") from error


def _within(name: str, value: float, most: float) -> float:
    if not (0 <= value <= most and value < math.inf):
        raise ValueError(f"{name} is {value}")
    return value


def sampler(sampling: Sampling, vocab_size: int) -> Callable[[mx.array], mx.array]:
    """mlx-lm's sampler; a ``top_k`` of the whole vocabulary or more filters nothing."""
    from mlx_lm.sample_utils import make_sampler

    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    made: Callable[[mx.array], mx.array] = make_sampler(
        sampling.temp, sampling.top_p, sampling.min_p, top_k=top_k
    )
    return made


def check_draft(loaded: LoadedModel, cache: PromptCache, draft: Draft) -> None:
    """Refuse speculative decoding where it would fail or give wrong text.

    Raises:
        UsageError: If the vocabularies differ, or a cache cannot forget rejected tokens.
    """
    if loaded.tokenizer.get_vocab() != draft.loaded.tokenizer.get_vocab():
        raise UsageError("the draft model has another vocabulary; choose one of the same family")
    for one, model, name in (
        (cache, loaded.model, "model"),
        (draft.cache, draft.loaded.model, "draft model"),
    ):
        # mlx-lm 0.32.2 splits the joined list of caches at len(model.layers).
        if never_forgets(one) or len(one.layers) != len(model.layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in one.layers}))
            raise UsageError(
                f"the {name}'s cache ({kinds}) cannot forget rejected tokens within a context of "
                f"{one.context_tokens}; run without --draft-model"
            )


@dataclass(slots=True)
class _Run:
    """The state of one generation."""

    loaded: LoadedModel
    answer: Answer
    cache: PromptCache
    settings: Settings
    draft: Draft | None
    reused: int
    processed: int = 0
    drafted: int = 0
    prefill_cache_bytes: int = 0
    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    def prefilled(self, done: int, total: int) -> None:
        self.processed = done
        if done < total:
            self.prefill_cache_bytes = max(self.prefill_cache_bytes, self.cache.nbytes)

    def add(self, token: int, logprobs: Any, from_draft: bool) -> Iterator[Piece]:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.prefill_cache_bytes = self.prefill_cache_bytes or self.cache.nbytes
        self.drafted += from_draft
        *before, now = [Piece(s.text, thinking=s.thinking) for s in self.answer.add(token)] or [
            Piece()
        ]
        yield from before
        shown = logprobs if self.settings.logprobs else None
        yield Piece(now.text, token, now.thinking, from_draft, shown)

    def stats(self) -> Stats:
        prompt, generated = len(self.answer.prompt), len(self.answer.tokens)
        to_first, after = self.first - self.start, self.last - self.first
        assert self.answer.finish_reason is not None
        return Stats(
            prompt_tokens=prompt,
            reused_tokens=self.reused,
            generation_tokens=generated,
            draft_tokens=self.drafted,
            finish_reason=self.answer.finish_reason,
            ttft_s=to_first,
            prompt_tps=(prompt - self.reused) / to_first,
            generation_tps=generated / after if after > 0 else None,
            prefill_cache_bytes=self.prefill_cache_bytes,
            cache_bytes=self.cache.nbytes,
        )


def _steps(
    run: _Run, progress: Callable[[int, int], None]
) -> Generator[tuple[int, Any, bool], None, None]:
    """mlx-lm's generation loop, plain or with a draft model: token, log-probabilities, drafted."""
    from mlx_lm.generate import generate_step, speculative_generate_step

    prompt = mx.array(run.answer.prompt[run.reused :], mx.uint32)
    options: dict[str, Any] = {
        "max_tokens": run.answer.limit,
        "sampler": sampler(run.settings.sampling, len(run.loaded.tokenizer)),
        "prefill_step_size": run.settings.prefill_step_size,
    }
    if run.draft is not None:
        yield from speculative_generate_step(
            prompt,
            run.loaded.model,
            run.draft.loaded.model,
            prompt_cache=run.cache.layers + run.draft.cache.layers,
            num_draft_tokens=run.settings.num_draft_tokens,
            **options,
        )
        return
    for token, logprobs in generate_step(
        prompt,
        run.loaded.model,
        prompt_cache=run.cache.layers,
        prompt_progress_callback=progress,
        **options,
    ):
        yield token, logprobs, False


def _reuse(cache: PromptCache, draft: Draft | None, prompt: list[int]) -> int:
    """Tokens of the prompt that the cache, and the draft's, keep.

    A cache that keeps none starts anew: rewound to nothing it would still hold its arrays.
    """
    caches = [cache] if draft is None else [cache, draft.cache]
    kept = min(reuse(one, prompt) for one in caches)
    for one in caches:
        if not kept:
            reset(one)
        else:
            rewind(one, kept)
    return kept


@contextmanager
def _tidy(run: _Run) -> Iterator[None]:
    """Afterwards the caches know their tokens, the stream is idle and the pool is empty."""
    from mlx_lm.generate import generation_stream

    caches = [run.cache] if run.draft is None else [run.cache, run.draft.cache]
    try:
        yield
    except BaseException as error:
        whole = isinstance(error, KeyboardInterrupt | GeneratorExit)
        if whole and not isinstance(error, Torn):
            _note_tokens(run, caches)
        else:
            for cache in caches:
                reset(cache)
        raise
    else:
        _note_tokens(run, caches)
        check_bound(run.cache)
    finally:
        mx.synchronize(generation_stream)
        mx.clear_cache()


def _note_tokens(run: _Run, caches: list[PromptCache]) -> None:
    """Write down what the caches hold: a token is in the cache by the time it is yielded.

    Not so the last one of a speculative round, hence the caches' own count.
    """
    prompt, generated = run.answer.prompt, run.answer.tokens
    seen = prompt + generated if generated else prompt[: run.reused + run.processed]
    for cache in caches:
        held = held_tokens(cache)
        cache.tokens = seen[:held]
