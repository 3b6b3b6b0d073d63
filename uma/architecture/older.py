"""Decoders before Llama that mlx-lm 0.32.2 lacks: OPT, BLOOM, MPT.

Shapes: the modeling file of each in transformers 5.24.0.
"""

from uma.architecture.config import Config, Modules
from uma.architecture.dense_variants import layer_norms
from uma.architecture.gpt import equal_heads
from uma.architecture.layers import Architecture, FeedForward, Parameter
from uma.architecture.parts import Part, decoder, layer, layer_norm, linear
from uma.errors import UnsupportedModel

OPT_OFFSET = 2  # modeling_opt.py, OPTLearnedPositionalEmbedding: positions begin at 2


def opt(c: Config) -> Architecture:
    """Learned positions, biases everywhere, a tied head.

    Raises:
        UnsupportedModel: For the 350M model, whose embeddings are narrower than its layers.
    """
    hidden, width = c.hidden_size, c.ffn_dim
    if (c.get("word_embed_proj_dim") or hidden) != hidden:
        raise UnsupportedModel("opt with embeddings narrower than its layers is not laid out")
    part: Part = ()
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        part += linear(f"self_attn.{name}", hidden, hidden, c.enable_bias)
    part += linear("fc1", width, hidden, c.enable_bias) + linear(
        "fc2", hidden, width, c.enable_bias
    )
    part += layer_norms(hidden, "self_attn_layer_norm", "final_layer_norm")
    mixer, dense = equal_heads(hidden, c.num_attention_heads), FeedForward(width, gated=False)
    layers = [
        layer(f"model.layers.{i}", [mixer], [dense], part) for i in range(c.num_hidden_layers)
    ]
    positions = (c.max_position_embeddings + OPT_OFFSET, hidden)
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        norm=layer_norm("final_layer_norm", hidden),
        extra=(Parameter("model.embed_positions", positions, "embedding"),),
    )


def bloom(c: Config) -> Architecture:
    """Linear biases in the place of positions, a norm after the embeddings, a tied head."""
    hidden, heads, count = c.hidden_size, c.get("n_head"), c.get("n_layer")
    part = (
        linear("self_attention.query_key_value", 3 * hidden, hidden, True)
        + linear("self_attention.dense", hidden, hidden, True)
        + linear("mlp.dense_h_to_4h", 4 * hidden, hidden, True)
        + linear("mlp.dense_4h_to_h", hidden, 4 * hidden, True)
        + layer_norms(hidden, "input_layernorm", "post_attention_layernorm")
    )
    mixer = equal_heads(hidden, heads or c.num_attention_heads)
    dense = FeedForward(4 * hidden, gated=False)
    layers = [
        layer(f"transformer.h.{i}", [mixer], [dense], part)
        for i in range(count or c.num_hidden_layers)
    ]
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        prefix="transformer",
        embedding="word_embeddings",
        norm=layer_norms(hidden, "word_embeddings_layernorm", "ln_f"),
    )


def mpt(c: Config) -> Architecture:
    """Linear biases in the place of positions, no other biases, a tied head."""
    hidden, width = c.d_model, c.expansion_ratio * c.d_model
    part = (
        linear("attn.Wqkv", 3 * hidden, hidden)
        + linear("attn.out_proj", hidden, hidden)
        + linear("ffn.up_proj", width, hidden)
        + linear("ffn.down_proj", hidden, width)
        + layer_norms(hidden, "norm_1", "norm_2", bias=False)
    )
    mixer, dense = equal_heads(hidden, c.n_heads), FeedForward(width, gated=False)
    layers = [layer(f"transformer.blocks.{i}", [mixer], [dense], part) for i in range(c.n_layers)]
    return decoder(
        c.named(hidden_size=hidden, max_position_embeddings=c.max_seq_len),
        layers,
        tied=True,
        prefix="transformer",
        embedding="wte",
        norm=layer_norm("norm_f", hidden, bias=False),
    )


MODULES: Modules = {
    "bloom": (bloom, {"tie_word_embeddings": True}),
    "mpt": (mpt, {"expansion_ratio": 4}),
    "opt": (opt, {"enable_bias": True, "tie_word_embeddings": True}),
}
