"""Hybrids of linear attention (gated delta networks) and softmax attention."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, mlp_part
from uma.architecture.experts import is_sparse
from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
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
    stacked,
    switch_glu,
    under,
)


def delta_net(c: Config, state_dtype: str = "float32") -> Recurrent:
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


def qwen_experts(c: Config) -> tuple[Experts, Part]:
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


def qwen_hybrid_layers(
    c: Config, delta: Part, sparse: list[bool], prefix: str = "model"
) -> list[Layer]:
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
        feed_forward: tuple[FeedForward | Experts, Part] = (
            qwen_experts(c) if has_experts else (FeedForward(c.intermediate_size), mlp_part(c))
        )
        layers.append(
            layer(
                f"{prefix}.layers.{i}",
                [mixer],
                [feed_forward[0]],
                part,
                feed_forward[1],
                layer_norms,
            )
        )
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


def kimi_delta_part(c: Config) -> Part:
    """Kimi delta attention: three short convolutions and two low-rank gates."""
    settings, hidden = c.linear_attn_config, c.hidden_size
    heads, dim = settings["num_heads"], settings["head_dim"]
    width, kernel = heads * dim, settings.get("short_conv_kernel_size", 4)
    return under(
        "self_attn",
        *(linear(f"{x}_proj", width, hidden) for x in "qkv"),
        *(array(f"{x}_conv.conv", width, kernel, 1) for x in "qkv"),
        *(linear(f"{x}_a_proj", dim, hidden) for x in "fg"),
        *(linear(f"{x}_b_proj", width, dim) for x in "fg"),
        linear("b_proj", heads, hidden),
        array("A_log", 1, 1, heads, 1, dtype="float32"),
        array("dt_bias", width, dtype="float32"),
        array("o_norm", dim),
        linear("o_proj", hidden, width),
    )


def kimi_delta(c: Config) -> Recurrent:
    settings = c.linear_attn_config
    heads, dim = settings["num_heads"], settings["head_dim"]
    tail = settings.get("short_conv_kernel_size", 4) - 1
    convolutions = tuple(State(f"{x}_conv", (tail, heads * dim), "model") for x in "qkv")
    states = (*convolutions, State("delta", (heads, dim, dim), "float32"))
    return Recurrent("kimi_delta", states, heads, dim, heads * dim)


def kimi_latent(c: Config) -> tuple[LatentAttention, Part]:
    """Latent attention without a query rank; rotary width 0 if not given."""
    heads, rank, hidden = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
    nope, rope = c.qk_nope_head_dim or c.head_dim, c.qk_rope_head_dim or 0
    values = c.v_head_dim or c.head_dim
    part = under(
        "self_attn",
        linear("q_proj", heads * (nope + rope), hidden),
        linear("kv_a_proj_with_mqa", rank + rope, hidden),
        array("kv_a_layernorm", rank),
        stacked("embed_q", heads, rank, nope),
        stacked("unembed_out", heads, values, rank),
        linear("o_proj", hidden, heads * values),
    )
    return LatentAttention(heads, rank, rope, nope, values), part


def kimi_experts(c: Config) -> tuple[Experts, Part]:
    hidden, width = c.hidden_size, c.moe_intermediate_size
    shared = width * c.num_shared_experts
    part = under(
        "mlp",
        router("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, width),
        array("e_score_correction_bias", c.num_experts, dtype="float32"),
        *([gated_mlp("shared_experts", hidden, shared)] if shared else []),
    )
    return Experts(c.num_experts, c.num_experts_per_token, width, shared), part


def kimi_linear(c: Config) -> Architecture:
    """``kda_layers`` counts layers from 1."""
    recurrent = (kimi_delta(c), kimi_delta_part(c))
    latent = kimi_latent(c)
    dense = (FeedForward(c.intermediate_size), mlp_part(c))
    layers = []
    for i in range(c.num_hidden_layers):
        mixer, part = recurrent if i + 1 in c.linear_attn_config["kda_layers"] else latent
        sparse = i >= c.first_k_dense_replace and i % c.moe_layer_freq == 0 and c.num_experts > 0
        feed_forward, mlp = kimi_experts(c) if sparse else dense
        layer_norms = norms(c.hidden_size, *LLAMA_NORMS)
        layers.append(layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms))
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
    "kimi_linear": (
        kimi_linear,
        {
            "tie_word_embeddings": False,
            "qk_nope_head_dim": None,
            "qk_rope_head_dim": None,
            "v_head_dim": None,
            "num_experts_per_token": 1,
            "num_shared_experts": 0,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
        },
    ),
}
