"""Mixtures of experts whose layers differ: heads, windows, sinks or indexers of their own."""

from typing import Any

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, attention_part, windows
from uma.architecture.experts_variants import dense_part, mixed_layers
from uma.architecture.latent import deepseek_experts
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward
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


def nested(c: Config, group: str, key: str) -> Any:
    """A key of a group, or beside it where a config is flat."""
    return c.get(key) if key in c else getattr(c, group)[key]


def dbrx(c: Config) -> Architecture:
    """Experts as modules of their own, not stacked; keys of the config nested by part."""
    hidden, heads, count = c.d_model, c.n_heads, nested(c, "ffn_config", "moe_num_experts")
    kv_heads, size = (
        nested(c, "attn_config", "kv_n_heads"),
        nested(c, "ffn_config", "ffn_hidden_size"),
    )
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
    experts = Experts(count, nested(c, "ffn_config", "moe_top_k"), size)
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


def exaone_moe(c: Config) -> Architecture:
    """EXAONE's windows by ``layer_types``, DeepSeek's experts by ``is_moe_layer``."""
    dim = c.head_dim
    part = attention_part(c, dim, qk_norm="head")
    experts = deepseek_experts(
        c.named(n_routed_experts=c.num_experts, n_shared_experts=c.num_shared_experts), True
    )
    layers = mixed_layers(
        [(attention(c, dim, window), part) for window in windows(c, c.layer_types)],
        [experts if sparse else dense_part(c) for sparse in c.is_moe_layer],
        norms(c.hidden_size, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def mellum(c: Config) -> Architecture:
    """Qwen3's experts in every layer, a window by ``layer_types``."""
    hidden, dim = c.hidden_size, c.head_dim
    moe = under(
        "mlp",
        router("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    part = attention_part(c, dim, qk_norm="head")
    layer_windows = windows(c, c.layer_types)
    layers = mixed_layers(
        [(attention(c, dim, window), part) for window in layer_windows],
        [(experts, moe)] * len(layer_windows),
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


MINIMAX_M3_DEFAULTS = {
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
}

MODULES: Modules = {
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
        MINIMAX_M3_DEFAULTS,
    ),
    "exaone_moe": (exaone_moe, {"tie_word_embeddings": False}),
    "mellum": (mellum, {}),
}
