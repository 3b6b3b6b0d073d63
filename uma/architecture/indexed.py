"""Attention to tokens that an indexer chooses: Qwen4-Exp, GLM 5 Next, Mistral Large 4.

mlx-lm 0.32.2 has none of them; shapes from their modeling files in transformers 5.24.0.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from uma.architecture.config import Config
from uma.architecture.deepseek_v4 import hyper_connection
from uma.architecture.dense import LLAMA_NORMS, attention, mlp_part
from uma.architecture.latent import deepseek_experts, indexer_part, latent_part, sparse_attention
from uma.architecture.layers import (
    Architecture,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    Parameter,
    Recurrent,
    State,
)
from uma.architecture.linear_attention import (
    delta_net,
    gated_attention_part,
    qwen3_5_delta,
    qwen_experts,
)
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    layer,
    layer_norm,
    linear,
    norms,
    under,
)


def gated_residual(c: Config, name: str, inject: bool = True) -> Part:
    """``hc_count`` residual streams, mixed by a low rank and written back by one weight each."""
    wide, rank = c.hc_count * c.hidden_size, c.hc_lowrank
    return under(
        name,
        array("hc_norm", wide),
        linear("input_mix_weight_down", rank, wide),
        linear("input_mix_weight_up", wide, rank),
        linear("block_inject_weight", c.hc_count, wide) if inject else (),
    )


def primes_after(number: int) -> Iterator[int]:
    """Primes above ``number``."""
    while True:
        number += 1
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            yield number


def ngram_embedding(c: Config, index: int) -> Part:
    """Embeddings of the latest tokens together, by hash into tables of prime lengths."""
    heads = (c.ngram_size - 1) * c.heads_per_ngram
    primes = islice(primes_after(c.ngram_vocab_size_base - 1), index * heads, (index + 1) * heads)
    divisor = c.make_ngram_vocab_size_divisible_by
    rows = -(-sum(primes) // divisor) * divisor
    width = (c.get("ple_embed_dim") or c.hidden_size) // heads
    return (Parameter("ple_embedding.ngram_embedding", (rows, width), "embedding"),)


def ple_part(c: Config, index: int) -> Part:
    """A layer's memory of n-grams: its embedding, key, value and a convolution over time."""
    hidden, embed = c.hidden_size, c.get("ple_embed_dim") or c.hidden_size
    wide = c.hc_count * hidden
    return under(
        "ple",
        ngram_embedding(c, index),
        linear("key_proj", wide, embed),
        linear("value_proj", hidden, embed),
        norms(wide, "norm_key", "norm_query", "norm_conv"),
        array("conv1d", wide, c.ple_conv_kernel_size, 1),
    )


def qwen4_exp(c: Config) -> Architecture:
    """Qwen 3.5's delta networks and experts; indexed attention; residual streams."""
    dim, index_dim = c.head_width, c.get("indexer_head_dim")
    softmax = gated_attention_part(c)
    if index_dim:
        width = (c.indexer_n_heads + c.indexer_kv_heads) * index_dim
        softmax += linear("self_attn.indexer.index_qk_proj", width, c.hidden_size)
        softmax += norms(index_dim, "self_attn.indexer.q_norm", "self_attn.indexer.k_norm")
    full: tuple[Mixer, Part] = (attention(c, dim, index_head_dim=index_dim), softmax)
    delta: tuple[Mixer, Part] = (delta_net(c), qwen3_5_delta(c))
    experts, moe = qwen_experts(c)
    streams = gated_residual(c, "attn_hyper_connection") + gated_residual(c, "mlp_hyper_connection")
    interval = c.get("full_attention_interval") or 4
    kinds = c.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(c.num_hidden_layers)
    ]
    named = sorted(c.get("ple_layer_ids") or ())

    def block(i: int) -> Layer:
        mixer, part = delta if kinds[i] == "linear_attention" else full
        ple = ple_part(c, named.index(i + 1)) if i + 1 in named else ()
        return layer(f"model.layers.{i}", [mixer], [experts], part, moe, streams, ple)

    return decoder(
        c,
        [block(i) for i in range(c.num_hidden_layers)],
        tied=c.tie_word_embeddings,
        norm=gated_residual(c, "hyper_connection_mixer", inject=False),
    )


def glm5_delta(c: Config) -> tuple[Mixer, Part]:
    """Kimi's delta attention, one convolution over queries, keys and values."""
    hidden, heads, dim = c.hidden_size, c.linear_num_heads, c.linear_head_dim
    width, kernel = heads * dim, c.linear_conv_kernel_dim
    part = under(
        "self_attn",
        *(linear(f"{x}_proj", width, hidden) for x in "qkv"),
        array("conv1d", 3 * width, kernel, 1, dtype="float32"),
        *(linear(f"{x}_a_proj", dim, hidden) for x in "fg"),
        *(linear(f"{x}_b_proj", width, dim) for x in "fg"),
        linear("b_proj", heads, hidden),
        array("A_log", heads, dtype="float32"),
        array("dt_bias", width, dtype="float32"),
        array("o_norm", dim),
        linear("o_proj", hidden, width),
    )
    states = (
        State("conv", (kernel - 1, 3 * width), "model"),
        State("delta", (heads, dim, dim), "float32"),
    )
    return Recurrent("kimi_delta", states, heads, dim, width), part


def indexes(c: Config) -> list[bool]:
    """Layers that choose tokens of their own; the others take the choice before them."""
    types = c.get("indexer_types")
    return [kind == "full" for kind in types] if types else [True] * c.num_hidden_layers


def latent_layer(
    c: Config, index: int, mixer: Mixer, part: Part, dense: int, common: Part
) -> Layer:
    """A layer with DeepSeek's experts, or with a dense part among the first ``dense``."""
    name = f"model.layers.{index}"
    if index < dense:
        return layer(name, [mixer], [FeedForward(c.intermediate_size)], part, mlp_part(c), common)
    experts, moe = deepseek_experts(c, True)
    return layer(name, [mixer], [experts], part, moe, common)


def glm5_next(c: Config) -> Architecture:
    """Three delta layers, then latent attention whose indexer sees pools of tokens."""
    dense = c.get("first_k_dense_replace") or GLM5_DENSE
    common = (
        norms(c.hidden_size, *LLAMA_NORMS)
        + hyper_connection(c, "attn_hc")
        + hyper_connection(c, "ffn_hc")
    )
    delta, full = glm5_delta(c), latent_part(c, False)
    pooled = under(
        "self_attn.indexer",
        array("index_kpool_compress_ape", c.index_kpool, c.index_head_dim),
        array("index_kpool_compress_gate", c.index_head_dim, c.hidden_size),
    )
    indexing = (
        replace(sparse_attention(c), index_compress_ratio=c.index_kpool),
        full + indexer_part(c) + pooled,
    )
    reading = (replace(indexing[0], index_head_dim=None), full)
    kinds = c.get("layer_types") or [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(c.num_hidden_layers)
    ]
    layers = []
    for i, (kind, own) in enumerate(zip(kinds, indexes(c), strict=True)):
        mixer, part = delta if kind == "linear_attention" else indexing if own else reading
        layers.append(latent_layer(c, i, mixer, part, dense, common))
    return decoder(c, layers, tied=c.tie_word_embeddings)


GLM5_DENSE = 3  # transformers 5.24.0, configuration_glm5_next.py


def mistral_large4_attention(c: Config, rope: int) -> tuple[LatentAttention, Part, Part]:
    """The mixer, its part and its indexer; without rotary keys where ``rope`` is 0."""
    heads, rank, hidden = c.num_attention_heads, c.kv_lora_rank, c.hidden_size
    width = c.qk_nope_head_dim + c.qk_rope_head_dim
    part = under(
        "self_attn",
        linear("q_proj", heads * width, hidden),
        linear("kv_a_proj_with_mqa", rank + rope, hidden, c.attention_bias),
        array("kv_a_layernorm", rank),
        linear("kv_b_proj", heads * (width - rope + c.v_head_dim), rank),
        linear("o_proj", hidden, heads * c.v_head_dim, c.attention_bias),
        array("softmax_scaling.scale", heads),
        array("softmax_scaling.bias", heads),
    )
    count = c.index_n_heads
    index = indexer_part(c.named(q_lora_rank=hidden)) + under(
        "self_attn.indexer",
        layer_norm("q_input_norm", hidden),
        array("softmax_scaling.scale", count),
        array("softmax_scaling.bias", count),
    )
    mixer = replace(sparse_attention(c), qk_rope_head_dim=rope, qk_nope_head_dim=width - rope)
    return mixer, part, index


def mistral_large4(c: Config) -> Architecture:
    """DeepSeek's layers without a query rank; every fourth one has no rotary keys."""
    c = c.named(n_routed_experts=c.get("num_experts") or c.n_routed_experts)
    every = c.get("no_rope_layer_interval") or 4
    rotary = c.get("no_rope_layers") or [
        int((i + 1) % every != 0) for i in range(c.num_hidden_layers)
    ]
    sources = c.get("kv_source_layers") or range(c.num_hidden_layers)
    attentions = {
        1: mistral_large4_attention(c, c.qk_rope_head_dim),
        0: mistral_large4_attention(c, 0),
    }
    common = norms(c.hidden_size, *LLAMA_NORMS)
    layers = []
    for i, (rope, own, source) in enumerate(zip(rotary, indexes(c), sources, strict=True)):
        mixer, part, index = attentions[rope]
        if source != i:
            mixer = replace(mixer, kv_source=source)
            part = tuple(p for p in part if ".kv_a_" not in p.name)
        if not own:
            mixer = replace(mixer, index_head_dim=None)
        part += index if own else ()
        layers.append(latent_layer(c, i, mixer, part, c.first_k_dense_replace, common))
    return decoder(c, layers, tied=c.tie_word_embeddings)
