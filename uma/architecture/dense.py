"""Decoders with softmax attention and dense feed-forward parts, close to Llama."""

from collections.abc import Sequence
from typing import Any

from uma.architecture.config import Config, Modules
from uma.architecture.layers import Architecture, Attention, FeedForward, Layer
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    layer_norm,
    linear,
    norms,
    qkvo,
    under,
)

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
OLMO_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def attention(c: Config, head_dim: int, window: int | None = None, **more: Any) -> Attention:
    """Grouped-query attention of the config's heads."""
    return Attention(
        c.num_attention_heads, c.kv_heads, head_dim, head_dim, sliding_window=window, **more
    )


def windows(c: Config, layer_types: Sequence[str] | None = None) -> list[int | None]:
    """The sliding window of every layer by ``layer_types``; ``None`` is full attention."""
    types = c.get("layer_types") if layer_types is None else layer_types
    if types is None:
        return [None] * int(c.num_hidden_layers)
    return [c.sliding_window if kind == "sliding_attention" else None for kind in types]


def periodic_windows(c: Config, period: int) -> list[int | None]:
    """Sliding layers with a full one at the end of every ``period``."""
    return [
        None if i % period == period - 1 else c.sliding_window for i in range(c.num_hidden_layers)
    ]


def dense_layers(
    c: Config,
    attention_part: Part,
    mlp_part: Part,
    norm_part: Part,
    head_dim: int,
    layer_windows: Sequence[int | None] | None = None,
    gated: bool = True,
) -> list[Layer]:
    """The same block in every layer, but for its window."""
    parts = attention_part + mlp_part + norm_part
    return [
        layer(
            f"model.layers.{i}",
            [attention(c, head_dim, window)],
            [FeedForward(c.intermediate_size, gated)],
            parts,
        )
        for i, window in enumerate(layer_windows or [None] * c.num_hidden_layers)
    ]


def attention_part(
    c: Config, head_dim: int, bias: bool = False, o_bias: bool | None = None, qk_norm: str = ""
) -> Part:
    """``self_attn``; ``qk_norm`` is by ``head``, or ``full`` over all heads at once."""
    heads, kv_heads = c.num_attention_heads, c.kv_heads
    part = qkvo("self_attn", c.hidden_size, heads, kv_heads, head_dim, bias, o_bias)
    if qk_norm:
        q, k = (1, 1) if qk_norm == "head" else (heads, kv_heads)
        part += array("self_attn.q_norm", q * head_dim) + array("self_attn.k_norm", k * head_dim)
    return part


def mlp_part(c: Config, bias: bool = False) -> Part:
    return gated_mlp("mlp", c.hidden_size, c.intermediate_size, bias)


def llama(c: Config) -> Architecture:
    """Llama, Mistral, ministral3, SmolLM3 and those that differ by a bias."""
    part = attention_part(c, c.head_width, c.attention_bias)
    layers = dense_layers(
        c,
        part,
        mlp_part(c, c.mlp_bias),
        norms(c.hidden_size, *LLAMA_NORMS),
        c.head_width,
        windows(c),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def qwen2(c: Config) -> Architecture:
    """Biases on queries, keys and values; no ``head_dim``."""
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, bias=True, o_bias=False)
    layers = dense_layers(c, part, mlp_part(c), norms(c.hidden_size, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def qwen3(c: Config) -> Architecture:
    """Norms on queries and keys of each head."""
    part = attention_part(c, c.head_dim, qk_norm="head")
    layers = dense_layers(c, part, mlp_part(c), norms(c.hidden_size, *LLAMA_NORMS), c.head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def phi3(c: Config) -> Architecture:
    """One matrix for queries, keys and values, one for gate and up."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    heads = c.num_attention_heads * head_dim
    part = under(
        "self_attn",
        linear("qkv_proj", heads + 2 * c.kv_heads * head_dim, hidden),
        linear("o_proj", hidden, heads),
    )
    mlp = under(
        "mlp",
        linear("gate_up_proj", 2 * c.intermediate_size, hidden),
        linear("down_proj", hidden, c.intermediate_size),
    )
    layers = dense_layers(c, part, mlp, norms(hidden, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def olmo2(c: Config) -> Architecture:
    """Norms after each part only; queries and keys normed over all heads at once."""
    part = attention_part(c, c.head_width, c.attention_bias, qk_norm="full")
    mlp = mlp_part(c, c.mlp_bias)
    layers = dense_layers(c, part, mlp, norms(c.hidden_size, *OLMO_NORMS), c.head_width)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def olmo3(c: Config) -> Architecture:
    """OLMo 2 with a window in three layers of four."""
    part = attention_part(c, c.head_width, c.attention_bias, qk_norm="full")
    layer_windows = windows(c) if "layer_types" in c else periodic_windows(c, 4)
    layer_norms = norms(c.hidden_size, *OLMO_NORMS)
    layers = dense_layers(c, part, mlp_part(c), layer_norms, c.head_width, layer_windows)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def pattern_windows(c: Config) -> list[int | None]:
    """``sliding_window_pattern`` is a string of L (local) and G (global), or G's period."""
    pattern = c.get("sliding_window_pattern") or "G"
    if isinstance(pattern, int):
        return periodic_windows(c, pattern)
    return [
        c.sliding_window if pattern[i % len(pattern)] == "L" else None
        for i in range(c.num_hidden_layers)
    ]


def exaone4(c: Config) -> Architecture:
    part = attention_part(c, c.head_dim, qk_norm="head")
    layer_norms = norms(c.hidden_size, *OLMO_NORMS)
    layers = dense_layers(c, part, mlp_part(c), layer_norms, c.head_dim, pattern_windows(c))
    return decoder(c, layers, tied=c.tie_word_embeddings)


def glm4(c: Config) -> Architecture:
    hidden = c.hidden_size
    mlp = under(
        "mlp",
        linear("gate_up_proj", 2 * c.intermediate_size, hidden),
        linear("down_proj", hidden, c.intermediate_size),
    )
    more = ("post_self_attn_layernorm", "post_mlp_layernorm")
    part = attention_part(c, c.head_dim, c.attention_bias, o_bias=False)
    layers = dense_layers(c, part, mlp, norms(hidden, *LLAMA_NORMS, *more), c.head_dim)
    return decoder(c, layers, tied=False)


def cohere(c: Config) -> Architecture:
    """One norm a layer: attention and feed-forward part run side by side. The head is tied."""
    hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.kv_heads
    head_dim = hidden // heads
    part = attention_part(c, head_dim, c.attention_bias)
    if c.use_qk_norm:
        part += array("self_attn.q_norm", heads, head_dim)
        part += array("self_attn.k_norm", kv_heads, head_dim)
    layer_norms = layer_norm("input_layernorm", hidden, c.layer_norm_bias)
    layers = dense_layers(c, part, mlp_part(c), layer_norms, head_dim)
    return decoder(c, layers, tied=True, norm=layer_norm("norm", hidden, c.layer_norm_bias))


def cohere2(c: Config) -> Architecture:
    """Cohere with a window in three layers of four."""
    hidden = c.hidden_size
    layers = dense_layers(
        c,
        attention_part(c, c.head_dim, c.attention_bias),
        mlp_part(c),
        layer_norm("input_layernorm", hidden, c.layer_norm_bias),
        c.head_dim,
        periodic_windows(c, c.sliding_window_pattern),
    )
    return decoder(c, layers, tied=True, norm=layer_norm("norm", hidden, c.layer_norm_bias))


def starcoder2(c: Config) -> Architecture:
    """Two matrices with biases in the feed-forward part; norms with biases."""
    hidden = c.hidden_size
    mlp = under(
        "mlp",
        linear("c_fc", c.intermediate_size, hidden, bias=True),
        linear("c_proj", hidden, c.intermediate_size, bias=True),
    )
    layer_norms = tuple(p for name in LLAMA_NORMS for p in layer_norm(name, hidden))
    head_dim = hidden // c.num_attention_heads
    part = attention_part(c, head_dim, bias=True)
    layers = dense_layers(c, part, mlp, layer_norms, head_dim, gated=False)
    return decoder(c, layers, tied=c.tie_word_embeddings, norm=layer_norm("norm", hidden))


LLAMA_DEFAULTS = {
    "head_dim": None,
    "num_key_value_heads": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "layer_types": None,
    "sliding_window": None,
}

MODULES: Modules = {
    "llama": (llama, LLAMA_DEFAULTS),
    "ministral3": (llama, LLAMA_DEFAULTS),
    "smollm3": (llama, LLAMA_DEFAULTS),
    "telechat3": (
        llama,
        {
            "mlp_bias": False,
            "attention_bias": False,
            "head_dim": None,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": (qwen2, {"tie_word_embeddings": True}),
    "qwen3": (qwen3, {}),
    "phi3": (phi3, {"num_key_value_heads": None, "tie_word_embeddings": False}),
    "olmo2": (
        olmo2,
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": (
        olmo3,
        {
            "num_key_value_heads": None,
            "head_dim": None,
            "attention_bias": False,
            "layer_types": None,
            "tie_word_embeddings": False,
        },
    ),
    "mimo": (qwen2, {"tie_word_embeddings": False}),
    "exaone4": (exaone4, {}),
    "glm4": (glm4, {}),
    "cohere": (
        cohere,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 40,
            "intermediate_size": 22528,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 256000,
            "attention_bias": False,
            "layer_norm_bias": False,
            "use_qk_norm": False,
        },
    ),
    "cohere2": (
        cohere2,
        {
            "hidden_size": 4096,
            "head_dim": 128,
            "num_hidden_layers": 32,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "attention_bias": False,
            "layer_norm_bias": False,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "starcoder2": (starcoder2, {"vocab_size": 49152, "tie_word_embeddings": True}),
}
