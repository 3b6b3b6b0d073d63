"""DeepSeek V4 and V4.1: one shared key and value a token, compressed beyond a window.

Shapes: mlx-lm 0.32.2, ``deepseek_v41.py``; transformers 5.24.0, ``modeling_deepseek_v4.py``.
"""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS
from uma.architecture.layers import Architecture, Experts, LatentAttention
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    in_float32,
    layer,
    linear,
    norms,
    stacked,
    switch_glu,
    under,
)


def hyper_connection(c: Config, name: str) -> Part:
    """Weights that mix ``hc_mult`` residual streams into a part and back."""
    streams = c.hc_mult
    mix = (2 + streams) * streams
    part = array("fn", mix, streams * c.hidden_size) + array("base", mix) + array("scale", 3)
    return under(name, in_float32(part))


def mixture(c: Config) -> tuple[Experts, Part]:
    hidden, count, width = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    shared = width * (c.get("n_shared_experts") or 1)
    part = (
        array("gate", count, hidden)
        + array("gate.e_score_correction_bias", count, dtype="float32")
        + switch_glu("experts.switch_mlp", count, hidden, width)
        + gated_mlp("shared_experts", hidden, shared)
    )
    return Experts(count, c.num_experts_per_tok, width, shared), under("mlp", part)


def projections(c: Config) -> Part:
    """Queries by a low rank, one key and value for all heads, outputs by groups."""
    heads, dim, hidden, groups = c.num_attention_heads, c.head_dim, c.hidden_size, c.o_groups
    return (
        linear("q_a_proj", c.q_lora_rank, hidden)
        + array("q_a_norm", c.q_lora_rank)
        + linear("q_b_proj", heads * dim, c.q_lora_rank)
        + linear("kv_proj", dim, hidden)
        + array("kv_norm", dim)
        + stacked("o_a_proj", groups, c.o_lora_rank, heads * dim // groups)
        + linear("o_b_proj", hidden, groups * c.o_lora_rank)
        + array("sinks", heads, dtype="float32")
    )


def compressed_attention(
    c: Config, ratio: int, indexed: bool, source: int | None = None
) -> LatentAttention:
    """Key and value are one vector, of which the last part is rotated."""
    nope = c.head_dim - c.qk_rope_head_dim
    return LatentAttention(
        c.num_attention_heads,
        nope,
        c.qk_rope_head_dim,
        nope,
        c.head_dim,
        index_head_dim=c.index_head_dim if indexed else None,
        index_n_heads=c.index_n_heads if indexed else None,
        index_topk=c.index_topk if indexed else None,
        sliding_window=c.sliding_window,
        compress_ratio=ratio or None,
        kv_source=source,
    )


def v41_attention(c: Config, index: int) -> tuple[LatentAttention, Part]:
    """Some layers compress and others read what the last of these holds; likewise the index."""
    ratios, hidden, dim = c.compress_ratios, c.hidden_size, c.head_dim
    ratio = int(ratios[index]) if index < len(ratios) else 0
    holds, indexes = index in c.kv_source_layer_ids, index in c.index_source_layer_ids
    part = projections(c)
    if holds:
        compressor = linear("kv_proj", dim, hidden)
        compressor += linear("gate_proj", dim, hidden) if ratio > 1 else ()
        part += under("compressor", in_float32(compressor + array("kv_norm", dim)))
    if indexes:
        part += under(
            "indexer",
            linear("q_b_proj", c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            linear("weights_proj", c.index_n_heads, hidden),
        )
    if indexes and holds:
        part += linear("indexer.k_proj", c.index_head_dim, dim)
        part += array("indexer.k_norm", c.index_head_dim)
    before = [i for i in c.kv_source_layer_ids if i < index]
    source = max(before) if ratio and not holds and before else None
    mixer = compressed_attention(c, ratio, indexes and holds, source)
    return mixer, under("self_attn", part)


def v4_attention(c: Config, ratio: int) -> tuple[LatentAttention, Part]:
    """Ratio 4 has an indexer and overlapping groups, hence twice the width; 128 has neither."""
    hidden, dim, width = c.hidden_size, c.head_dim, c.index_head_dim
    indexed = ratio == INDEXED_RATIO
    part = projections(c)
    if ratio:
        part += compressor_part("compressor", hidden, dim, ratio, 2 if indexed else 1)
    if indexed:
        part += compressor_part("compressor.indexer", hidden, width, ratio, 2)
        part += linear("compressor.indexer.q_b_proj", c.index_n_heads * width, c.q_lora_rank)
        part += linear("compressor.indexer.weights_proj", c.index_n_heads, hidden)
    return compressed_attention(c, ratio, indexed), under("self_attn", part)


INDEXED_RATIO = 4  # transformers 5.24.0, configuration_deepseek_v4.py, compress ratios


def compressor_part(name: str, hidden: int, dim: int, ratio: int, overlap: int) -> Part:
    return under(
        name,
        linear("kv_proj", overlap * dim, hidden),
        linear("gate_proj", overlap * dim, hidden),
        array("position_bias", ratio, overlap * dim, dtype="float32"),
        array("kv_norm", dim),
    )


def deepseek_v41(c: Config) -> Architecture:
    common = (
        norms(c.hidden_size, *LLAMA_NORMS)
        + hyper_connection(c, "attn_hc")
        + hyper_connection(c, "ffn_hc")
    )
    experts, moe = mixture(c)
    layers = []
    for i in range(c.num_hidden_layers):
        mixer, part = v41_attention(c, i)
        layers.append(layer(f"model.layers.{i}", [mixer], [experts], part, moe, common))
    return decoder(c, layers, tied=False)


def deepseek_v4(c: Config) -> Architecture:
    """The first ``num_hash_layers`` route by a table over the vocabulary, without a bias."""
    hidden, streams = c.hidden_size, c.hc_mult
    common = (
        norms(hidden, *LLAMA_NORMS) + hyper_connection(c, "attn_hc") + hyper_connection(c, "ffn_hc")
    )
    experts, moe = mixture(c)
    hashed = tuple(p for p in moe if not p.name.endswith("correction_bias"))
    table = array("mlp.gate.tid2eid", c.vocab_size, c.num_experts_per_tok)
    layers = []
    for i, ratio in enumerate(c.compress_ratios[: c.num_hidden_layers]):
        mixer, part = v4_attention(c, int(ratio))
        mlp = hashed + table if i < c.num_hash_layers else moe
        layers.append(layer(f"model.layers.{i}", [mixer], [experts], part, mlp, common))
    head = (
        array("hc_fn", streams, streams * hidden) + array("hc_base", streams) + array("hc_scale", 1)
    )
    extra = under("model.hc_head", in_float32(head))
    return decoder(c, layers, tied=c.tie_word_embeddings, extra=extra)


MODULES: Modules = {
    "deepseek_v41": (
        deepseek_v41,
        {
            "vocab_size": 129280,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "head_dim": 512,
            "q_lora_rank": 1280,
            "qk_rope_head_dim": 64,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "moe_intermediate_size": 2304,
            "n_routed_experts": 384,
            "num_experts_per_tok": 6,
            "sliding_window": 128,
            "compress_ratios": (),
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "max_position_embeddings": 1048576,
            "hc_mult": 4,
        },
    ),
}
