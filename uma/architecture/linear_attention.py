"""Hybrids of linear attention (gated delta networks) and softmax attention."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, OLMO_NORMS, attention, attention_part, mlp_part
from uma.architecture.experts import is_sparse
from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Layer,
    Recurrent,
    State,
)
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    linear,
    norms,
    router,
    switch_glu,
    under,
)


def delta_net(c: Config) -> Recurrent:
    """A gated delta network: the last inputs of its convolution, one matrix a value head."""
    heads, key_dim, value_dim = (
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    channels = 2 * c.linear_num_key_heads * key_dim + heads * value_dim
    states = (
        State("conv", (c.linear_conv_kernel_dim - 1, channels), "model"),
        State("delta", (heads, value_dim, key_dim), "float32"),
    )
    return Recurrent("gated_delta", states, heads, value_dim, heads * value_dim)


def qwen3_next_delta(c: Config) -> Part:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    heads = c.linear_num_value_heads
    values = heads * c.linear_value_head_dim
    return under(
        "linear_attn",
        array("conv1d", 2 * keys + values, c.linear_conv_kernel_dim, 1),
        linear("in_proj_qkvz", 2 * keys + 2 * values, c.hidden_size),
        linear("in_proj_ba", 2 * heads, c.hidden_size),
        array("dt_bias", heads),
        array("A_log", heads),
        array("norm", c.linear_value_head_dim),
        linear("out_proj", c.hidden_size, values),
    )


def gated_attention_part(c: Config) -> Part:
    """Attention whose query projection also gives a gate, with norms on each head."""
    hidden, heads, dim, bias = c.hidden_size, c.num_attention_heads, c.head_width, c.attention_bias
    return under(
        "self_attn",
        linear("q_proj", 2 * heads * dim, hidden, bias),
        linear("k_proj", c.kv_heads * dim, hidden, bias),
        linear("v_proj", c.kv_heads * dim, hidden, bias),
        linear("o_proj", hidden, heads * dim, bias),
        norms(dim, "q_norm", "k_norm"),
    )


def qwen_experts(c: Config) -> tuple[FeedForward | Experts, Part]:
    """Routed experts and one shared one behind its own gate."""
    hidden, shared = c.hidden_size, c.shared_expert_intermediate_size
    part = under(
        "mlp",
        router("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size),
        gated_mlp("shared_expert", hidden, shared),
        router("shared_expert_gate", 1, hidden),
    )
    return Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, shared), part


def dense_part(c: Config) -> tuple[FeedForward | Experts, Part]:
    return FeedForward(c.intermediate_size), mlp_part(c)


def qwen_hybrid_layers(c: Config, delta: Part, sparse: list[bool]) -> list[Layer]:
    """Softmax attention in every ``full_attention_interval``-th layer, delta networks between."""
    softmax: tuple[Attention | Recurrent, Part] = (
        attention(c, c.head_width),
        gated_attention_part(c),
    )
    recurrent: tuple[Attention | Recurrent, Part] = (delta_net(c), delta)
    layer_norms = norms(c.hidden_size, *LLAMA_NORMS)
    layers = []
    for i, has_experts in enumerate(sparse):
        mixer, part = recurrent if (i + 1) % c.full_attention_interval else softmax
        feed_forward, mlp = qwen_experts(c) if has_experts else dense_part(c)
        layers.append(layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms))
    return layers


def qwen3_next(c: Config) -> Architecture:
    sparse = [is_sparse(c, i) for i in range(c.num_hidden_layers)]
    return decoder(
        c, qwen_hybrid_layers(c, qwen3_next_delta(c), sparse), tied=c.tie_word_embeddings
    )


def qwen3_5_delta(c: Config) -> Part:
    """The delta network of Qwen3-Next with its projections apart; ``A_log`` stays float32."""
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    heads, hidden = c.linear_num_value_heads, c.hidden_size
    values = heads * c.linear_value_head_dim
    return under(
        "linear_attn",
        array("conv1d", 2 * keys + values, c.linear_conv_kernel_dim, 1),
        linear("in_proj_qkv", 2 * keys + values, hidden),
        linear("in_proj_z", values, hidden),
        linear("in_proj_b", heads, hidden),
        linear("in_proj_a", heads, hidden),
        array("dt_bias", heads),
        array("A_log", heads, dtype="float32"),
        array("norm", c.linear_value_head_dim),
        linear("out_proj", hidden, values),
    )


def qwen3_5(c: Config) -> Architecture:
    sparse = [c.num_experts > 0] * c.num_hidden_layers
    return decoder(c, qwen_hybrid_layers(c, qwen3_5_delta(c), sparse), tied=c.tie_word_embeddings)


def olmo_hybrid(c: Config) -> Architecture:
    """Delta networks with three convolutions; OLMo's norms around the softmax layers."""
    hidden, heads = c.hidden_size, c.linear_num_value_heads
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = heads * c.linear_value_head_dim
    kernel = c.linear_conv_kernel_dim
    delta = under(
        "linear_attn",
        linear("q_proj", keys, hidden),
        linear("k_proj", keys, hidden),
        linear("v_proj", values, hidden),
        linear("a_proj", heads, hidden),
        linear("b_proj", heads, hidden),
        linear("g_proj", values, hidden),
        linear("o_proj", hidden, values),
        array("q_conv1d", keys, kernel, 1),
        array("k_conv1d", keys, kernel, 1),
        array("v_conv1d", values, kernel, 1),
        array("A_log", heads),
        array("dt_bias", heads),
        array("o_norm", c.linear_value_head_dim),
    )
    states = tuple(
        State(f"{name}_conv", (kernel - 1, width), "model")
        for name, width in (("q", keys), ("k", keys), ("v", values))
    )
    matrix = (heads, c.linear_value_head_dim, c.linear_key_head_dim)
    recurrent = Recurrent(
        "gated_delta",
        (*states, State("delta", matrix, "float32")),
        heads,
        c.linear_value_head_dim,
        values,
    )
    types = c.layer_types or [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(c.num_hidden_layers)
    ]
    dim = c.head_width
    full = attention_part(c, dim, c.attention_bias, qk_norm="full") + norms(hidden, *OLMO_NORMS)
    mixers: dict[str, tuple[Attention | Recurrent, Part]] = {
        "full_attention": (attention(c, dim), full),
        "linear_attention": (recurrent, delta + norms(hidden, *LLAMA_NORMS)),
    }
    mlp = mlp_part(c)
    layers = []
    for i, kind in enumerate(types):
        mixer, part = mixers[kind]
        layers.append(
            layer(f"model.layers.{i}", [mixer], [FeedForward(c.intermediate_size)], part, mlp)
        )
    return decoder(c, layers, tied=c.tie_word_embeddings)


QWEN3_5_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "linear_num_value_heads": 64,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 192,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": None,
    "full_attention_interval": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "moe_intermediate_size": 0,
}

MODULES: Modules = {
    "qwen3_next": (
        qwen3_next,
        {
            "tie_word_embeddings": False,
            "attention_bias": False,
            "full_attention_interval": 4,
            # transformers 4.57, Qwen3NextConfig; mlx-lm has no default.
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_5": (qwen3_5, QWEN3_5_DEFAULTS),
    "olmo_hybrid": (olmo_hybrid, {"head_dim": None, "layer_types": None}),
}
