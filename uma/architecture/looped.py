"""Layers that run or cache more than once: loops, reused keys, two attentions in a layer."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, attention_part, mlp_part
from uma.architecture.latent import latent_attention, latent_part
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward, Layer, Parameter
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
from uma.errors import UnsupportedModel


def nanbeige(c: Config) -> Architecture:
    """Llama whose stack runs several times, with a cache for each time."""
    split = ("enable_double_loop_split", "loop_share_kv", "enable_depth_attention")
    if any(c.get(key) for key in split):
        raise UnsupportedModel(f"nanbeige with {', '.join(split)} is not supported")
    weights = c.get("loop_loss_weights")
    loops = len(weights) + 1 if weights else c.num_loops
    part = (
        attention_part(c, c.head_width, c.attention_bias)
        + mlp_part(c, c.mlp_bias)
        + norms(c.hidden_size, *LLAMA_NORMS)
    )
    mixers = [attention(c, c.head_width)] * loops
    feed_forward = [FeedForward(c.intermediate_size)] * loops
    layers = [
        layer(f"model.layers.{i}", mixers, feed_forward, part) for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def iquestloopcoder(c: Config) -> Architecture:
    """A second time through the stack attends within a window, with a cache of its own."""
    dim, heads = c.head_dim, c.num_attention_heads
    part = (
        attention_part(c, dim, c.attention_bias)
        + mlp_part(c, c.mlp_bias)
        + norms(c.hidden_size, *LLAMA_NORMS)
    )
    mixers = [attention(c, dim), attention(c, dim, c.loop_window_size)]
    feed_forward = [FeedForward(c.intermediate_size)] * 2
    layers = [
        layer(f"model.layers.{i}", mixers, feed_forward, part) for i in range(c.num_hidden_layers)
    ]
    gates = tuple(
        p
        for i in range(c.num_hidden_layers)
        for p in array(f"model.gate_projections.{i}", heads, dim)
        + array(f"model.gate_projections.{i}.bias", heads)
    )
    return decoder(c, layers, tied=c.tie_word_embeddings, extra=gates)


def afm7(c: Config) -> Architecture:
    """The last layers read the cache of the last layer that has one (Apple's on-device model)."""
    hidden, heads, kv_heads = c.hidden_dim, c.num_heads, c.num_kv_heads
    dim, size = hidden // heads, int(hidden * c.hidden_dim_scale_factor)
    own = c.num_layers - c.num_kv_reuse_layers
    common = gated_mlp("mlp", hidden, size) + norms(hidden, *LLAMA_NORMS)
    first = under(
        "self_attn",
        linear("qkv_proj", (heads + 2 * kv_heads) * dim, hidden),
        linear("out_proj", hidden, hidden),
        norms(dim, "q_norm", "k_norm"),
        (Parameter("quant_key_scale", (), "other"), Parameter("quant_value_scale", (), "other")),
    )
    later = under(
        "self_attn",
        linear("q_proj", hidden, hidden),
        linear("out_proj", hidden, hidden),
        array("q_norm", dim),
    )

    def block(i: int) -> Layer:
        reads = i >= own
        name = f"model.kv_reuse_layers.{i - own}" if reads else f"model.layers.{i}"
        mixer = Attention(heads, kv_heads, dim, dim, kv_source=own - 1 if reads else None)
        return layer(name, [mixer], [FeedForward(size)], later if reads else first, common)

    return decoder(
        c.named(hidden_size=hidden),
        [block(i) for i in range(c.num_layers)],
        tied=True,
        embedding="embedding",
        norm="output_norm",
    )


def longcat_layers(c: Config) -> list[Layer]:
    """Two latent attentions and two dense parts in a layer, experts beside the second pair."""
    hidden, count, width = c.hidden_size, c.n_routed_experts, c.expert_ffn_hidden_size
    choices = count + c.zero_expert_num
    moe = under(
        "mlp",
        switch_glu("switch_mlp", count, hidden, width),
        router("router.classifier", choices, hidden, c.router_bias),
        array("router.e_score_correction_bias", choices, dtype="float32"),
    )
    pair: Part = ()
    for i in range(2):
        pair += latent_part(c, True, f"self_attn.{i}")
        pair += gated_mlp(f"mlps.{i}", hidden, c.ffn_hidden_size)
        pair += norms(hidden, f"input_layernorm.{i}", f"post_attention_layernorm.{i}")
    dense = FeedForward(c.ffn_hidden_size)
    experts = Experts(count, c.moe_topk, width)
    return [
        layer(
            f"model.layers.{i}",
            [latent_attention(c)] * 2,
            [dense, dense, experts],
            moe,
            pair,
        )
        for i in range(c.num_layers)
    ]


def longcat_flash(c: Config) -> Architecture:
    return decoder(c, longcat_layers(c), tied=False)


def longcat_flash_ngram(c: Config) -> Architecture:
    """LongCat with embeddings of the latest tokens together, by hash."""
    hidden, vocab = c.hidden_size, c.vocab_size
    count = c.emb_split_num * (c.emb_neighbor_num - 1)
    rows, width = c.ngram_vocab_size_ratio * vocab, hidden // count
    ngrams: Part = ()
    for i in range(count):
        name = f"embedders.{i}"
        ngrams += (Parameter(name, (int(rows + 2 * i + 1), width), "embedding"),)
        ngrams += linear(f"post_projs.{i}", hidden, width)
    return decoder(
        c,
        longcat_layers(c),
        tied=False,
        embedding="ngram_embeddings.word_embeddings",
        extra=under("model.ngram_embeddings", ngrams),
    )


MODULES: Modules = {
    "nanbeige": (
        nanbeige,
        {
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "num_loops": 1,
        },
    ),
    "iquestloopcoder": (
        iquestloopcoder,
        {
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "loop_window_size": 64,
        },
    ),
    "afm7": (afm7, {"hidden_dim_scale_factor": 3.25}),
    "longcat_flash": (longcat_flash, {"router_bias": False}),
    "longcat_flash_ngram": (
        longcat_flash_ngram,
        {
            "attention_bias": False,
            "ngram_vocab_size_ratio": 78,
            "emb_neighbor_num": 4,
            "emb_split_num": 4,
            "router_bias": False,
        },
    ),
}
