"""Mixtures of experts over softmax attention."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, attention_part, mlp_part, windows
from uma.architecture.latent import deepseek_layers
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward
from uma.architecture.parts import (
    array,
    decoder,
    gated_mlp,
    layer,
    layer_norm,
    linear,
    norms,
    qkvo,
    router,
    switch_glu,
    under,
)


def mixtral(c: Config) -> Architecture:
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    experts = Experts(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    moe = under(
        "block_sparse_moe",
        linear("gate", c.num_local_experts, hidden),
        switch_glu("switch_mlp", c.num_local_experts, hidden, c.intermediate_size),
    )
    parts = attention_part(c, head_dim) + moe + norms(hidden, *LLAMA_NORMS)
    layers = [
        layer(f"model.layers.{i}", [attention(c, head_dim)], [experts], parts)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def is_sparse(c: Config, i: int) -> bool:
    """Whether layer ``i`` of a Qwen model has experts."""
    return i not in c.mlp_only_layers and c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0


def qwen3_moe(c: Config) -> Architecture:
    hidden, head_dim = c.hidden_size, c.head_dim
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    moe = under(
        "mlp",
        router("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size),
    )
    shared = attention_part(c, head_dim, qk_norm="head") + norms(hidden, *LLAMA_NORMS)
    layers = [
        layer(f"model.layers.{i}", [attention(c, head_dim)], [experts], shared, moe)
        if is_sparse(c, i)
        else layer(
            f"model.layers.{i}",
            [attention(c, head_dim)],
            [FeedForward(c.intermediate_size)],
            shared,
            mlp_part(c),
        )
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def gpt_oss(c: Config) -> Architecture:
    """Biases everywhere, attention sinks, a window in every other layer."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    types = c.layer_types or ["sliding_attention", "full_attention"] * (c.num_hidden_layers // 2)
    experts = Experts(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    parts = (
        qkvo("self_attn", hidden, heads, c.kv_heads, c.head_dim, bias=True)
        + array("self_attn.sinks", heads)
        + under(
            "mlp",
            switch_glu("experts", c.num_local_experts, hidden, c.intermediate_size, bias=True),
            router("router", c.num_local_experts, hidden, bias=True),
        )
        + norms(hidden, *LLAMA_NORMS)
    )
    layers = [
        layer(
            f"model.layers.{i}",
            [attention(c, c.head_dim, window, sinks=True)],
            [experts],
            parts,
        )
        for i, window in enumerate(windows(c, types))
    ]
    return decoder(c, layers, tied=False)


def llama4(c: Config) -> Architecture:
    """Three layers in four look within chunks; experts in every ``interleave_moe_layer_step``."""
    hidden = c.hidden_size
    experts = Experts(
        c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, c.intermediate_size
    )
    moe = under(
        "feed_forward",
        switch_glu("experts", c.num_local_experts, hidden, c.intermediate_size),
        linear("router", c.num_local_experts, hidden),
        gated_mlp("shared_expert", hidden, c.intermediate_size),
    )
    mlp = gated_mlp("feed_forward", hidden, c.intermediate_size_mlp)
    step = c.interleave_moe_layer_step
    common = attention_part(c, c.head_width, c.attention_bias) + norms(hidden, *LLAMA_NORMS)

    def mixer(i: int) -> Attention:
        chunk = c.attention_chunk_size if (i + 1) % 4 else None
        return attention(c, c.head_width, attention_chunk_size=chunk)

    layers = [
        layer(f"model.layers.{i}", [mixer(i)], [experts], common, moe)
        if i % step == step - 1
        else layer(
            f"model.layers.{i}", [mixer(i)], [FeedForward(c.intermediate_size_mlp)], common, mlp
        )
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=False)


def phimoe(c: Config) -> Architecture:
    """Mixtral's experts, biases in the attention and the head, norms with biases."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    experts = Experts(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    moe = under(
        "block_sparse_moe",
        linear("gate", c.num_local_experts, hidden),
        switch_glu("switch_mlp", c.num_local_experts, hidden, c.intermediate_size),
    )
    layer_norms = tuple(p for name in LLAMA_NORMS for p in layer_norm(name, hidden))
    parts = attention_part(c, head_dim, bias=True) + moe + layer_norms
    layers = [
        layer(f"model.layers.{i}", [attention(c, head_dim)], [experts], parts)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=False, norm=layer_norm("norm", hidden), head_bias=True)


def minimax(c: Config) -> Architecture:
    hidden, count = c.hidden_size, c.num_local_experts
    experts = Experts(count, c.num_experts_per_tok, c.intermediate_size)
    moe = under(
        "block_sparse_moe",
        router("gate", count, hidden),
        switch_glu("switch_mlp", count, hidden, c.intermediate_size),
        array("e_score_correction_bias", count, dtype="float32"),
    )
    part = attention_part(c, c.head_width, qk_norm="full" if c.use_qk_norm else "")
    parts = part + moe + norms(hidden, *LLAMA_NORMS)
    layers = [
        layer(f"model.layers.{i}", [attention(c, c.head_width)], [experts], parts)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def glm4_moe(c: Config) -> Architecture:
    """DeepSeek's experts under grouped-query attention."""
    qk_norm = "head" if c.use_qk_norm else ""
    part = attention_part(c, c.head_dim, c.attention_bias, o_bias=False, qk_norm=qk_norm)
    layers = deepseek_layers(c, attention(c, c.head_dim), part, bias_correction=True)
    return decoder(c, layers, tied=False)


MODULES: Modules = {
    "mixtral": (
        mixtral,
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_moe": (qwen3_moe, {}),
    "phimoe": (
        phimoe,
        {
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "minimax": (minimax, {"head_dim": None, "use_qk_norm": True, "tie_word_embeddings": False}),
    "glm4_moe": (glm4_moe, {"moe_layer_freq": 1}),
    "gpt_oss": (
        gpt_oss,
        {
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "layer_types": None,
        },
    ),
    "llama4": (llama4, {}),
}
