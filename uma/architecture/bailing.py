"""Ling (Bailing) models: experts over softmax, linear and latent attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention
from uma.architecture.experts_variants import FeedForwardPart, dense_part
from uma.architecture.latent import latent_attention, latent_queries
from uma.architecture.layers import Architecture, Experts, LatentAttention, Mixer, Recurrent, State
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
    unquantized,
)


def fused_attention(c: Config, head_dim: int, kv_heads: int) -> Part:
    """Queries, keys and values in one matrix."""
    heads = c.num_attention_heads
    total = (heads + 2 * kv_heads) * head_dim
    return under(
        "attention",
        linear("query_key_value", total, c.hidden_size, c.use_qkv_bias),
        linear("dense", c.hidden_size, heads * head_dim, c.use_bias),
        norms(head_dim, "key_layernorm", "query_layernorm") if c.use_qk_norm else (),
    )


def gated_linear_attention(
    c: Config, head_dim: int, dtype: Literal["model", "float32"]
) -> tuple[Recurrent, Part]:
    """A matrix a head that decays; the output is gated and normed in groups."""
    heads = c.num_attention_heads
    width = heads * head_dim
    part = fused_attention(c, head_dim, heads) + under(
        "attention", linear("g_proj", width, c.hidden_size), array("g_norm", width)
    )
    state = State("linear", (heads, head_dim, head_dim), dtype)
    return Recurrent("linear_attention", (state,), heads, head_dim, width), part


def experts_part(c: Config, shared: int) -> tuple[Experts, Part]:
    hidden, width = c.hidden_size, c.moe_intermediate_size
    part = under(
        "mlp",
        switch_glu("switch_mlp", c.num_experts, hidden, width, c.use_bias),
        router("gate.gate_proj", c.num_experts, hidden),
        array("gate.expert_bias", c.num_experts, dtype="float32")
        if c.moe_router_enable_expert_bias
        else (),
        gated_mlp("shared_experts", hidden, shared, c.use_bias) if shared else (),
    )
    return Experts(c.num_experts, c.num_experts_per_tok, width, shared), part


def shared_size(c: Config) -> int:
    """Width of the shared experts together."""
    if not c.moe_router_enable_shared_expert:
        return 0
    width = c.moe_shared_expert_intermediate_size or c.moe_intermediate_size
    return int(width * c.num_shared_experts)


def bailing_decoder(
    c: Config, mixers: Sequence[tuple[Mixer, Part]], experts: FeedForwardPart
) -> Architecture:
    """Layers with these mixers; experts after the first ``first_k_dense_replace``."""
    layers = []
    for i, (mixer, part) in enumerate(mixers):
        dense = i < c.first_k_dense_replace
        feed_forward, mlp = dense_part(c, c.use_bias) if dense else experts
        layer_norms = norms(c.hidden_size, *LLAMA_NORMS)
        layers.append(layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms))
    return decoder(c, layers, tied=c.tie_word_embeddings, embedding="word_embeddings")


def is_global(c: Config, index: int) -> bool:
    """The last layer of each group, and those after the last whole group."""
    group = c.layer_group_size
    return bool((index + 1) % group == 0 or index >= c.num_hidden_layers // group * group)


def bailing_moe(c: Config) -> Architecture:
    dim = c.hidden_size // c.num_attention_heads
    mixer: tuple[Mixer, Part] = (attention(c, dim), fused_attention(c, dim, c.kv_heads))
    return bailing_decoder(c, [mixer] * c.num_hidden_layers, experts_part(c, shared_size(c)))


def bailing_moe_linear(c: Config) -> Architecture:
    """Softmax attention in the last layer of each group, linear in the others."""
    dim = c.head_width
    softmax: tuple[Mixer, Part] = (attention(c, dim), fused_attention(c, dim, c.kv_heads))
    recurrent = gated_linear_attention(c, c.hidden_size // c.num_attention_heads, "model")
    mixers = [softmax if is_global(c, i) else recurrent for i in range(c.num_hidden_layers)]
    return bailing_decoder(c, mixers, experts_part(c, shared_size(c)))


def absorbed_latent(c: Config) -> tuple[LatentAttention, Part]:
    """Latent attention whose absorbed matrices are never quantized."""
    heads, rank, hidden = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
    part = under(
        "attention",
        latent_queries(c, c.use_qkv_bias),
        linear("kv_a_proj_with_mqa", rank + c.qk_rope_head_dim, hidden, c.use_qkv_bias),
        array("kv_a_layernorm", rank),
        stacked("embed_q", heads, rank, c.qk_nope_head_dim, quantizable=False),
        stacked("unembed_out", heads, c.v_head_dim, rank, quantizable=False),
        linear("dense", hidden, heads * c.v_head_dim, c.use_qkv_bias),
    )
    return latent_attention(c), part


def bailing_hybrid(c: Config) -> Architecture:
    """Latent attention in the last layer of each group, linear in the others."""
    shared = c.moe_shared_expert_intermediate_size or c.moe_intermediate_size * c.num_shared_experts
    latent, recurrent = absorbed_latent(c), gated_linear_attention(c, c.head_width, "float32")
    mixers = [latent if is_global(c, i) else recurrent for i in range(c.num_hidden_layers)]
    return bailing_decoder(c, mixers, experts_part(c, shared if c.num_shared_experts else 0))


def v3_delta(c: Config) -> tuple[Recurrent, Part]:
    """Kimi's delta attention with gates of full rank."""
    hidden, heads, dim, kernel = (
        c.hidden_size,
        c.num_attention_heads,
        c.head_dim,
        c.short_conv_kernel_size,
    )
    width = heads * dim
    part = under(
        "attention",
        *(linear(f"{x}_proj", width, hidden) for x in "qkvfg"),
        *(array(f"{x}_conv1d", width, kernel, 1) for x in "qkv"),
        array("A_log", heads),
        array("dt_bias", width),
        unquantized(linear("b_proj", heads, hidden)),
        array("o_norm", dim),
        linear("o_proj", hidden, width),
    )
    convolutions = tuple(State(f"{x}_conv", (kernel - 1, width), "model") for x in "qkv")
    states = (*convolutions, State("delta", (heads, dim, dim), "float32"))
    return Recurrent("kimi_delta", states, heads, dim, width), part


def v3_latent(c: Config) -> tuple[LatentAttention, Part]:
    """Latent attention with a gate a head; only ``dense`` has a quantized form."""
    mixer, part = absorbed_latent(c.named(use_qkv_bias=False))
    gate = linear("attention.g_proj", c.num_attention_heads, c.hidden_size)
    kept = unquantized(part + gate)
    return mixer, tuple(
        replace(p, quantizable=True) if p.name == "attention.dense" else p for p in kept
    )


def bailing_moe_v3(c: Config) -> Architecture:
    """Latent attention in the last layer of each group; embeddings never quantized."""
    hidden, width = c.hidden_size, c.moe_intermediate_size
    shared = c.moe_shared_expert_intermediate_size * c.num_shared_experts
    moe = under(
        "mlp",
        array("gate", c.num_experts, hidden),
        array("gate.expert_bias", c.num_experts),
        switch_glu("switch_mlp", c.num_experts, hidden, width),
        gated_mlp("shared_experts", hidden, shared),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, width, shared)
    latent, recurrent = v3_latent(c), v3_delta(c)
    mixers = [latent if is_global(c, i) else recurrent for i in range(c.num_hidden_layers)]
    architecture = bailing_decoder(c.named(use_bias=False), mixers, (experts, moe))
    return replace(architecture, parameters=unquantized(architecture.parameters))


BAILING_DEFAULTS = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_enable_shared_expert": True,
}

MODULES: Modules = {
    "bailing_moe": (bailing_moe, BAILING_DEFAULTS),
    "bailing_moe_linear": (bailing_moe_linear, BAILING_DEFAULTS | {"head_dim": None}),
    "bailing_hybrid": (
        bailing_hybrid,
        {
            "q_lora_rank": None,
            "moe_shared_expert_intermediate_size": None,
            "use_qkv_bias": False,
            "use_bias": False,
            "use_qk_norm": True,
            "moe_router_enable_expert_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "bailing_moe_v3": (
        bailing_moe_v3,
        {
            "vocab_size": 157184,
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "layer_group_size": 4,
            "head_dim": 128,
            "q_lora_rank": 256,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "short_conv_kernel_size": 4,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}
