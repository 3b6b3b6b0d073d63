"""The most that any prompt within a context needs, where the prompt is not given.

It never falls when the context grows, which the need of one prompt does: a last chunk of a few
tokens needs less than a whole one, and on Metal larger arrays fill command buffers earlier
(``uma.memory.metal_activations``), so that fewer of them are alive. Prompts of some lengths are
worked out, the same for every context. Between two of them temporaries grow as the context does,
at most to the need of the longer one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from uma.engines.mlx_phases import (
    Generation,
    Moment,
    chunks,
    decode,
    decode_cache_bytes,
    prefill,
    prefill_cache_bytes,
    shorter_ends,
)
from uma.memory.activations import Transient
from uma.memory.kv_cache import STEP
from uma.workload import Inference

SHORTEST = 64  # tokens of the shortest prompt that is worked out
SHORTEST_CACHE = 512  # of the shortest text that a token is added to


def prefill_within(generation: Generation) -> Moment:
    """The most that a chunk of any prompt within the context needs."""
    workload, step = generation.workload, generation.workload.prefill_step_size
    if workload.prompt_tokens is not None:
        return prefill(generation, workload)

    def need(tokens: int) -> Moment:
        asked = _whole_prompt(workload, _growing(tokens, step))
        ends = chunks(asked)[-2:]
        if generation.backend == "metal" and tokens >= 2 * step:
            ends += shorter_ends(asked)
        return prefill(generation, asked, ends)

    return _most(generation, "prefill", _prompts(step), need, prefill_cache_bytes)


def decode_within(generation: Generation) -> Moment:
    """The most that the last token needs after any prompt within the context."""
    workload = generation.workload
    if workload.prompt_tokens is not None:
        return decode(generation, workload)

    def need(tokens: int) -> Moment:
        return decode(generation, _whole_prompt(workload, tokens))

    return _most(generation, "decode", _lengths(SHORTEST_CACHE, 4), need, decode_cache_bytes)


@lru_cache(maxsize=256)
def _whole_prompt(workload: Inference, tokens: int) -> Inference:
    return replace(workload, context_tokens=tokens, prompt_tokens=tokens)


def _growing(tokens: int, step: int) -> int:
    """The last prompt up to ``tokens`` for whose last chunk caches are reallocated."""
    return tokens - STEP + step if step < STEP < tokens and tokens % STEP == 0 else tokens


def _prompts(step: int) -> Iterator[int]:
    """Lengths of prompts: parts of a chunk, one chunk, two, four, and so on.

    >>> [n for n, _ in zip(_prompts(2048), range(9))]
    [256, 512, 1024, 1536, 2048, 4096, 8192, 16384, 32768]
    """
    for length in _lengths(max(SHORTEST, step // 8), 2):
        if length >= step // 2:
            break
        yield length
    if step >= 2 * SHORTEST:
        yield from (step // 2, 3 * step // 4)
    yield from _lengths(step, 2)


def _lengths(first: int, factor: int) -> Iterator[int]:
    while True:
        yield first
        first *= factor


def _most(
    generation: Generation,
    phase: str,
    lengths: Iterator[int],
    need: Callable[[int], Moment],
    cache_bytes: Callable[[Generation, Inference], int],
) -> Moment:
    workload, step = generation.workload, generation.workload.prefill_step_size
    tokens = workload.context_tokens
    most = before = Moment(0, Transient())
    last = 0
    for length in lengths:
        key = phase, _whole_prompt(workload, length)
        if key not in generation.known:
            generation.known[key] = need(length)
        found = generation.known[key]
        if length >= tokens:
            break
        most = max(most, found, key=lambda moment: moment.total)
        before, last = found, length
    sliding = any(c.max_size is not None for caches in generation.cache_groups for c in caches)
    ends = _ends(tokens, step) if sliding else {tokens}
    caches = max(cache_bytes(generation, _whole_prompt(workload, n)) for n in ends)
    ceiling = max(most.total, found.total)
    total = ceiling
    if last and tokens < length:
        square = last < step  # of the first chunk, whose scores are pairs
        grown = before.transient.total * (tokens * tokens if square else tokens)
        total = max(most.total, min(ceiling, caches + grown // (last * last if square else last)))
    found = max(most, found, key=lambda moment: moment.total)
    transient = max(0, total - caches)
    attention = min(found.transient.attention, transient)
    return Moment(caches, Transient(transient - attention, attention))


def _ends(tokens: int, step: int) -> set[int]:
    """Prompts whose last chunk leaves most in sliding layers: the longest, a whole one, one token.

    They keep a whole chunk beside the window, and for a single token make room for 256.
    """
    whole, single = (tokens - 1) // step * step + 1, (tokens - 2) // step * step + 2
    return {n for n in (tokens, whole, single) if n > 0}
