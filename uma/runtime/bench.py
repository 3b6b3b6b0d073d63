"""Prompt and generation rates on random tokens, as ``mlx_lm.benchmark`` takes them."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import mlx.core as mx

from uma.runtime.cache import prompt_cache
from uma.runtime.interrupt import interruptible
from uma.runtime.load import LoadedModel
from uma.runtime.measure import PhaseMeter

SEED = 0  # mlx_lm.benchmark 0.32.2: the same random prompt for everybody


@dataclass(frozen=True, slots=True)
class Trial:
    """Rates of one trial in tokens per second, those of all sequences together."""

    prompt_tps: float
    generation_tps: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Bench:
    """All trials after one warm-up, and the caches at the end of the last."""

    trials: tuple[Trial, ...]
    meter: PhaseMeter
    cache_bytes: int
    state_bytes: int

    def spread(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a rate."""
        values = [getattr(trial, name) for trial in self.trials]
        return mean(values), stdev(values) if len(values) > 1 else 0.0


def bench(
    loaded: LoadedModel,
    *,
    prompt_tokens: int,
    generation_tokens: int,
    batch_size: int = 1,
    num_trials: int = 5,
    prefill_step_size: int = 2048,
    on_trial: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Time ``num_trials`` generations of exactly ``generation_tokens``, end of sequence ignored.

    Every sequence of a batch has the same random prompt length. The rates are mlx-lm's: tokens of
    the prompt over the time to the first token, the others over the time after it.
    """
    mx.random.seed(SEED)
    shape = (batch_size, prompt_tokens)
    prompts: Any = mx.random.randint(0, len(loaded.tokenizer), shape).tolist()
    meter = PhaseMeter()
    trials: list[Trial] = []
    held = 0
    try:
        with interruptible() as interrupted:

            def check(*_: int) -> None:
                if interrupted.is_set():
                    raise KeyboardInterrupt

            work = _Work(loaded, prompts, generation_tokens, prefill_step_size, meter, check)
            for i in range(num_trials + 1):
                on_trial(i, num_trials + 1)
                trial, held = _trial(work)
                trials.append(trial)
    finally:
        meter.finish()
    on_trial(num_trials + 1, num_trials + 1)
    state = batch_size * _state_bytes(loaded.model)
    return Bench(tuple(trials[1:]), meter, held, state)


def _state_bytes(model: Any) -> int:
    """Recurrent state of one sequence, read off the shapes of one token's graph."""
    cache = prompt_cache(model, context_tokens=1)
    model(mx.zeros((1, 1), mx.int32), cache=cache.layers)
    return cache.state_nbytes


@dataclass(frozen=True, slots=True)
class _Work:
    """What every trial does; ``check`` ends it after Ctrl-C."""

    loaded: LoadedModel
    prompts: list[list[int]]
    tokens: int
    step: int
    meter: PhaseMeter
    check: Callable[..., None]


def _trial(work: _Work) -> tuple[Trial, int]:
    prompts, tokens = work.prompts, work.tokens
    run = _one if len(prompts) == 1 else _many
    start = time.perf_counter()
    (first, end), held = run(work)
    mx.clear_cache()
    trial = Trial(
        prompt_tps=sum(map(len, prompts)) / (first - start),
        generation_tps=len(prompts) * (tokens - 1) / (end - first) if tokens > 1 else 0.0,
        ttft_s=first - start,
        total_s=end - start,
    )
    return trial, held


def _one(work: _Work) -> tuple[tuple[float, float], int]:
    """Times of the first and the last token of one sequence, and its cache's bytes."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(work.loaded.model)
    work.meter.enter("prefill")
    steps = generate_step(
        mx.array(work.prompts[0], mx.uint32),
        work.loaded.model,
        max_tokens=work.tokens,
        prompt_cache=cache,
        prefill_step_size=work.step,
        prompt_progress_callback=work.check,
    )
    with closing(steps):
        next(steps)
        first = time.perf_counter()
        work.meter.enter("decode")
        for _ in steps:
            work.check()
    return (first, time.perf_counter()), sum(c.nbytes for c in cache)


def _many(work: _Work) -> tuple[tuple[float, float], int]:
    """The same for a batch: the first token is there when every sequence has one."""
    from mlx_lm.generate import BatchGenerator

    prompts, tokens = work.prompts, work.tokens
    work.meter.enter("prefill")
    engine: Any = BatchGenerator(
        work.loaded.model,
        stop_tokens=[],
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        prefill_step_size=work.step,
    )
    counts = dict.fromkeys(engine.insert(prompts, [tokens] * len(prompts)), 0)
    first = 0.0
    held = 0
    try:
        while min(counts.values()) < tokens:
            work.check()
            for r in engine.next()[1]:
                counts[r.uid] += 1
            held = max(held, engine.prompt_cache_nbytes)
            if not first and min(counts.values()) > 0:
                first = time.perf_counter()
                work.meter.enter("decode")
    finally:
        engine.close()
    return (first, time.perf_counter()), held
