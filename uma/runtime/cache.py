"""The caches of one generation: built within a context, quantized where possible, checked, rewound.

``layers`` are mlx-lm's own objects. The context is a bound on tokens that we count ourselves:
``max_kv_size`` is ignored by every module that defines ``make_cache`` (mlx-lm 0.32.2, 54 modules).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from uma.engines.mlx_cache import KV_BITS
from uma.errors import UmaError, UsageError
from uma.memory.kv_cache import STEP


@dataclass(slots=True)
class PromptCache:
    """A cache object for each layer that has one, and the tokens that they hold."""

    layers: list[Any]
    context_tokens: int
    quantized_layers: int
    kv_bits: int | None
    kv_group_size: int
    make: Callable[[], list[Any]]
    tokens: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the caches hold, spare room included."""
        return sum(a.nbytes for layer in self.layers for a in _arrays(layer))

    @property
    def state_nbytes(self) -> int:
        """Bytes of those caches that do not grow with the tokens: recurrent states."""
        return sum(
            part.nbytes for layer in self.layers for part in _parts(layer) if not _counts(part)
        )

    @property
    def summary(self) -> str:
        """What was built, such as ``quantized 7 of 42 layers``."""
        if self.kv_bits is None:
            return f"{len(self.layers)} layers in full precision"
        return f"quantized {self.quantized_layers} of {len(self.layers)} layers"


def prompt_cache(
    model: Any,
    *,
    context_tokens: int,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantizable_layers: tuple[int, ...] | None = None,
) -> PromptCache:
    """Build mlx-lm's cache for ``model``, its quantizable layers in ``kv_bits``.

    ``quantizable_layers`` are indexes into the list of caches; ``None`` asks the model itself.

    Raises:
        UsageError: If the bits are none that a cache can have, or the group divides no head.
        UmaError: If a layer that was to be quantized cannot be.
    """
    from mlx_lm.models.cache import make_prompt_cache

    if kv_bits is None:

        def plain() -> list[Any]:
            return list(make_prompt_cache(model))

        return PromptCache(plain(), context_tokens, 0, None, kv_group_size, plain)
    if kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits {kv_bits}: allowed are {', '.join(map(str, KV_BITS))}")
    able = quantizable(model, kv_bits=kv_bits, kv_group_size=kv_group_size)
    chosen = able if quantizable_layers is None else quantizable_layers
    if not chosen and kv_group_size > 32 and quantizable(model, kv_bits=kv_bits, kv_group_size=32):
        raise UsageError(
            f"--kv-group-size {kv_group_size} does not divide the head dimension of this model; "
            "give --kv-group-size 32"
        )
    if missing := sorted(set(chosen) - set(able)):
        raise UmaError(f"the caches of layers {missing} cannot be quantized as planned")

    def make() -> list[Any]:
        layers = list(make_prompt_cache(model))
        for i in chosen:
            layers[i] = _in_bits(layers[i], kv_bits, kv_group_size)
        return layers

    return PromptCache(make(), context_tokens, len(chosen), kv_bits, kv_group_size, make)


def quantizable(model: Any, *, kv_bits: int, kv_group_size: int) -> tuple[int, ...]:
    """Indexes of the caches that the model's own code takes in quantized form.

    The graph of two tokens and of one more is built but not evaluated: attention sinks, latent
    attention and head dimensions that the group does not divide all raise there.
    """
    from mlx_lm.models.cache import make_prompt_cache

    plain = make_prompt_cache(model)
    candidates = [i for i, c in enumerate(plain) if _in_bits(c, kv_bits, kv_group_size) is not c]

    def runs(indexes: list[int]) -> bool:
        layers = make_prompt_cache(model)
        for i in indexes:
            layers[i] = _in_bits(layers[i], kv_bits, kv_group_size)
        try:
            model(mx.zeros((1, 2), mx.int32), cache=layers)
            model(mx.zeros((1, 1), mx.int32), cache=layers)
        except (ValueError, TypeError, AttributeError, NotImplementedError):
            return False
        return True

    if runs(candidates):
        return tuple(candidates)
    return tuple(i for i in candidates if runs([i]))


def _in_bits(cache: Any, bits: int, group_size: int) -> Any:
    """The quantized twin of an empty cache, or the same object where there is none."""
    from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

    if type(cache) is KVCache:
        return QuantizedKVCache(group_size=group_size, bits=bits)
    if type(cache) is CacheList:
        parts = [_in_bits(c, bits, group_size) for c in cache.caches]
        if any(new is not old for new, old in zip(parts, cache.caches, strict=True)):
            return CacheList(*parts)
    return cache


def _parts(layer: Any) -> Iterator[Any]:
    """The caches inside a layer's cache: itself, or those of a ``CacheList``."""
    yield from getattr(layer, "caches", (layer,))


def _counts(part: Any) -> bool:
    """Whether a cache counts its tokens; recurrent states do not."""
    return hasattr(part, "offset")


def _arrays(layer: Any) -> Iterator[mx.array]:
    """Arrays of a layer's cache; the state also lists plain numbers."""
    for part in _parts(layer):
        for _, value in tree_flatten(part.state):
            if isinstance(value, mx.array):
                yield value


def held_tokens(cache: PromptCache) -> int | None:
    """The most tokens that any cache object says it has seen, or ``None`` if none counts them."""
    parts = (part for layer in cache.layers for part in _parts(layer))
    return max((int(part.offset) for part in parts if _counts(part)), default=None)


def check_bound(cache: PromptCache) -> None:
    """Hold the real cache objects against the context.

    Raises:
        UmaError: If one counts more tokens, or has room for more than one growth step beyond.
    """
    seen = held_tokens(cache) or 0
    room = max(
        (a.shape[2] for layer in cache.layers for a in _arrays(layer) if _per_token(layer, a)),
        default=0,
    )
    if seen > cache.context_tokens or room >= cache.context_tokens + STEP:
        raise UmaError(
            f"the cache holds {seen} tokens and has room for {room}, beyond the context of "
            f"{cache.context_tokens}; this is a bug in uma"
        )


def _per_token(layer: Any, array: mx.array) -> bool:
    return array.ndim == 4 and any(hasattr(part, "step") for part in _parts(layer))


def can_rewind(cache: PromptCache, num_tokens: int) -> bool:
    """Whether every layer can forget its last ``num_tokens`` without losing what it needs.

    A chunked cache that has dropped its front says yes but has lost the chunk (mlx-lm 0.32.2,
    ``ChunkedKVCache.is_trimmable``); rotating and recurrent ones say no themselves.
    """
    return all(
        part.is_trimmable()
        and getattr(part, "start_position", 0) == 0
        and getattr(part, "offset", 0) >= num_tokens
        for layer in cache.layers
        for part in _parts(layer)
    )


def never_forgets(cache: PromptCache) -> bool:
    """Whether some layer could not rewind somewhere within the context, however full it is."""
    return not can_rewind(cache, 0) or any(
        getattr(part, attribute, cache.context_tokens + 1) <= cache.context_tokens
        for layer in cache.layers
        for part in _parts(layer)
        for attribute in ("max_size", "chunk_size")
    )


def rewind(cache: PromptCache, keep: int) -> bool:
    """Shorten the cache to its first ``keep`` tokens, all layers or none; whether it was done."""
    drop = len(cache.tokens) - keep
    if drop and not can_rewind(cache, drop):
        return False
    if drop:
        trimmed = {part.trim(drop) for layer in cache.layers for part in _parts(layer)}
        if trimmed != {drop}:
            raise UmaError(f"layers were trimmed by {sorted(trimmed)} tokens, not by {drop}")
        del cache.tokens[keep:]
    return True


def reset(cache: PromptCache) -> None:
    """Empty the cache: new objects of the same kinds."""
    cache.layers = cache.make()
    cache.tokens.clear()


def reuse(cache: PromptCache, prompt_tokens: list[int]) -> int:
    """Make the cache a prefix of the prompt, at least one token short of it; tokens kept.

    Where the layers cannot be rewound, the cache starts anew: a half-rewound one gives wrong text.
    """
    keep = 0
    for ours, theirs in zip(cache.tokens, prompt_tokens[:-1], strict=False):
        if ours != theirs:
            break
        keep += 1
    if not rewind(cache, keep):
        reset(cache)
    return len(cache.tokens)
