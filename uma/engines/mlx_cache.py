"""Which cache mlx-lm gives each layer, and whether it can be quantized.

mlx-lm 0.32.2: ``make_prompt_cache`` in ``models/cache.py`` and ``make_cache`` of each module.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from uma.architecture.layers import (
    Architecture,
    Attention,
    LatentAttention,
    Layer,
    Mixer,
    Recurrent,
)
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.memory.kv_cache import LayerCache, StateCache, TokenCache

# Modules without ``make_cache``: every layer gets the same cache, sliding or not.
_UNIFORM = """
Klear apertus bailing_moe bitnet cohere dbrx deepseek deepseek_v2 deepseek_v3 dots1 ernie4_5
ernie4_5_moe exaone gemma gemma2 glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gptj
granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3 kimi_k25 kimi_vl lille-130m
llama4_text mimo minicpm minicpm3 minimax mistral3 mistral4 mixtral nanochat nemotron olmo olmo2
olmoe openelm phi phi3 phi3small phimoe phixtral pixtral plamo qwen qwen2 qwen2_moe qwen2_vl qwen3
qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open stablelm starcoder2 talkie telechat3
youtu_llm
"""
UNIFORM = frozenset(_UNIFORM.split())

# Modules that cache the expanded keys and values of latent attention, not the latent.
EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})

# Modules that compute attention by products of their own, not by mlx-lm's function.
OWN_ATTENTION = frozenset({"gemma2"})

# Modules that cast keys or values as they come from the cache, which must be plain arrays.
CAST_ARRAYS = frozenset({"phi", "stablelm"})

# Modules that hand keys and values from one layer to another as plain arrays.
SHARED_ARRAYS = frozenset({"gemma4", "gemma4_text"})

KV_BITS = (2, 4, 8)  # QuantizedKVCache packs them whole: it divides by 32 // bits


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """Layers whose cache ``--kv-bits`` can quantize, and why the others cannot."""

    layers: tuple[int, ...]
    kept: dict[int, str]

    def __str__(self) -> str:
        return f"quantized {len(self.layers)} of {len(self.layers) + len(self.kept)} layers"


def layer_caches(
    architecture: Architecture,
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> tuple[LayerCache, ...]:
    """The caches of every layer that holds one, in the order of mlx-lm's list.

    Raises:
        UsageError: If ``kv_bits`` is a width that the quantized cache does not pack.
    """
    if kv_bits is not None and kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits {kv_bits}: allowed are {', '.join(map(str, KV_BITS))}")
    chosen = kv_quantization(architecture, kv_group_size).layers if kv_bits else ()
    made: dict[tuple[int, bool], tuple[TokenCache | StateCache, ...]] = {}
    for i, kind in enumerate(architecture.kinds):
        key = (id(kind), i in chosen)
        if key not in made:
            caches = tuple(_caches(architecture, kind)) if _holds_cache(kind) else ()
            made[key] = tuple(
                replace(cache, kv_bits=kv_bits, kv_group_size=kv_group_size)
                if i in chosen and _is_quantizable(cache)
                else cache
                for cache in caches
            )
    held = ((i, made[id(kind), i in chosen]) for i, kind in enumerate(architecture.kinds))
    return tuple(LayerCache(i, caches) for i, caches in held if caches)


def _is_quantizable(cache: TokenCache | StateCache) -> TypeGuard[TokenCache]:
    """Whether it holds keys and values of heads; an indexer's keys are one narrow head."""
    return isinstance(cache, TokenCache) and cache.kind == "KVCache" and not cache.index


def _holds_cache(layer: Layer) -> bool:
    sources = [m.kv_source for m in layer.mixers if isinstance(m, Attention)]
    return bool(layer.mixers) and all(source is None for source in sources)


def _caches(architecture: Architecture, layer: Layer) -> Iterator[TokenCache | StateCache]:
    """The caches of a layer's mixers, and those of their indexers."""
    for mixer in layer.mixers:
        yield _cache(architecture, mixer)
        if isinstance(mixer, LatentAttention) and mixer.index_head_dim:
            # The values are zeros of the keys' size (mlx-lm 0.32.2, deepseek_v32.py, Indexer).
            width = (1, mixer.index_head_dim)
            yield TokenCache("KVCache", (width, width), index=True)
        elif isinstance(mixer, Attention) and mixer.index_head_dim:
            yield TokenCache("KVCache", ((1, mixer.index_head_dim), (1, 0)), index=True)


def _cache(architecture: Architecture, mixer: Mixer) -> TokenCache | StateCache:
    if isinstance(mixer, Recurrent):
        return StateCache(mixer.states)
    widths = _widths(mixer, architecture.module in EXPANDED)
    if architecture.module in UNIFORM:
        return TokenCache("KVCache", widths)
    if isinstance(mixer, Attention) and mixer.sliding_window is not None:
        return TokenCache("RotatingKVCache", widths, mixer.sliding_window)
    if isinstance(mixer, Attention) and mixer.attention_chunk_size is not None:
        return TokenCache("ChunkedKVCache", widths, mixer.attention_chunk_size)
    return TokenCache("KVCache", widths)


def _widths(mixer: Attention | LatentAttention, expanded: bool) -> tuple[tuple[int, int], ...]:
    """(heads, dim) of the keys and of the values that are cached."""
    if isinstance(mixer, Attention):
        heads = mixer.num_key_value_heads
        return ((heads, mixer.head_dim), (heads, mixer.v_head_dim))
    if expanded:
        heads, key_dim = mixer.num_attention_heads, mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return ((heads, key_dim), (heads, mixer.v_head_dim))
    return ((1, mixer.kv_lora_rank), (1, mixer.qk_rope_head_dim))


def kv_quantization(architecture: Architecture, kv_group_size: int = 64) -> KVQuantization:
    """The layers that ``--kv-bits`` can quantize, and the reason for each that it cannot."""
    reasons = {
        i: _kept_reason(architecture, i, layer, kv_group_size)
        for i, layer in enumerate(architecture.layers)
        if _holds_cache(layer)
    }
    return KVQuantization(
        tuple(i for i, reason in reasons.items() if reason is None),
        {i: reason for i, reason in reasons.items() if reason is not None},
    )


def _kept_reason(
    architecture: Architecture, index: int, layer: Layer, kv_group_size: int
) -> str | None:
    """Why no cache of a layer can be quantized; ``None`` if one can."""
    if architecture.module in OWN_ATTENTION:
        return f"{architecture.module} computes attention without mlx-lm's quantized form"
    if architecture.module in CAST_ARRAYS:
        return f"{architecture.module} casts what it reads from the cache"
    if architecture.module in SHARED_ARRAYS and index in _sources(architecture):
        return "its keys and values are read by other layers"
    expanded = architecture.module in EXPANDED
    reasons = [_mixer_reason(mixer, expanded, kv_group_size) for mixer in layer.mixers]
    return None if None in reasons else reasons[-1]


def _sources(architecture: Architecture) -> set[int | None]:
    """Layers whose cache others read."""
    return {
        mixer.kv_source
        for layer in architecture.layers
        for mixer in layer.mixers
        if isinstance(mixer, Attention)
    }


def _mixer_reason(mixer: Mixer, expanded: bool, kv_group_size: int) -> str | None:
    if isinstance(mixer, LatentAttention):
        if not expanded:
            return "the cache holds the latent of latent attention"
    elif not isinstance(mixer, Attention):
        return "recurrent state"
    elif mixer.sinks:
        return "attention sinks"
    elif mixer.sliding_window is not None:
        return "sliding window"
    elif mixer.attention_chunk_size is not None:
        return "chunked attention"
    widths = _widths(mixer, expanded)
    if len(set(widths)) > 1 and mixer.num_attention_heads > widths[0][0]:
        return "keys and values of different widths"
    for _, dim in widths:
        if dim % kv_group_size:
            return f"head dimension {dim} is not whole groups of {kv_group_size}"
    return None
