"""Kimi's hybrids of delta attention and latent attention: Kimi Linear and Kimi K3."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, mlp_part
from uma.architecture.latent import latent_attention, latent_part
from uma.architecture.layers import (
    Architecture,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Parameter,
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


def k3_delta(c: Config) -> tuple[Recurrent, Part]:
    """Kimi K3's delta attention: one matrix and one convolution for queries, keys and values."""
    settings, hidden = c.linear_attn_config, c.hidden_size
    heads, dim, kernel = (
        settings["num_heads"],
        settings["head_dim"],
        settings["short_conv_kernel_size"],
    )
    width = heads * dim
    gate = (
        linear("g_proj", width, hidden)
        if settings.get("use_full_rank_gate")
        else linear("g_a_proj", dim, hidden) + linear("g_b_proj", width, dim)
    )
    part = under(
        "self_attn",
        linear("qkv_proj", 3 * width, hidden),
        array("qkv_conv.conv", 3 * width, kernel, 1),
        linear("f_a_proj", dim, hidden),
        linear("f_b_proj", width, dim),
        linear("b_proj", heads, hidden),
        gate,
        array("A_log", heads, dtype="float32"),
        array("dt_bias", width, dtype="float32"),
        array("o_norm", dim),
        linear("o_proj", hidden, width),
    )
    states = (
        State("conv", (kernel - 1, 3 * width), "model"),
        State("delta", (heads, dim, dim), "float32"),
    )
    return Recurrent("kimi_delta", states, heads, dim, width), part


def k3_latent(c: Config) -> tuple[LatentAttention, Part]:
    part = latent_part(c.named(attention_bias=False), absorbed=True)
    if c.mla_use_output_gate:
        width = c.num_attention_heads * c.v_head_dim
        part += linear("self_attn.g_proj", width, c.hidden_size)
    return latent_attention(c), part


def k3_experts(c: Config) -> tuple[Experts, Part]:
    """Experts in a narrower space, if ``routed_expert_hidden_size`` is given."""
    hidden, narrow, width = c.hidden_size, c.routed_expert_hidden_size, c.moe_intermediate_size
    shared = width * c.num_shared_experts
    part = (
        router("gate", c.num_experts, hidden)
        + switch_glu("switch_mlp", c.num_experts, narrow or hidden, width)
        + array("e_score_correction_bias", c.num_experts, dtype="float32")
    )
    if narrow:
        part += linear("routed_expert_down_proj", narrow, hidden)
        part += linear("routed_expert_up_proj", hidden, narrow)
        part += array("routed_expert_norm", narrow) if c.latent_moe_use_norm else ()
    part += gated_mlp("shared_experts", hidden, shared) if shared else ()
    experts = Experts(c.num_experts, c.num_experts_per_token, width, shared)
    return experts, under("mlp", part)


def residual_part(prefix: str, hidden_size: int) -> Part:
    """The weights of earlier blocks in a residual; never quantized."""
    projection = Parameter(f"{prefix}_proj", (1, hidden_size), "matrix", quantizable=False)
    return (projection, *array(f"{prefix}_norm", hidden_size))


def kimi_k3(c: Config) -> Architecture:
    """Kimi Linear's layers with residuals over blocks of layers."""
    hidden = c.hidden_size
    recurrent, latent = k3_delta(c), k3_latent(c)
    dense = (FeedForward(c.intermediate_size), mlp_part(c))
    blocks = c.attn_res_block_size is not None
    common = norms(hidden, *LLAMA_NORMS)
    if blocks:
        common += residual_part("self_attention_res", hidden) + residual_part("mlp_res", hidden)

    def block(i: int) -> Layer:
        mixer, part = recurrent if i + 1 in c.linear_attn_config["kda_layers"] else latent
        sparse = i >= c.first_k_dense_replace and i % c.moe_layer_freq == 0 and c.num_experts
        feed_forward, mlp = k3_experts(c) if sparse else dense
        return layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, common)

    layers = [block(i) for i in range(c.num_hidden_layers)]
    extra = under("model", residual_part("output_attn_res", hidden)) if blocks else ()
    return decoder(c, layers, tied=c.tie_word_embeddings, extra=extra)


MODULES: Modules = {
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
    "kimi_k3": (
        kimi_k3,
        {
            "vocab_size": 163840,
            "hidden_size": 7168,
            "num_hidden_layers": 93,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "intermediate_size": 33792,
            "max_position_embeddings": 1048576,
            "attn_res_block_size": None,
            "q_lora_rank": None,
            "mla_use_output_gate": False,
            "num_experts": None,
            "num_experts_per_token": 16,
            "num_shared_experts": 0,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "routed_expert_hidden_size": None,
            "latent_moe_use_norm": False,
            "tie_word_embeddings": False,
        },
    ),
}
