"""Bytes that the caches of transformers hold (transformers 5.24.0, ``cache_utils.py``)."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from uma.architecture.layers import Architecture, Attention, LatentAttention, Layer, Recurrent

CacheImplementation = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What decides how large the caches are.

    ``max_cache_len`` is the length of a static cache. ``latent_cache`` says that latent attention
    caches the latent and not whole heads, ``sliding_cache`` that layers with a window or chunk
    keep no more than it.
    """

    implementation: CacheImplementation = "dynamic"
    max_cache_len: int = 0
    latent_cache: bool = True
    sliding_cache: bool = True
    batch_size: int = 1
    dtype_bytes: int = 2

    def slot_bytes(self, layer: Layer) -> int:
        """Bytes of one token in a layer's cache, keys and values."""
        width = sum(sum(token_widths(mixer, self.latent_cache)) for mixer in layer.mixers)
        return self.batch_size * width * self.dtype_bytes

    def largest_tensor(self, layer: Layer) -> int:
        """Bytes of one token in the larger of a layer's tensors, which a new token copies."""
        width = max(
            (max(token_widths(mixer, self.latent_cache)) for mixer in layer.mixers), default=0
        )
        return self.batch_size * width * self.dtype_bytes


def token_widths(mixer: Attention | LatentAttention | Recurrent, latent: bool) -> tuple[int, ...]:
    """Elements of one token in each tensor of a mixer's cache.

    A layer that reads another's cache has none; the keys of an indexer are a tensor of their own
    (``DynamicIndexedLayer``).
    """
    if isinstance(mixer, Recurrent):
        return (0,)
    index = () if mixer.index_head_dim is None else (mixer.index_head_dim,)
    if isinstance(mixer, Attention):
        if mixer.kv_source is not None:
            return (0,)
        heads = mixer.num_key_value_heads
        return (heads * mixer.head_dim, heads * mixer.v_head_dim, *index)
    if latent:
        return (mixer.kv_lora_rank, mixer.qk_rope_head_dim, *index)
    heads = mixer.num_attention_heads
    key = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    return (heads * key, heads * mixer.v_head_dim, *index)


def window_of(layer: Layer) -> int | None:
    """The window or chunk that a layer looks back; both are cached alike."""
    for mixer in layer.mixers:
        if isinstance(mixer, Attention):
            return mixer.sliding_window or mixer.attention_chunk_size
    return None


def slots(layer: Layer, rules: CacheRules, seen: int, call: int) -> int:
    """Token slots held by a layer after a call of ``call`` tokens that makes ``seen`` in all.

    A window keeps ``window - 1`` tokens, but as a view of the array that its last call made from
    the kept and the new ones, so all of that stays in memory until the next call
    (``DynamicSlidingWindowLayer.update``). A static cache has all its slots from the first call.
    """
    window = window_of(layer) if rules.sliding_cache else None
    if rules.implementation == "static":
        return rules.max_cache_len if window is None else min(window, rules.max_cache_len)
    if window is None:
        return seen
    return min(seen - call, window - 1) + call


def cache_bytes(architecture: Architecture, rules: CacheRules, seen: int, call: int) -> int:
    """Bytes of all growing caches after a call of ``call`` tokens that makes ``seen`` in all."""
    return sum(
        rules.slot_bytes(layer) * slots(layer, rules, seen, call) for layer in architecture.layers
    )


def state_bytes(architecture: Architecture, rules: CacheRules) -> int:
    """Bytes of the states of recurrent layers, allocated at their first call.

    The convolution's has one column more than mlx-lm's: as many as the kernel
    (``LinearAttentionLayer``).
    """
    size = 0
    for layer in architecture.layers:
        for mixer in layer.mixers:
            if not isinstance(mixer, Recurrent):
                continue
            for state in mixer.states:
                elements = prod(state.shape)
                if "conv" in state.name:
                    elements += elements // state.shape[0]
                size += elements * (4 if state.dtype == "float32" else rules.dtype_bytes)
    return rules.batch_size * size
