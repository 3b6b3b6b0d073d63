"""Recurrent layers of their own kind: RecurrentGemma, RWKV-7, PLaMo 2, Baichuan M1, Gear."""

from dataclasses import replace

from uma.architecture.config import Config, Modules
from uma.architecture.dense import SANDWICH_NORMS, attention, attention_part, mlp_part
from uma.architecture.dense_variants import layer_norms
from uma.architecture.layers import (
    Architecture,
    Attention,
    FeedForward,
    Layer,
    Mixer,
    Recurrent,
    State,
)
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

GRIFFIN_KERNEL = 4  # mlx-lm 0.32.2, recurrent_gemma.py, whatever conv1d_width says


def griffin_recurrence(c: Config) -> tuple[Mixer, Part]:
    """A convolution and a gated linear recurrence unit (RG-LRU), block-diagonal by head."""
    width, heads, kernel = c.hidden_size, c.num_attention_heads, GRIFFIN_KERNEL
    dim = width // heads
    part = under(
        "temporal_block",
        *(linear(f"linear_{x}", width, width, bias=True) for x in ("y", "x", "out")),
        array("conv_1d", width, kernel, 1),
        array("conv_1d.bias", width),
        array("rg_lru.recurrent_param", width),
        *(array(f"rg_lru.{x}_gate_weight", heads, dim, dim) for x in ("input", "recurrent")),
        *(array(f"rg_lru.{x}_gate_bias", heads, dim) for x in ("input", "recurrent")),
    )
    states = (
        State("conv", (kernel - 1, width), "model"),
        State("lru", (width,), "model"),
    )
    return Recurrent("rg_lru", states, heads, dim, width), part


def recurrent_gemma(c: Config) -> Architecture:
    """``block_types`` repeated; one head of keys and values; the width counts gate and up."""
    width, heads, size = c.hidden_size, c.num_attention_heads, c.intermediate_size // 2
    dim = width // heads
    kinds = c.block_types or c._block_types
    local = qkvo("temporal_block", width, heads, 1, dim, o_bias=True)
    mixers: dict[str, tuple[Mixer, Part]] = {
        "recurrent": griffin_recurrence(c),
        "attention": (Attention(heads, 1, dim, dim, c.attention_window_size), local),
    }
    common = gated_mlp("mlp_block", width, size, bias=True) + norms(
        width, "temporal_pre_norm", "channel_pre_norm"
    )
    layers = []
    for i in range(c.num_hidden_layers):
        mixer, part = mixers[kinds[i % len(kinds)]]
        layers.append(layer(f"model.layers.{i}", [mixer], [FeedForward(size)], part, common))
    return decoder(c, layers, tied=False, norm="final_norm")


def low_rank(name: str, width: int, rank: int, bias: bool = True) -> Part:
    """RWKV's low-rank maps; the second matrix is kept at 8 bits."""
    return under(f"{name}.lora", linear("0", rank, width) + linear("2", width, rank, bias, bits=8))


def rwkv7_layer(c: Config, index: int) -> Layer:
    hidden, dim, size = c.hidden_size, c.head_dim, c.intermediate_size
    heads = hidden // dim
    time = (
        tuple(p for x in "rwkvag" for p in array(f"x_{x}", 1, 1, hidden))
        + tuple(p for x in ("k_k", "k_a", "r_k") for p in array(x, heads, dim))
        + tuple(p for x in "rkvo" for p in linear(f"{x}_proj", hidden, hidden))
        + array("g_norm", heads, dim)
        + array("g_norm.bias", heads, dim)
        + low_rank("w_lora", hidden, c.decay_low_rank_dim)
        + (low_rank("v_lora", hidden, c.v_low_rank_dim) if index else ())
        + low_rank("a_lora", hidden, c.a_low_rank_dim)
        + low_rank("g_lora", hidden, c.gate_low_rank_dim, bias=False)
    )
    channel = linear("key", size, hidden) + linear("value", hidden, size) + array("x_k", hidden)
    names = ("attn_norm", "ffn_norm") if index else ("pre_norm", "attn_norm", "ffn_norm")
    states = (
        State("time_shift", (1, hidden), "model"),
        State("wkv", (heads, dim, dim), "float32"),
        State("channel_shift", (1, hidden), "model"),
    )
    return layer(
        f"model.layers.{index}",
        [Recurrent("rwkv7", states, heads, dim, hidden)],
        [FeedForward(size, gated=False)],
        under("attn", time),
        under("ffn", channel),
        layer_norms(hidden, *names),
    )


def rwkv7(c: Config) -> Architecture:
    """No attention: one matrix a head and the last token of each part; embeddings at 8 bits."""
    architecture = decoder(
        c,
        [rwkv7_layer(c, i) for i in range(c.num_hidden_layers)],
        tied=c.tie_word_embeddings,
        embedding="embeddings",
        norm=layer_norm("norm", c.hidden_size),
    )
    eight = tuple(
        replace(p, bits=8, group_size=64) if p.kind == "embedding" else p
        for p in architecture.parameters
    )
    return replace(architecture, parameters=eight)


def plamo2_mamba(c: Config) -> tuple[Mixer, Part]:
    """Mamba-2 with projections of its own for the time step and for B and C."""
    hidden, heads, dim = c.hidden_size, c.mamba_num_heads, c.hidden_size_per_head
    inner, state, kernel = heads * dim, c.mamba_d_state, c.mamba_d_conv
    rank = max(64, hidden // 16)
    part = under(
        "mixer",
        linear("in_proj", 2 * inner, hidden),
        array("conv1d", inner, kernel, 1),
        linear("bcdt_proj", rank + 2 * state, inner),
        linear("dt_proj", heads, rank),
        *(array(x, heads) for x in ("dt_bias", "A_log", "D")),
        array("dt_norm_weight", rank),
        array("B_norm_weight", state),
        array("C_norm_weight", state),
        linear("out_proj", hidden, inner),
    )
    states = (
        State("conv", (kernel - 1, inner), "model"),
        State("ssm", (heads, dim, state), "float32"),
    )
    return Recurrent("mamba2", states, heads, dim, inner), part


def plamo_block(c: Config, index: int, mixer: Mixer, part: Part) -> Layer:
    """A layer of PLaMo 2 or 3: four norms, gate and up in one matrix."""
    hidden, size = c.hidden_size, c.intermediate_size
    mlp = linear("mlp.gate_up_proj", 2 * size, hidden) + linear("mlp.down_proj", hidden, size)
    names = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")
    name = f"model.layers.layers.{index}"
    return layer(name, [mixer], [FeedForward(size)], part, mlp, norms(hidden, *names))


def plamo_attention(c: Config, dim: int) -> Part:
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return linear("mixer.qkv_proj", (heads + 2 * kv_heads) * dim, c.hidden_size) + linear(
        "mixer.o_proj", c.hidden_size, heads * dim
    )


def plamo2(c: Config) -> Architecture:
    """Attention in the middle of every ``mamba_step`` layers."""
    dim, count, step = c.hidden_size_per_head, c.num_hidden_layers, c.mamba_step
    softmax = plamo_attention(c, dim) + under(
        "mixer",
        array("q_weight", c.num_attention_heads, dim),
        array("k_weight", c.num_key_value_heads, dim),
    )
    mamba = plamo2_mamba(c)

    def is_mamba(i: int) -> bool:
        if not c.mamba_enabled:
            return False
        if count <= step // 2:
            return bool(i != count - 1)
        return bool(i % step != step // 2)

    layers = []
    for i in range(count):
        mixer, part = mamba if is_mamba(i) else (attention(c, dim), softmax)
        layers.append(plamo_block(c, i, mixer, part))
    return decoder(c, layers, tied=c.tie_word_embeddings)


def plamo3(c: Config) -> Architecture:
    """Full attention at the end of every ``sliding_window_pattern`` layers."""
    dim, window = c.head_dim, c.sliding_window or c.window_size
    part = plamo_attention(c, dim) + under("mixer", norms(dim, "q_norm", "k_norm"))
    layers = [
        plamo_block(
            c, i, attention(c, dim, window if (i + 1) % c.sliding_window_pattern else None), part
        )
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def baichuan_m1_layer(c: Config, index: int) -> Layer:
    """A convolution of two tokens over keys and values, before a cache that may slide."""
    hidden = c.hidden_size
    sliding = index in c.sliding_window_layers
    heads = (sliding and c.get("num_swa_attention_heads")) or c.num_attention_heads
    kv_heads = (sliding and c.get("num_swa_key_value_heads")) or c.num_key_value_heads
    dim, kernel = hidden // heads, c.conv_window
    part = (
        linear("self_attn.W_pack", hidden + 2 * kv_heads * dim, hidden)
        + linear("self_attn.o_proj", hidden, heads * dim)
        + array("self_attn.conv_k", 1, 1, kv_heads, 1, kernel)
        + array("self_attn.conv_v", 1, 1, kv_heads, 1, kernel)
        + mlp_part(c)
        + norms(hidden, "input_layernorm", "post_attention_layernorm")
    )
    states = tuple(State(f"conv_{x}", (kv_heads, 1, dim), "model") for x in "kv")
    convolution = Recurrent("kv_conv", states, kv_heads, dim, kv_heads * dim)
    window = c.sliding_window if sliding else None
    mixers: list[Mixer] = [convolution, Attention(heads, kv_heads, dim, dim, window)]
    name = f"model.layers.{index}"
    return layer(name, mixers, [FeedForward(c.intermediate_size)], part)


def baichuan_m1(c: Config) -> Architecture:
    layers = [baichuan_m1_layer(c, i) for i in range(c.num_hidden_layers)]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def gear_convolution(c: Config) -> tuple[Mixer, Part]:
    """Convolutions over keys and values instead of a cache."""
    hidden, heads, dim, bias = c.hidden_size, c.num_attention_heads, c.head_dim, c.attention_bias
    width, kernel = c.kv_heads * dim, c.conv_L_cache
    part = qkvo("local_mixer", hidden, heads, c.kv_heads, dim, bias) + under(
        "local_mixer",
        norms(dim, "q_norm", "k_norm"),
        *(array(f"{x}_conv", width, kernel, 1) for x in ("key", "value")),
        *(array(f"{x}_conv.bias", width) for x in ("key", "value") if bias),
    )
    states = tuple(State(f"{x}_conv", (kernel - 1, width), "model") for x in ("key", "value"))
    return Recurrent("kv_conv", states, heads, dim, width), part


def gear(c: Config) -> Architecture:
    """Gemma's norms; full, sliding or convolutional by ``layer_types``."""
    softmax = attention_part(c, c.head_dim, c.attention_bias, qk_norm="head")
    convolution = gear_convolution(c)
    common = mlp_part(c) + norms(c.hidden_size, *SANDWICH_NORMS)
    kinds = c.layer_types or ["full_attention"] * c.num_hidden_layers
    layers = []
    for i, kind in enumerate(kinds):
        window = c.sliding_window if kind == "sliding_attention" else None
        mixer, part = (
            convolution if kind == "conv_mixer" else (attention(c, c.head_dim, window), softmax)
        )
        name = f"model.layers.{i}"
        layers.append(layer(name, [mixer], [FeedForward(c.intermediate_size)], part, common))
    return decoder(c, layers, tied=c.tie_word_embeddings)


MODULES: Modules = {
    "recurrent_gemma": (recurrent_gemma, {"block_types": None}),
    "rwkv7": (rwkv7, {"tie_word_embeddings": False}),
    "plamo2": (
        plamo2,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "tie_word_embeddings": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "hidden_size_per_head": 128,
            "max_position_embeddings": 2048,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_num_heads": 64,
            "mamba_step": 2,
            "mamba_enabled": True,
            "intermediate_size": 13312,
            "vocab_size": 32000,
        },
    ),
    "plamo3": (
        plamo3,
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "tie_word_embeddings": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 2048,
            "window_size": 2048,
            "sliding_window": None,
            "sliding_window_pattern": 8,
            "intermediate_size": 13312,
            "vocab_size": 32000,
        },
    ),
    "baichuan_m1": (
        baichuan_m1,
        {
            "num_swa_attention_heads": None,
            "num_swa_key_value_heads": None,
            "tie_word_embeddings": False,
        },
    ),
    "gear": (
        gear,
        {
            "attention_bias": False,
            "sliding_window": 512,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
    ),
}
