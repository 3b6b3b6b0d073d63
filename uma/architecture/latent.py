"""Multi-head latent attention: DeepSeek V2 and V3 and those built on them."""

from dataclasses import replace

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, mlp_part
from uma.architecture.layers import (
    Architecture,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
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
    stacked,
    switch_glu,
    under,
)


def latent_attention(c: Config) -> LatentAttention:
    return LatentAttention(
        c.num_attention_heads,
        c.kv_lora_rank,
        c.qk_rope_head_dim,
        c.qk_nope_head_dim,
        c.v_head_dim,
    )


def sparse_attention(c: Config) -> LatentAttention:
    """Latent attention to the tokens that an indexer chooses."""
    return replace(
        latent_attention(c),
        index_head_dim=c.index_head_dim,
        index_n_heads=c.index_n_heads,
        index_topk=c.index_topk,
    )


def indexer_part(c: Config) -> Part:
    width, hidden = c.index_head_dim, c.hidden_size
    return under(
        "self_attn.indexer",
        linear("wq_b", c.index_n_heads * width, c.q_lora_rank),
        linear("wk", width, hidden),
        layer_norm("k_norm", width),
        linear("weights_proj", c.index_n_heads, hidden),
    )


def latent_queries(c: Config, bias: bool) -> Part:
    """Queries straight from the hidden state, or through ``q_lora_rank``."""
    width = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    rank = c.get("q_lora_rank")
    if rank is None:
        return linear("q_proj", width, c.hidden_size)
    return (
        linear("q_a_proj", rank, c.hidden_size, bias)
        + array("q_a_layernorm", rank)
        + linear("q_b_proj", width, rank)
    )


def latent_part(c: Config, absorbed: bool, name: str = "self_attn") -> Part:
    """``self_attn``: keys and values up from the latent by one matrix, or ``absorbed`` into two.

    mlx-lm's DeepSeek V3 splits ``kv_b_proj`` into ``embed_q`` and ``unembed_out``.
    """
    heads, rank, bias = c.num_attention_heads, c.kv_lora_rank, c.attention_bias
    if absorbed:
        expand = stacked("embed_q", heads, rank, c.qk_nope_head_dim) + stacked(
            "unembed_out", heads, c.v_head_dim, rank
        )
    else:
        expand = linear("kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), rank)
    return under(
        name,
        latent_queries(c, bias),
        linear("kv_a_proj_with_mqa", rank + c.qk_rope_head_dim, c.hidden_size, bias),
        array("kv_a_layernorm", rank),
        expand,
        linear("o_proj", c.hidden_size, heads * c.v_head_dim, bias),
    )


def deepseek_experts(c: Config, bias_correction: bool) -> tuple[Experts, Part]:
    """Routed and shared experts; the gate is an array that is never quantized."""
    hidden, count, width = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    shared = width * (c.get("n_shared_experts") or 0)
    part = switch_glu("switch_mlp", count, hidden, width) + array("gate", count, hidden)
    if bias_correction:
        part += array("gate.e_score_correction_bias", count, dtype="float32")
    if shared:
        part += gated_mlp("shared_experts", hidden, shared)
    return Experts(count, c.num_experts_per_tok, width, shared), under("mlp", part)


def deepseek_layers(c: Config, mixer: Mixer, attention: Part, bias_correction: bool) -> list[Layer]:
    """Dense feed-forward parts in the first layers, experts in the others."""
    common = attention + norms(c.hidden_size, *LLAMA_NORMS)

    def sparse(i: int) -> bool:
        return (
            c.get("n_routed_experts") is not None
            and i >= c.first_k_dense_replace
            and i % c.moe_layer_freq == 0
        )

    def block(i: int) -> Layer:
        prefix = f"model.layers.{i}"
        if not sparse(i):
            dense = FeedForward(c.intermediate_size)
            return layer(prefix, [mixer], [dense], common, mlp_part(c))
        experts, part = deepseek_experts(c, bias_correction)
        return layer(prefix, [mixer], [experts], common, part)

    return [block(i) for i in range(c.num_hidden_layers)]


def deepseek_v2(c: Config) -> Architecture:
    layers = deepseek_layers(c, latent_attention(c), latent_part(c, False), False)
    return decoder(c, layers, tied=False)


def deepseek_v3(c: Config) -> Architecture:
    layers = deepseek_layers(c, latent_attention(c), latent_part(c, True), True)
    return decoder(c, layers, tied=False)


def deepseek_v32(c: Config) -> Architecture:
    """DeepSeek V3.2 and GLM 5: an indexer with a cached key beside each attention."""
    part = latent_part(c, True) + indexer_part(c)
    return decoder(c, deepseek_layers(c, sparse_attention(c), part, True), tied=False)


def mistral4(c: Config) -> Architecture:
    """DeepSeek's layers with a gate that is a matrix."""
    hidden, count, width = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    shared = width * c.n_shared_experts
    moe = under(
        "mlp",
        switch_glu("switch_mlp", count, hidden, width),
        linear("gate", count, hidden),
        gated_mlp("shared_experts", hidden, shared),
    )
    experts = Experts(count, c.num_experts_per_tok, width, shared)
    common = latent_part(c, True) + norms(hidden, *LLAMA_NORMS)
    dense = (FeedForward(c.intermediate_size), mlp_part(c))
    layers = []
    for i in range(c.num_hidden_layers):
        feed_forward, part = dense if i < c.first_k_dense_replace else (experts, moe)
        layers.append(
            layer(f"model.layers.{i}", [latent_attention(c)], [feed_forward], common, part)
        )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def dense_latent(c: Config) -> Architecture:
    """Latent attention over dense feed-forward parts, keys and values expanded."""
    mlp = mlp_part(c, c.mlp_bias)
    part = latent_part(c, False) + mlp + norms(c.hidden_size, *LLAMA_NORMS)
    dense = FeedForward(c.intermediate_size)
    layers = [
        layer(f"model.layers.{i}", [latent_attention(c)], [dense], part)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def minicpm3(c: Config) -> Architecture:
    """Values as wide as ``hidden_size`` split over the heads."""
    width = c.hidden_size // c.num_attention_heads
    return dense_latent(c.named(v_head_dim=width, mlp_bias=False))


DEEPSEEK_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "num_experts_per_tok": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
}

MODULES: Modules = {
    "deepseek_v2": (deepseek_v2, DEEPSEEK_DEFAULTS | {"num_experts_per_tok": None}),
    "deepseek_v3": (deepseek_v3, DEEPSEEK_DEFAULTS),
    "deepseek_v32": (
        deepseek_v32,
        DEEPSEEK_DEFAULTS | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    ),
    "glm_moe_dsa": (deepseek_v32, {}),
    "glm4_moe_lite": (
        deepseek_v3,
        {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "num_experts_per_tok": 4,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 202752,
            "attention_bias": False,
        },
    ),
    "minicpm3": (minicpm3, {"attention_bias": False, "tie_word_embeddings": False}),
    "youtu_llm": (
        dense_latent,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mistral4": (mistral4, {"attention_bias": False, "tie_word_embeddings": False}),
}
