"""More mixtures of experts: other routers, shared experts, and attention that varies by layer."""

from collections.abc import Sequence

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
from uma.architecture.latent import DEEPSEEK_DEFAULTS, deepseek_layers
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward, Layer
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

FeedForwardPart = tuple[FeedForward | Experts, Part]


def mixed_layers(
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
        {
            "attention_bias": False,
            "use_qk_norm": False,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 0,
        },
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
}
