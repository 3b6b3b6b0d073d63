"""More mixtures of experts: other routers, shared experts, and attention that varies by layer."""

from collections.abc import Sequence
from typing import Any

from uma.architecture.config import Config, Modules
from uma.architecture.dense import (
    LLAMA_NORMS,
    attention,
    attention_part,
    mlp_part,
    periodic_windows,
    windows,
)
from uma.architecture.dense_variants import at_8_bits
from uma.architecture.experts import glm4_moe
from uma.architecture.latent import DEEPSEEK_DEFAULTS, deepseek_experts, deepseek_layers
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward, Layer
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    linear,
    norms,
    qkvo,
    router,
    switch_glu,
    under,
)

FeedForwardPart = tuple[FeedForward | Experts, Part]


def mixed_layers(
    c: Config,
    mixers: Sequence[tuple[Attention, Part]],
    feed_forwards: Sequence[FeedForwardPart],
    norm_part: Part,
) -> list[Layer]:
    """Layers from their attention, their feed-forward part, and the norms that all have."""
    return [
        layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, norm_part)
        for i, ((mixer, part), (feed_forward, mlp)) in enumerate(
            zip(mixers, feed_forwards, strict=True)
        )
    ]


def dense_part(c: Config, bias: bool = False) -> FeedForwardPart:
    return FeedForward(c.intermediate_size), mlp_part(c, bias)


def olmoe(c: Config) -> Architecture:
    hidden, dim, count = c.hidden_size, c.head_width, c.num_experts
    experts = Experts(count, c.num_experts_per_tok, c.intermediate_size)
    moe = under(
        "mlp",
        linear("gate", count, hidden),
        switch_glu("switch_mlp", count, hidden, c.intermediate_size, c.mlp_bias),
    )
    mixer = (attention(c, dim), attention_part(c, dim, c.attention_bias, qk_norm="full"))
    layers = mixed_layers(
        c,
        [mixer] * c.num_hidden_layers,
        [(experts, moe)] * c.num_hidden_layers,
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def dots1(c: Config) -> Architecture:
    """DeepSeek's experts, under the name ``experts``."""
    hidden, count, width = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    shared = width * c.n_shared_experts
    moe = under(
        "mlp",
        switch_glu("experts", count, hidden, width),
        array("gate", count, hidden),
        array("gate.e_score_correction_bias", count),
        gated_mlp("shared_experts", hidden, shared, c.mlp_bias),
    )
    experts = (Experts(count, c.num_experts_per_tok, width, shared), moe)
    mixer = (attention(c, c.head_width), attention_part(c, c.head_width, qk_norm="head"))
    dense = c.first_k_dense_replace
    layers = mixed_layers(
        c,
        [mixer] * c.num_hidden_layers,
        [dense_part(c, c.mlp_bias) if i < dense else experts for i in range(c.num_hidden_layers)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def deepseek(c: Config) -> Architecture:
    """The first DeepSeek mixture of experts: grouped-query attention."""
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, c.attention_bias)
    layers = deepseek_layers(c, attention(c, head_dim), part, bias_correction=False)
    return decoder(c, layers, tied=False)


def qwen2_moe(c: Config) -> Architecture:
    """Experts and a shared one behind a gate in every layer; an untied head always."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    shared, width = c.shared_expert_intermediate_size, c.moe_intermediate_size
    moe = under(
        "mlp",
        linear("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, width),
        gated_mlp("shared_expert", hidden, shared),
        linear("shared_expert_gate", 1, hidden),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, width, shared)
    mixer = (attention(c, head_dim), attention_part(c, head_dim, bias=True, o_bias=False))
    layers = mixed_layers(
        c,
        [mixer] * c.num_hidden_layers,
        [(experts, moe)] * c.num_hidden_layers,
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=False)


def granitemoe(c: Config) -> Architecture:
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    experts = Experts(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    moe = under(
        "block_sparse_moe",
        at_8_bits(
            switch_glu("switch_mlp", c.num_local_experts, hidden, c.intermediate_size),
            "mlp.down_proj",
        ),
        router("router.layer", c.num_local_experts, hidden),
    )
    part = at_8_bits(attention_part(c, head_dim, c.attention_bias), "self_attn.o_proj")
    layers = mixed_layers(
        c,
        [(attention(c, head_dim), part)] * c.num_hidden_layers,
        [(experts, moe)] * c.num_hidden_layers,
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings, head_bits=8)


def afmoe(c: Config) -> Architecture:
    """A gate on the attention's output, a window by ``layer_types``, four norms."""
    hidden, dim, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    shared = c.moe_intermediate_size * c.num_shared_experts
    moe = under(
        "mlp",
        router("router.gate", c.num_experts, hidden),
        array("expert_bias", c.num_experts, dtype="float32"),
        switch_glu("experts", c.num_experts, hidden, c.moe_intermediate_size),
        gated_mlp("shared_experts", hidden, shared) if shared else (),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, shared)
    part = attention_part(c, dim, qk_norm="head") + linear(
        "self_attn.gate_proj", heads * dim, hidden
    )
    period = c.global_attn_every_n_layers
    layer_windows = windows(c) if "layer_types" in c else periodic_windows(c, period)
    layers = mixed_layers(
        c,
        [(attention(c, dim, window), part) for window in layer_windows],
        [
            dense_part(c) if i < c.num_dense_layers else (experts, moe)
            for i in range(len(layer_windows))
        ],
        norms(hidden, *LLAMA_NORMS, "pre_mlp_layernorm", "post_mlp_layernorm"),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def ernie4_5_moe(c: Config) -> Architecture:
    """Experts between ``moe_layer_start_index`` and ``moe_layer_end_index``."""
    hidden, dim, bias = c.hidden_size, c.head_width, c.use_bias
    width = c.moe_intermediate_size or c.intermediate_size
    shared = width * c.moe_num_shared_experts
    moe = under(
        "mlp",
        linear("gate", c.moe_num_experts, hidden),
        switch_glu("switch_mlp", c.moe_num_experts, hidden, width, bias),
        gated_mlp("shared_experts", hidden, shared, bias) if shared else (),
    )
    experts = (Experts(c.moe_num_experts, c.moe_k, width, shared), moe)
    start, end = c.moe_layer_start_index, c.moe_layer_end_index
    first = min(start) if isinstance(start, list) else start
    last = max(end) if isinstance(end, list) else end
    last = c.num_hidden_layers - 1 if last is None else last
    mixer = (attention(c, dim), attention_part(c, dim, bias))
    layers = mixed_layers(
        c,
        [mixer] * c.num_hidden_layers,
        [
            experts
            if (i + 1) % c.moe_layer_interval == 0 and first <= i <= last
            else dense_part(c, bias)
            for i in range(c.num_hidden_layers)
        ],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def bailing_attention(c: Config, head_dim: int) -> Part:
    """Queries, keys and values in one matrix."""
    heads = c.num_attention_heads
    total = (heads + 2 * c.kv_heads) * head_dim
    return under(
        "attention",
        linear("query_key_value", total, c.hidden_size, c.use_qkv_bias),
        linear("dense", c.hidden_size, heads * head_dim, c.use_bias),
        norms(head_dim, "key_layernorm", "query_layernorm") if c.use_qk_norm else (),
    )


def bailing_moe(c: Config) -> Architecture:
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    width = c.moe_shared_expert_intermediate_size or c.moe_intermediate_size
    shared = width * c.num_shared_experts if c.moe_router_enable_shared_expert else 0
    moe = under(
        "mlp",
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size, c.use_bias),
        router("gate.gate_proj", c.num_experts, hidden),
        array("gate.expert_bias", c.num_experts, dtype="float32")
        if c.moe_router_enable_expert_bias
        else (),
        gated_mlp("shared_experts", hidden, shared, c.use_bias) if shared else (),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, shared)
    mixer = (attention(c, head_dim), bailing_attention(c, head_dim))
    layers = mixed_layers(
        c,
        [mixer] * c.num_hidden_layers,
        [
            dense_part(c, c.use_bias) if i < c.first_k_dense_replace else (experts, moe)
            for i in range(c.num_hidden_layers)
        ],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings, embedding="word_embeddings")


def laguna(c: Config) -> Architecture:
    """Query heads by layer, a gate for each, a window by ``layer_types``."""
    hidden, dim, count = c.hidden_size, c.head_dim, c.num_hidden_layers
    heads = c.num_attention_heads_per_layer or [c.num_attention_heads] * count
    kinds = c.mlp_layer_types or ["dense"] + ["sparse"] * (count - 1)
    types = c.layer_types or ["full_attention"] * count
    shared = c.shared_expert_intermediate_size
    moe = under(
        "mlp",
        router("gate.proj", c.num_experts, hidden),
        array("gate.e_score_correction_bias", c.num_experts, dtype="float32"),
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size),
        gated_mlp("shared_expert", hidden, shared),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, shared)

    def mixer(n: int, window: int | None) -> tuple[Attention, Part]:
        part = qkvo("self_attn", hidden, n, c.kv_heads, dim, c.qkv_bias, c.attention_bias)
        part += under("self_attn", norms(dim, "q_norm", "k_norm"))
        if c.gating:
            part += linear("self_attn.g_proj", n, hidden)
        return Attention(n, c.kv_heads, dim, dim, window), part

    layers = mixed_layers(
        c,
        [mixer(n, window) for n, window in zip(heads, windows(c, types), strict=True)],
        [(experts, moe) if kind == "sparse" else dense_part(c) for kind in kinds],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def mimo_v2_flash(c: Config) -> Architecture:
    """Sliding layers (1 in ``hybrid_layer_pattern``) have heads of their own, some with sinks."""
    hidden = c.hidden_size
    sliding = Attention(
        c.swa_num_attention_heads,
        c.swa_num_key_value_heads,
        c.swa_head_dim,
        c.swa_v_head_dim,
        c.sliding_window_size,
        sinks=c.add_swa_attention_sink_bias,
    )
    full = Attention(
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.v_head_dim,
        sinks=c.add_full_attention_sink_bias,
    )

    def part(m: Attention) -> Part:
        heads, kv_heads = m.num_attention_heads, m.num_key_value_heads
        projections = qkvo(
            "self_attn", hidden, heads, kv_heads, m.head_dim, v_head_dim=m.v_head_dim
        )
        return projections + (array("self_attn.attention_sink_bias", heads) if m.sinks else ())

    mixers = {0: (full, part(full)), 1: (sliding, part(sliding))}
    layers = mixed_layers(
        c,
        [mixers[kind] for kind in c.hybrid_layer_pattern],
        [deepseek_experts(c, True) if sparse else dense_part(c) for sparse in c.moe_layer_freq],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=False)


def minimax_m3(c: Config) -> Architecture:
    """Block-sparse attention chosen by an indexer in some layers, experts in some."""
    hidden, dim, count = c.hidden_size, c.head_dim, c.num_local_experts
    shared, width = c.shared_intermediate_size, c.intermediate_size
    moe = under(
        "block_sparse_moe",
        router("gate", count, hidden),
        array("e_score_correction_bias", count, dtype="float32"),
        switch_glu("switch_mlp", count, hidden, width),
        gated_mlp("shared_experts", hidden, shared),
    )
    experts = (Experts(count, c.num_experts_per_tok, width, shared), moe)
    dense_size = c.dense_intermediate_size
    dense = (FeedForward(dense_size), gated_mlp("mlp", hidden, dense_size))
    part = attention_part(c, dim, qk_norm="head" if c.use_qk_norm else "")
    full = (attention(c, dim), part)
    settings = c.sparse_attention_config or {}
    index_heads = settings.get("sparse_num_index_heads", c.index_n_heads)
    index_dim = settings.get("sparse_index_dim", c.index_head_dim)

    def chosen() -> tuple[Attention, Part]:
        index = under(
            "self_attn",
            linear("index_q_proj", index_heads * index_dim, hidden),
            linear("index_k_proj", index_dim, hidden),
            norms(index_dim, "index_q_norm", "index_k_norm"),
        )
        return attention(c, dim, index_head_dim=index_dim), part + index

    layers = mixed_layers(
        c,
        [chosen() if sparse else full for sparse in minimax_m3_sparse(c, settings)],
        [experts if sparse else dense for sparse in minimax_m3_experts(c)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def minimax_m3_sparse(c: Config, settings: dict[str, Any]) -> list[bool]:
    """Whether each layer attends to chosen blocks only."""
    count = c.num_hidden_layers
    if settings.get("sparse_block_size", c.index_block_size) is None:
        return [False] * count
    if c.layer_types is not None:
        return [kind != "full_attention" for kind in c.layer_types]
    freq = settings.get("sparse_attention_freq", c.sparse_attention_freq)
    return [True] * count if freq is None else [bool(f) for f in freq]


def minimax_m3_experts(c: Config) -> list[bool]:
    """Whether each layer has experts."""
    if c.mlp_layer_types is not None:
        return [kind == "sparse" for kind in c.mlp_layer_types]
    freq = c.moe_layer_freq
    return [True] * c.num_hidden_layers if freq is None else [bool(f) for f in freq]


def dbrx(c: Config) -> Architecture:
    """Experts as modules of their own, not stacked; keys of the config nested by part."""
    hidden, heads, count = c.d_model, c.n_heads, c.ffn_config["moe_num_experts"]
    kv_heads, size = c.attn_config["kv_n_heads"], c.ffn_config["ffn_hidden_size"]
    head_dim = hidden // heads
    block = (
        under(
            "norm_attn_norm",
            norms(hidden, "norm_1", "norm_2"),
            linear("attn.Wqkv", (heads + 2 * kv_heads) * head_dim, hidden),
            linear("attn.out_proj", hidden, hidden),
        )
        + linear("ffn.router.layer", count, hidden)
        + tuple(
            p
            for i in range(count)
            for p in under(
                f"ffn.experts.{i}",
                linear("v1", size, hidden),
                linear("w1", size, hidden),
                linear("w2", hidden, size),
            )
        )
    )
    experts = Experts(count, c.ffn_config["moe_top_k"], size)
    mixer = Attention(heads, kv_heads, head_dim, head_dim)
    layers = [
        layer(f"transformer.blocks.{i}", [mixer], [experts], block) for i in range(c.n_layers)
    ]
    return decoder(
        c.named(hidden_size=hidden),
        layers,
        tied=False,
        prefix="transformer",
        embedding="wte",
        norm="norm_f",
    )


MODULES: Modules = {
    "olmoe": (
        olmoe,
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "dots1": (dots1, {"head_dim": None, "mlp_bias": False, "tie_word_embeddings": False}),
    "deepseek": (
        deepseek,
        {
            key: value
            for key, value in (DEEPSEEK_DEFAULTS | {"num_experts_per_tok": None}).items()
            if "lora" not in key and "qk_" not in key and key != "v_head_dim"
        },
    ),
    "qwen2_moe": (qwen2_moe, {"num_key_value_heads": None}),
    "granitemoe": (granitemoe, {"tie_word_embeddings": True}),
    "solar_open": (
        glm4_moe,
        {"attention_bias": False, "use_qk_norm": False, "moe_layer_freq": 1},
    ),
    "afmoe": (
        afmoe,
        {
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "num_dense_layers": 2,
            "sliding_window": 2048,
            "layer_types": None,
            "global_attn_every_n_layers": 4,
        },
    ),
    "ernie4_5_moe": (
        ernie4_5_moe,
        {
            "moe_layer_start_index": 0,
            "moe_intermediate_size": 0,
            "moe_k": 1,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 0,
            "moe_layer_end_index": None,
            "head_dim": None,
        },
    ),
    "bailing_moe": (
        bailing_moe,
        {
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": False,
            "tie_word_embeddings": False,
            "moe_router_enable_expert_bias": False,
            "moe_shared_expert_intermediate_size": None,
            "moe_router_enable_shared_expert": True,
        },
    ),
    "laguna": (
        laguna,
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "attention_bias": False,
            "qkv_bias": False,
            "gating": True,
            "tie_word_embeddings": False,
            "sliding_window": 512,
            "layer_types": None,
            "num_attention_heads_per_layer": None,
            "mlp_layer_types": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "mimo_v2_flash": (mimo_v2_flash, {}),
    "dbrx": (dbrx, {}),
    "minimax_m3_vl": (
        minimax_m3,
        {
            "hidden_size": 6144,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 1048576,
            "head_dim": 128,
            "vocab_size": 200064,
            "tie_word_embeddings": False,
            "use_qk_norm": True,
            "mlp_layer_types": None,
            "moe_layer_freq": None,
            "layer_types": None,
            "sparse_attention_config": None,
            "sparse_attention_freq": None,
            "index_n_heads": None,
            "index_head_dim": None,
            "index_block_size": None,
        },
    ),
}
