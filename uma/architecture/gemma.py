"""Gemma 1 to 4: a tied head, norms before and after each part."""

from collections.abc import Sequence

from uma.architecture.config import Config, Modules
from uma.architecture.dense import (
    LLAMA_NORMS,
    SANDWICH_NORMS,
    attention,
    attention_part,
    dense_layers,
    mlp_part,
    periodic_windows,
    windows,
)
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward, Parameter
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


def gemma(c: Config) -> Architecture:
    part = attention_part(c, c.head_dim)
    layers = dense_layers(c, part, mlp_part(c), norms(c.hidden_size, *LLAMA_NORMS), c.head_dim)
    return decoder(c, layers, tied=True)


def gemma2(c: Config) -> Architecture:
    """Every other layer slides, the first one too (transformers, ``Gemma2Config``)."""
    part = attention_part(c, c.head_dim)
    layer_windows = periodic_windows(c, 2)
    layer_norms = norms(c.hidden_size, *SANDWICH_NORMS)
    layers = dense_layers(c, part, mlp_part(c), layer_norms, c.head_dim, layer_windows)
    return decoder(c, layers, tied=True)


def gemma3_text(c: Config) -> Architecture:
    """The head is tied unless the checkpoint brings one."""
    part = attention_part(c, c.head_dim, qk_norm="head")
    layer_windows = periodic_windows(c, c.sliding_window_pattern)
    layer_norms = norms(c.hidden_size, *SANDWICH_NORMS)
    layers = dense_layers(c, part, mlp_part(c), layer_norms, c.head_dim, layer_windows)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def shared_sources(layer_types: Sequence[str], own: int) -> list[int | None]:
    """For each layer, whose cache it reads: the last one of its kind among the first ``own``."""
    last = {kind: i for i, kind in enumerate(layer_types[:own])}
    return [None if i < own else last[kind] for i, kind in enumerate(layer_types)]


def per_layer_input(c: Config) -> Part:
    """The part of a layer that mixes in its own embedding of the token."""
    hidden, width = c.hidden_size, c.hidden_size_per_layer_input
    return (
        linear("per_layer_input_gate", width, hidden)
        + linear("per_layer_projection", hidden, width)
        + array("post_per_layer_input_norm", hidden)
    )


def per_layer_embeddings(c: Config) -> Part:
    """The embeddings of all layers in one matrix, and their projection from the hidden state."""
    width = c.hidden_size_per_layer_input
    total = c.num_hidden_layers * width
    embedding = Parameter(
        "embed_tokens_per_layer", (c.vocab_size_per_layer_input, total), "embedding"
    )
    return (
        embedding,
        *linear("per_layer_model_projection", total, c.hidden_size),
        *array("per_layer_projection_norm", width),
    )


GEMMA3N_PERIOD = 5  # transformers 5.24.0, configuration_gemma3n.py, layer_types


def gemma3n(c: Config) -> Architecture:
    """Alternating updates, low-rank residuals, and caches shared by the last layers."""
    hidden, prefix = c.hidden_size, "model.language_model"
    inputs, rank = c.altup_num_inputs, c.laurel_rank
    types = c.get("layer_types") or [
        "sliding_attention" if (i + 1) % GEMMA3N_PERIOD else "full_attention"
        for i in range(c.num_hidden_layers)
    ]
    sources = shared_sources(types, c.num_hidden_layers - c.num_kv_shared_layers)
    common = (
        attention_part(c, c.head_dim, qk_norm="head")
        + norms(hidden, *SANDWICH_NORMS)
        + per_layer_input(c)
        + under(
            "altup",
            array("correct_output_scale", hidden),
            linear("correction_coefs", inputs, inputs),
            linear("prediction_coefs", inputs**2, inputs),
            linear("modality_router", inputs, hidden),
            array("router_norm", hidden),
        )
        + under(
            "laurel",
            linear("linear_left", rank, hidden),
            linear("linear_right", hidden, rank),
            array("post_laurel_norm", hidden),
        )
    )
    layers = []
    for i, window in enumerate(windows(c, types)):
        sizes = c.intermediate_size
        size = sizes[i] if isinstance(sizes, list) else sizes
        mixer = attention(c, c.head_dim, window, kv_source=sources[i])
        mlp = gated_mlp("mlp", hidden, size)
        layers.append(layer(f"{prefix}.layers.{i}", [mixer], [FeedForward(size)], common, mlp))
    extra = per_layer_embeddings(c) + tuple(
        p
        for name in ("altup_projections", "altup_unembed_projections")
        for i in range(inputs - 1)
        for p in linear(f"{name}.{i}", hidden, hidden)
    )
    return decoder(c, layers, tied=True, prefix=prefix, extra=under(prefix, extra))


def gemma4_attention(c: Config, window: int | None, source: int | None) -> tuple[Attention, Part]:
    """Full layers have heads of their own width and may use keys as values."""
    full = window is None
    head_dim = c.global_head_dim if full and c.global_head_dim else c.head_dim
    same = c.attention_k_eq_v and full
    kv_heads = (c.num_global_key_value_heads if same else None) or c.num_key_value_heads
    heads, hidden = c.num_attention_heads, c.hidden_size
    part = linear("q_proj", heads * head_dim, hidden)
    if source is None:
        part += linear("k_proj", kv_heads * head_dim, hidden) + array("k_norm", head_dim)
        part += () if same else linear("v_proj", kv_heads * head_dim, hidden)
    part += linear("o_proj", hidden, heads * head_dim) + array("q_norm", head_dim)
    mixer = Attention(heads, kv_heads, head_dim, head_dim, window, kv_source=source)
    return mixer, under("self_attn", part)


def gemma4_experts(c: Config) -> tuple[Experts, Part]:
    """Experts beside the dense feed-forward part."""
    hidden = c.hidden_size
    more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    part = (
        router("router.proj", c.num_experts, hidden)
        + array("router.scale", hidden)
        + array("router.per_expert_scale", c.num_experts)
        + switch_glu("experts.switch_glu", c.num_experts, hidden, c.moe_intermediate_size)
        + norms(hidden, *more, "pre_feedforward_layernorm_2")
    )
    return Experts(c.num_experts, c.top_k_experts, c.moe_intermediate_size), part


def gemma4_text(c: Config) -> Architecture:
    count, own = c.num_hidden_layers, c.num_hidden_layers - c.num_kv_shared_layers
    period = c.sliding_window_pattern
    types = c.layer_types or [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)
    ]
    sources = shared_sources(types, own)
    common = norms(c.hidden_size, *SANDWICH_NORMS) + array("layer_scalar", 1)
    if c.hidden_size_per_layer_input:
        common += per_layer_input(c)
    layers = []
    for i, window in enumerate(windows(c, types)):
        mixer, part = gemma4_attention(c, window, sources[i])
        wide = 2 if c.use_double_wide_mlp and i >= own > 0 else 1
        size = c.intermediate_size * wide
        feed_forward: list[FeedForward | Experts] = [FeedForward(size)]
        part += gated_mlp("mlp", c.hidden_size, size)
        if c.enable_moe_block:
            experts, expert_part = gemma4_experts(c)
            feed_forward.append(experts)
            part += expert_part
        layers.append(layer(f"model.layers.{i}", [mixer], feed_forward, part, common))
    extra = under("model", per_layer_embeddings(c)) if c.hidden_size_per_layer_input else ()
    return decoder(c, layers, tied=c.tie_word_embeddings, extra=extra)


MODULES: Modules = {
    "gemma": (gemma, {}),
    "gemma2": (gemma2, {"sliding_window": 4096}),
    "gemma3_text": (
        gemma3_text,
        {
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "head_dim": 256,
            "vocab_size": 262144,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3n": (gemma3n, {}),
    "gemma4_text": (
        gemma4_text,
        {
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "head_dim": 256,
            "global_head_dim": 512,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": None,
            "num_kv_shared_layers": 20,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "max_position_embeddings": 131072,
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "layer_types": None,
            "tie_word_embeddings": True,
        },
    ),
}
