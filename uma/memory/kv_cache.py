"""Bytes that mlx-lm's cache objects hold while a prompt is processed and tokens are generated.

The arithmetic of ``mlx_lm/models/cache.py`` (mlx-lm 0.32.2) on shapes alone. Which cache a layer
gets is the engine's rule: ``uma.engines.mlx_cache``.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import gcd, prod
from typing import Literal

from uma.architecture.layers import State
from uma.frozen import dataclass

STEP = 256  # slots that a cache grows by: KVCache.step, RotatingKVCache.step, ChunkedKVCache.step

CacheKind = Literal["KVCache", "RotatingKVCache", "ChunkedKVCache"]


@dataclass(frozen=True, slots=True)
class TokenCache:
    """A cache that holds arrays of ``[batch, heads, slots, dim]``, one slot a token.

    ``widths`` are (heads, dim) of its keys and of its values. ``max_size`` is the window of a
    rotating cache or the chunk of a chunked one. With ``kv_bits`` it is a ``QuantizedKVCache``.
    ``index`` marks the keys of an indexer, beside those of its attention.
    """

    kind: CacheKind
    widths: tuple[tuple[int, int], ...]
    max_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    index: bool = False

    def slot_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of one slot: keys and values, or their packed words, scales and biases."""
        if self.kv_bits is None:
            return sum(heads * dim for heads, dim in self.widths) * dtype_bytes
        return sum(
            heads * (dim * self.kv_bits // 8 + dim // self.kv_group_size * 2 * dtype_bytes)
            for heads, dim in self.widths
        )


@dataclass(frozen=True, slots=True)
class StateCache:
    """An ``ArraysCache``: arrays of constant size, allocated by the first call."""

    states: tuple[State, ...]

    def state_bytes(self, dtype_bytes: int = 2, call_tokens: int = 0) -> int:
        """Bytes of the states of one sequence, and of what they keep of the last call."""
        return sum(
            (prod(state.shape) + state.per_token * call_tokens)
            * (4 if state.dtype == "float32" else dtype_bytes)
            for state in self.states
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The caches of one layer, in mlx-lm's order: several make a ``CacheList``."""

    layer: int
    caches: tuple[TokenCache | StateCache, ...]


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Bytes held by all caches: the most during prefill, at its end, and after decoding."""

    prefill_peak: int
    prefill_end: int
    decode_end: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a token cache stands: slots allocated, tokens seen.

    ``start`` is the first token that a chunked cache still holds.
    """

    slots: int = 0
    offset: int = 0
    start: int = 0


def calls(prompt_tokens: int, prefill_step_size: int) -> Iterator[int]:
    """Tokens of each call of the model over a prompt: chunks, then the last token alone.

    mlx-lm 0.32.2, ``generate.py``, ``generate_step``. It then runs one call ahead of the token
    it yields, so after ``n`` tokens ``prompt_tokens + n`` are cached.
    """
    remaining = prompt_tokens - 1
    while remaining > 0:
        yield min(prefill_step_size, remaining)
        remaining -= prefill_step_size
    if prompt_tokens > 0:
        yield 1


def update(cache: TokenCache, state: Slots, tokens: int) -> Slots:
    """The cache after a call with ``tokens`` new tokens."""
    if cache.kind == "RotatingKVCache":
        assert cache.max_size is not None
        if tokens == 1:
            return _rotate_one(cache.max_size, state)
        return _rotate_many(cache.max_size, state, tokens)
    if cache.kind == "ChunkedKVCache":
        assert cache.max_size is not None
        state = _trim_front(cache.max_size, state)
    return _grow(state, tokens)


def _grow(state: Slots, tokens: int) -> Slots:
    """``KVCache.update_and_fetch``: whole steps are added, to the used part if that is odd.

    So odd chunks leave odd sizes: 300 tokens, then 300 more, hold 300 + 512 slots.
    """
    used, slots = state.offset - state.start, state.slots
    if used + tokens > slots:
        kept = used if used % STEP and slots else slots
        slots = kept + -(-tokens // STEP) * STEP
    return Slots(slots, state.offset + tokens, state.start)


def _trim_front(chunk_size: int, state: Slots) -> Slots:
    """``ChunkedKVCache.maybe_trim_front``, which Llama 4 calls before its layers."""
    used = state.offset - state.start
    if not state.slots or used <= chunk_size:
        return state
    return Slots(chunk_size, state.offset, state.offset - chunk_size)


def _rotate_many(max_size: int, state: Slots, tokens: int) -> Slots:
    """``RotatingKVCache._update_concat``: at most ``max_size - 1`` old slots and the new ones."""
    used = min(state.slots, state.offset)
    slots = min(used, max_size - 1) + tokens if state.slots else tokens
    return Slots(slots, state.offset + tokens)


def _rotate_one(max_size: int, state: Slots) -> Slots:
    """``RotatingKVCache._update_in_place``: grow by a step up to ``max_size``, then overwrite."""
    slots = state.slots
    if slots == 0 or (state.offset >= slots and slots < max_size):
        slots += min(STEP, max_size - state.offset)
    return Slots(min(slots, max_size), state.offset + 1)


def decode(cache: TokenCache, state: Slots, tokens: int) -> Slots:
    """The cache after ``tokens`` calls with one token each."""
    if cache.kind == "KVCache":
        end = state.offset + tokens
        slots = state.slots + -(-max(0, end - state.slots) // STEP) * STEP
        return Slots(slots, end)
    for done in range(tokens):
        after = update(cache, state, 1)
        # Full: only positions move from here on.
        full = after.slots == state.slots and after.offset > (cache.max_size or 0) + STEP
        state = after
        if full:
            left = tokens - done - 1
            return Slots(state.slots, state.offset + left, state.start + left)
    return state


@lru_cache(maxsize=64)  # the layers of a model share a few kinds of cache
def trace(cache: TokenCache, prompt_tokens: int, prefill_step_size: int) -> dict[int, Slots]:
    """The cache after the calls over the prompt, by their number.

    Where chunks are whole steps of 256 or whole parts of one, the many alike in the middle are
    left out: a cache grows evenly there, or no more.
    """
    full = max(0, prompt_tokens - 1) // prefill_step_size
    regular = prefill_step_size % STEP == 0 or 1 < prefill_step_size == gcd(prefill_step_size, STEP)
    state, states, index = Slots(), dict[int, Slots](), 0
    lengths = list(calls(prompt_tokens - full * prefill_step_size, prefill_step_size))
    while index < full + len(lengths):
        tokens = prefill_step_size if index < full else lengths[index - full]
        before, state = state, update(cache, state, tokens)
        states[index] = state
        skipped = full - 3 - index
        if (
            regular
            and index
            and skipped > 0
            and (later := _later(cache, before, state, skipped * tokens))
        ):
            state, index = later, index + skipped
            states[index] = state
        index += 1
    return states


def _later(cache: TokenCache, before: Slots, state: Slots, tokens: int) -> Slots | None:
    """``state`` after ``tokens`` more in chunks like the last one; ``None`` if that is not told."""
    offset = state.offset + tokens
    if cache.kind == "KVCache":
        return Slots(-(-offset // STEP) * STEP, offset)
    same = state.slots == before.slots and state.start - before.start in (
        0,
        state.offset - before.offset,
    )
    if not before.slots or not same or (cache.kind == "ChunkedKVCache" and not state.start):
        return None
    return Slots(state.slots, offset, state.start + (tokens if state.start else 0))


def cache_bytes(
    layers: Iterable[LayerCache],
    prompt_tokens: int,
    prefill_step_size: int,
    generated_tokens: int = 0,
    *,
    batch_size: int = 1,
    dtype_bytes: int = 2,
) -> CacheBytes:
    """Bytes of all keys and values for a prompt of ``prompt_tokens``, then ``generated_tokens``.

    The recurrent states beside them are ``state_bytes``.
    """
    sizes: dict[TokenCache, int] = {}
    for cache in _token_caches(layers):
        sizes[cache] = sizes.get(cache, 0) + batch_size * cache.slot_bytes(dtype_bytes)
    traces = {cache: trace(cache, prompt_tokens, prefill_step_size) for cache in sizes}
    told = set.intersection(*map(set, traces.values())) if traces else set[int]()
    totals = [0] + [
        sum(states[call].slots * sizes[cache] for cache, states in traces.items())
        for call in sorted(told)
    ]
    end = 0
    for cache, states in traces.items():
        last = next(reversed(states.values()), Slots())
        end += decode(cache, last, generated_tokens).slots * sizes[cache]
    return CacheBytes(max(totals), totals[-1], end)


def state_bytes(
    layers: Iterable[LayerCache],
    *,
    batch_size: int = 1,
    dtype_bytes: int = 2,
    call_tokens: int = 0,
) -> int:
    """Bytes of the recurrent states, which do not depend on the number of tokens.

    With ``call_tokens``, the bytes that they keep in memory after a call with so many tokens:
    more than their own where a state is a view of an array with a row for each.
    """
    return batch_size * sum(
        cache.state_bytes(dtype_bytes, call_tokens)
        for layer in layers
        for cache in layer.caches
        if isinstance(cache, StateCache)
    )


def _token_caches(layers: Iterable[LayerCache]) -> Iterator[TokenCache]:
    for layer in layers:
        for cache in layer.caches:
            if isinstance(cache, TokenCache):
                yield cache
