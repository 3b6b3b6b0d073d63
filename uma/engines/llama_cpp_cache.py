"""Bytes of the cache and of the recurrent states that llama.cpp allocates with a context.

It allocates them whole at the start. Cells are padded to 256 (llama.cpp b11434,
``src/llama-context.cpp``; windows in ``src/llama-kv-cache-iswa.cpp``), rows of keys and values
are in ``-ctk`` and ``-ctv``, states always in 32 bits (``src/llama-model.cpp``,
``create_memory``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from uma.architecture.layers import Architecture, Attention, LatentAttention, Recurrent
from uma.errors import UnsupportedModel, UsageError
from uma.quantization import GGUF_TYPES, gguf_bytes

PADDING = 256

# common/arg.cpp, kv_cache_types.
CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1")

# mlx-lm's modules whose windows llama.cpp ignores: it keeps every token of all their layers
# (src/models/: no sliding_window is read, or set to none as in phi3.cpp).
WINDOW_IGNORED = frozenset(
    {
        "baichuan_m1",
        "llama",
        "ministral3",
        "mistral",
        "mistral3",
        "mixtral",
        "phi3",
        "phi3small",
        "phimoe",
        "pixtral",
        "qwen2",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "starcoder2",
    }
)


@dataclass(frozen=True, slots=True)
class Cells:
    """Tokens that a cache holds for each stream: of full layers and of windowed ones."""

    full: int
    window: int
    streams: int

    def of(self, mixer: Attention | LatentAttention, ignored: bool) -> int:
        """Cells of one layer in all streams."""
        return self.streams * (self.window if window_of(mixer, ignored) else self.full)


def window_of(mixer: Attention | LatentAttention, ignored: bool) -> int | None:
    """The tokens that llama.cpp's layer looks back at, or ``None`` where it keeps all."""
    if ignored or isinstance(mixer, LatentAttention):
        return None
    return mixer.sliding_window or mixer.attention_chunk_size


def padded(tokens: int) -> int:
    return -(-tokens // PADDING) * PADDING


def cells(
    architecture: Architecture,
    context_tokens: int,
    num_sequences: int,
    n_ubatch: int,
    *,
    unified: bool,
    swa_full: bool,
) -> Cells:
    """Cells for ``num_sequences`` of ``context_tokens`` each.

    llama.cpp's ``-c`` is the sum: shared by all sequences when ``unified``, else divided.
    """
    full = padded(context_tokens * num_sequences if unified else context_tokens)
    windows = {window_of(m, ignores_window(architecture)) for m in attentions(architecture)}
    longest = max((window for window in windows if window), default=0)
    window = longest * (num_sequences if unified else 1) + n_ubatch
    return Cells(
        full=full,
        window=full if swa_full else padded(min(full, window)),
        streams=1 if unified else num_sequences,
    )


def ignores_window(architecture: Architecture) -> bool:
    return architecture.module in WINDOW_IGNORED


def attentions(architecture: Architecture) -> Iterator[Attention | LatentAttention]:
    """Every attention that holds a cache of its own."""
    for layer in architecture.layers:
        for mixer in layer.mixers:
            if not isinstance(mixer, Recurrent) and mixer.kv_source is None:
                yield mixer


def kv_cache_bytes(
    architecture: Architecture, held: Cells, type_k: str, type_v: str, *, flash_attn: bool
) -> int:
    """Bytes of keys and values of all layers.

    Latent attention caches the latent and the rotary key once, as keys of one head, and no values.
    Without flash attention values are transposed, each layer's as wide as the widest.

    Raises:
        UsageError: If a cache type is unknown or cannot be had without flash attention.
        UnsupportedModel: If llama.cpp caches this attention by rules that are not known here.
    """
    type_k, type_v = cache_type(type_k), cache_type(type_v)
    if not flash_attn and GGUF_TYPES[type_v][0] > 1:
        raise UsageError(f"--cache-type-v {type_v.lower()} needs flash attention (-fa on)")
    ignored, mixers = ignores_window(architecture), list(attentions(architecture))
    widest = max((value_width(mixer) for mixer in mixers), default=0)
    total = 0
    for mixer in mixers:
        _check_known(architecture, mixer)
        keys, values = key_width(mixer), value_width(mixer) if flash_attn else widest
        row = gguf_bytes(type_k, (keys,))
        row += gguf_bytes(type_v, (values,)) if value_width(mixer) else 0
        index = mixer.index_head_dim
        row += gguf_bytes(type_k, (index,)) if index else 0
        total += held.of(mixer, ignored) * row
    return total


def key_width(mixer: Attention | LatentAttention) -> int:
    """Elements of a token's keys in one layer."""
    if isinstance(mixer, LatentAttention):
        return mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return mixer.num_key_value_heads * mixer.head_dim


def value_width(mixer: Attention | LatentAttention) -> int:
    """Elements of a token's values in one layer; latents are keys and values in one."""
    if isinstance(mixer, LatentAttention):
        return 0
    return mixer.num_key_value_heads * mixer.v_head_dim


def cache_type(name: str) -> str:
    """The type of ``GGUF_TYPES`` that ``-ctk`` or ``-ctv`` names."""
    if name.upper() not in CACHE_TYPES:
        known = ", ".join(known.lower() for known in CACHE_TYPES)
        raise UsageError(f"llama.cpp has no cache type {name!r}; it has {known}")
    return name.upper()


def _check_known(architecture: Architecture, mixer: Attention | LatentAttention) -> None:
    if isinstance(mixer, LatentAttention) and (mixer.sliding_window or mixer.index_compress_ratio):
        raise UnsupportedModel(
            f"the cache of {architecture.model_type} in llama.cpp is not modelled; use --engine mlx"
        )


def state_bytes(architecture: Architecture, num_sequences: int) -> int:
    """Bytes of the states of recurrent layers, one set for each sequence."""
    elements = sum(
        prod(state.shape)
        for layer in architecture.layers
        for mixer in layer.mixers
        if isinstance(mixer, Recurrent)
        for state in mixer.states
    )
    return 4 * num_sequences * elements
