"""Muse: Glimmer (dense) and Spark (experts in a narrower space, with a vision tower)."""

from dataclasses import replace

from uma.architecture.config import Config, Modules
from uma.architecture.dense import SANDWICH_NORMS, attention, attention_part, mlp_part
from uma.architecture.layers import Architecture, Experts, FeedForward, Layer, Parameter
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    in_float32,
    layer,
    linear,
    norms,
    switch_glu,
    under,
    unquantized,
)


def muse_glimmer(c: Config) -> Architecture:
    """A gate on the attention's output; three sliding layers, then a full one."""
    hidden, dim, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    part = (
        attention_part(c, dim)
        + linear("self_attn.gate_proj", heads * dim, hidden)
        + mlp_part(c)
        + norms(hidden, *SANDWICH_NORMS)
    )
    pattern = ["sliding_attention"] * 3 + ["full_attention"]
    kinds = c.layer_types or [pattern[i % 4] for i in range(c.num_hidden_layers)]
    layers = []
    for i, kind in enumerate(kinds):
        mixer = attention(c, dim, c.sliding_window if kind == "sliding_attention" else None)
        layers.append(layer(f"model.layers.{i}", [mixer], [FeedForward(c.intermediate_size)], part))
    return decoder(c, layers, tied=c.tie_word_embeddings)


def spark_layer(c: Config, index: int, window: int | None) -> Layer:
    """Only the experts of the layers between the first and the last have a quantized form."""
    hidden, dim, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    count, narrow, width = c.num_local_experts, c.moe_hidden_size, c.moe_intermediate_size
    experts = switch_glu("mlp.experts", count, narrow, width)
    gates = in_float32(
        norms(hidden, "add_attn_alpha", "add_attn_beta", "add_ffn_alpha", "add_ffn_beta")
    )
    part = unquantized(
        linear("self_attn.qkvg_proj", 2 * (heads + c.kv_heads) * dim, hidden)
        + linear("self_attn.o_proj", hidden, heads * dim)
        + array("mlp.gate", count, hidden)
        + array("mlp.gate.e_score_correction_bias", count)
        + linear("mlp.pre_expert_proj", narrow, hidden)
        + norms(narrow, "mlp.pre_expert_norm", "mlp.experts.post_expert_norm")
        + linear("mlp.post_expert_proj", hidden, narrow)
        + norms(
            hidden,
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    )
    outer = index in (0, c.num_hidden_layers - 1)
    return layer(
        f"model.language_model.layers.{index}",
        [attention(c, dim, window)],
        [Experts(count, c.num_experts_per_tok, width)],
        part,
        gates,
        unquantized(experts) if outer else experts,
    )


def spark_vision(c: Config, vision: Config) -> Part:
    """The vision tower, its adapter and its projection, which mlx-lm loads."""
    width, size, merged = (
        vision.hidden_size,
        vision.intermediate_size,
        vision.merge_size**2 * vision.hidden_size,
    )
    patch = vision.num_channels * vision.patch_size**2 * vision.patch_temporal

    def norm(name: str) -> Part:
        return array(name, width) + array(f"{name}.bias", width)

    block = (
        norm("norm1")
        + norm("norm2")
        + linear("attn.qkv_proj", 3 * width, width, bias=True)
        + linear("attn.proj", width, width, bias=True)
        + linear("mlp.fc1", size, width, bias=True)
        + linear("mlp.fc2", width, size, bias=True)
    )
    table = (vision.pos_emb_height**2, width)
    out = c.around("out_hidden_size") or merged
    projector = c.around("projector_hidden_size") or out
    return (
        under(
            "vision_tower",
            linear("patch_embedder.patch_embedding", width, patch),
            (Parameter("patch_embedder.position_embedding_table", table, "embedding"),),
            norm("ln_pre"),
            norm("ln_post"),
            *(under(f"layers.{i}", block) for i in range(vision.num_hidden_layers)),
        )
        + linear("vision_adapter.fc1", projector, out)
        + linear("vision_adapter.fc2", projector, projector)
        + linear("vision_projection", c.hidden_size, projector)
    )


VISION_DEFAULTS = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 50,
    "num_channels": 3,
    "patch_size": 14,
    "patch_temporal": 2,
    "merge_size": 2,
    "pos_emb_height": 32,
}


def muse_spark(c: Config) -> Architecture:
    """Three layers in four slide; the tower is part of the model if the config has one."""
    layers = [
        spark_layer(c, i, c.sliding_window if kind == "sliding_attention" else None)
        for i, kind in enumerate(c.layer_types)
    ]
    vision = c.around("vision_config")
    tower = spark_vision(c, Config(vision, VISION_DEFAULTS)) if vision else ()
    architecture = decoder(
        c, layers, tied=False, prefix="model.language_model", extra=under("model", tower)
    )
    return replace(architecture, parameters=unquantized(architecture.parameters))


MODULES: Modules = {
    "muse_glimmer": (
        muse_glimmer,
        {
            "hidden_size": 6656,
            "num_hidden_layers": 52,
            "intermediate_size": 19968,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 202048,
            "sliding_window": 2048,
            "max_position_embeddings": 131072,
            "layer_types": None,
            "tie_word_embeddings": False,
        },
    ),
    "muse_spark": (muse_spark, {}),
}
