"""Many prompts at once through mlx-lm's batch engine, and what their caches hold and use."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from uma.errors import UsageError
from uma.measurement.generation import FinishReason
from uma.runtime.answer import Answer
from uma.runtime.generate import DEFAULTS, Settings, generation_limit, sampler
from uma.runtime.load import LoadedModel
from uma.runtime.measure import PhaseMeter

BLOCK_TOKENS = 16  # vLLM 0.11, --block-size: tokens of one block of a paged cache


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt; ``thinking`` is the text that the model marked as such."""

    text: str
    thinking: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    generation_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Answers in the order of the prompts, and the caches at the last step that held most.

    ``held_bytes`` is what the engine's arrays took there, ``used_bytes`` the part of them that
    held tokens, ``paged_bytes`` what blocks of ``BLOCK_TOKENS`` would take for the same tokens.
    ``state_bytes`` of ``used_bytes`` do not depend on tokens; ``meter`` has the peaks of all.
    """

    answers: tuple[BatchAnswer, ...]
    held_bytes: int
    used_bytes: int
    paged_bytes: int
    state_bytes: int
    meter: PhaseMeter
    prompt_tps: float
    generation_tps: float


@dataclass(slots=True)
class _Run:
    """Answers in the making, tokens in flight by prompt, and the step that held most."""

    answers: list[Answer]
    texts: list[dict[bool, str]]
    prompts: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    at_most: list[int] = field(default_factory=list)

    def insert(self, engine: Any, index: int) -> None:
        answer = self.answers[index]
        (uid,) = engine.insert([answer.prompt], [answer.limit])
        self.prompts[uid], self.tokens[index] = index, 0

    def add(self, index: int, token: int) -> bool:
        """Take one token of an answer; whether that ends it."""
        answer = self.answers[index]
        segments = answer.add(token)
        self.tokens[index] += 1
        if answer.finish_reason is not None:
            segments += answer.rest()
            del self.tokens[index]
        for segment in segments:
            self.texts[index][segment.thinking] += segment.text
        return answer.finish_reason is not None

    def note(self, held_bytes: int) -> None:
        if held_bytes >= self.held_bytes:
            self.held_bytes, self.at_most = held_bytes, list(self.tokens.values())

    def result(self, index: int) -> BatchAnswer:
        answer = self.answers[index]
        assert answer.finish_reason is not None
        return BatchAnswer(
            text=self.texts[index][False],
            thinking=self.texts[index][True],
            tokens=tuple(answer.tokens),
            prompt_tokens=len(answer.prompt),
            generation_tokens=len(answer.tokens),
            finish_reason=answer.finish_reason,
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
    run = _Run(answers, [{False: "", True: ""} for _ in prompts])
    engine = _engine(loaded, settings, batch_size)
    meter = PhaseMeter()
    meter.enter("batch")
    try:
        with engine.stats() as stats:
            for index in _ended(engine, run, batch_size):
                if on_answer is not None:
                    on_answer(index, run.result(index))
    finally:
        meter.finish()
        engine.close()
        mx.clear_cache()
    return BatchResult(
        answers=tuple(run.result(index) for index in range(len(prompts))),
        held_bytes=run.held_bytes,
        used_bytes=sum(_bytes(layout, n) for n in run.at_most),
        paged_bytes=sum(_bytes(layout, -(-n // BLOCK_TOKENS) * BLOCK_TOKENS) for n in run.at_most),
        state_bytes=len(run.at_most) * _bytes(layout, 0),
        meter=meter,
        prompt_tps=stats.prompt_tps,
        generation_tps=stats.generation_tps,
    )


def _ended(engine: Any, run: _Run, batch_size: int) -> Iterator[int]:
    """Step the engine to the end; indexes of the prompts as their answers end.

    A prompt is given to the engine when another has ended: of a longer queue mlx-lm 0.32.2 reads
    a whole batch of prompts beside a batch of answers.
    """
    waiting = deque(range(len(run.answers)))
    while waiting or run.tokens:
        while waiting and len(run.tokens) < batch_size:
            run.insert(engine, waiting.popleft())
        prefilled, generated = engine.next()
        for r in prefilled:
            run.tokens[run.prompts[r.uid]] = r.progress[0]
        ended = [r for r in generated if run.add(run.prompts[r.uid], r.token)]
        run.note(engine.prompt_cache_nbytes)
        for r in ended:
            if r.finish_reason is None:  # a stop string, which the engine does not know
                engine.remove([r.uid])
            yield run.prompts[r.uid]


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
