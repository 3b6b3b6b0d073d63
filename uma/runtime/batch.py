"""Many prompts at once through mlx-lm's batch engine, and what their caches hold and use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from uma.errors import UsageError
from uma.runtime.answer import Answer, FinishReason
from uma.runtime.generate import DEFAULTS, Settings, generation_limit, sampler
from uma.runtime.load import LoadedModel

BLOCK_TOKENS = 16  # vLLM 0.11, --block-size: tokens of one block of a paged cache


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    generation_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Answers in the order of the prompts, and the caches at the last step that held most.

    ``held_bytes`` is what the engine's arrays took there, ``used_bytes`` the part of them that
    held tokens, ``paged_bytes`` what blocks of ``BLOCK_TOKENS`` would take for the same tokens.
    """

    answers: tuple[BatchAnswer, ...]
    held_bytes: int
    used_bytes: int
    paged_bytes: int
    prompt_tps: float
    generation_tps: float


@dataclass(slots=True)
class _Run:
    """Answers in the making, tokens in flight by sequence, and the step that held most."""

    answers: dict[int, Answer]
    texts: dict[int, str]
    tokens: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    at_most: list[int] = field(default_factory=list)

    def add(self, uid: int, token: int) -> bool:
        """Take one token of a sequence; whether that ends it."""
        answer = self.answers[uid]
        segments = answer.add(token)
        self.tokens[uid] += 1
        if answer.finish_reason is not None:
            segments += answer.rest()
            del self.tokens[uid]
        self.texts[uid] += "".join(s.text for s in segments)
        return answer.finish_reason is not None

    def note(self, held_bytes: int) -> None:
        if held_bytes >= self.held_bytes:
            self.held_bytes, self.at_most = held_bytes, list(self.tokens.values())

    def result(self, uid: int) -> BatchAnswer:
        answer = self.answers[uid]
        assert answer.finish_reason is not None
        return BatchAnswer(
            self.texts[uid],
            tuple(answer.tokens),
            len(answer.prompt),
            len(answer.tokens),
            answer.finish_reason,
        )


def batch(
    loaded: LoadedModel,
    prompts: list[list[int]],
    *,
    context_tokens: int,
    settings: Settings = DEFAULTS,
    batch_size: int = 8,
    on_answer: Callable[[int, BatchAnswer], None] | None = None,
) -> BatchResult:
    """Answer all prompts, at most ``batch_size`` at a time, each within ``context_tokens``.

    ``on_answer`` takes the index of a prompt and its answer as soon as that is complete.

    Raises:
        UsageError: If a prompt leaves no room in the context, or a cache has no batched form.
    """
    answers = [_answer(loaded, prompt, context_tokens, settings) for prompt in prompts]
    layout = _layout(loaded.model)
    if settings.sampling.seed is not None:
        mx.random.seed(settings.sampling.seed)
    engine = _engine(loaded, settings, batch_size)
    try:
        ids = engine.insert(prompts, [answer.limit for answer in answers])
        run = _Run(dict(zip(ids, answers, strict=True)), dict.fromkeys(ids, ""))
        with engine.stats() as stats:
            for uid in _ended(engine, run):
                if on_answer is not None:
                    on_answer(ids.index(uid), run.result(uid))
    finally:
        engine.close()
        mx.clear_cache()
    return BatchResult(
        answers=tuple(run.result(uid) for uid in ids),
        held_bytes=run.held_bytes,
        used_bytes=sum(_bytes(layout, n) for n in run.at_most),
        paged_bytes=sum(_bytes(layout, -(-n // BLOCK_TOKENS) * BLOCK_TOKENS) for n in run.at_most),
        prompt_tps=stats.prompt_tps,
        generation_tps=stats.generation_tps,
    )


def _ended(engine: Any, run: _Run) -> Iterator[int]:
    """Step the engine to the end; ids of the sequences as they end."""
    while any(answer.finish_reason is None for answer in run.answers.values()):
        prefilled, generated = engine.next()
        for r in prefilled:
            run.tokens[r.uid] = r.progress[0]
        ended = [r for r in generated if run.add(r.uid, r.token)]
        run.note(engine.prompt_cache_nbytes)
        for r in ended:
            if r.finish_reason is None:  # a stop string, which the engine does not know
                engine.remove([r.uid])
            yield r.uid


def _answer(
    loaded: LoadedModel, prompt: list[int], context_tokens: int, settings: Settings
) -> Answer:
    limit = generation_limit(len(prompt), context_tokens, settings.max_tokens)
    return Answer(loaded.tokenizer, prompt, limit, settings.max_tokens, settings.stop)


def _engine(loaded: LoadedModel, settings: Settings, batch_size: int) -> Any:
    """mlx-lm's ``BatchGenerator``, without the wired limit that it sets on its own."""
    from mlx_lm.generate import BatchGenerator

    wired = mx.set_wired_limit(0)
    mx.set_wired_limit(wired)
    engine = BatchGenerator(
        loaded.model,
        stop_tokens=[[t] for t in loaded.tokenizer.eos_token_ids],
        sampler=sampler(settings.sampling, len(loaded.tokenizer)),
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
        prefill_step_size=settings.prefill_step_size,
    )
    mx.set_wired_limit(wired)
    return engine


def _layout(model: Any) -> list[tuple[int, int | None, int]]:
    """Of each cache: bytes per token, most tokens held, bytes whatever the length.

    Read off the shapes of one token's graph, which is not evaluated.
    """
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    layout: list[tuple[int, int | None, int]] = []
    for part in (p for c in caches for p in getattr(c, "caches", (c,))):
        if not hasattr(part, "merge"):
            raise UsageError(
                f"mlx-lm has no batched form of a {type(part).__name__}; run the prompts one by one"
            )
        if hasattr(part, "keys"):
            per_token = (part.keys.nbytes + part.values.nbytes) // part.keys.shape[2]
            layout.append((per_token, getattr(part, "max_size", None), 0))
        else:
            layout.append((0, None, part.nbytes))
    return layout


def _bytes(layout: list[tuple[int, int | None, int]], tokens: int) -> int:
    """Bytes that one sequence of so many tokens fills."""
    return sum(
        constant + per_token * (tokens if most is None else min(tokens, most))
        for per_token, most, constant in layout
    )
