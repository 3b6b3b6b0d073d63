"""More decoders with dense feed-forward parts: other names, biases and norms than Llama's."""

from dataclasses import replace

from uma.architecture.config import Config, Modules
from uma.architecture.dense import (
    LLAMA_NORMS,
    attention_part,
    dense_layers,
    mlp_part,
)
from uma.architecture.layers import Architecture, Attention, FeedForward, Layer, Mixer
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    layer_norm,
    linear,
    norms,
    qkvo,
    under,
)
from uma.errors import UnsupportedModel


def at_8_bits(part: Part, *suffixes: str) -> Part:
    """The matrices whose names end so, at the 8 bits that ``quant_predicate`` gives them."""
    return tuple(
        replace(p, bits=8, group_size=64) if p.kind == "matrix" and p.name.endswith(suffixes) else p
        for p in part
    )


def layer_norms(dims: int, *names: str, bias: bool = True) -> Part:
    """``LayerNorm`` of the same width."""
    return tuple(p for name in names for p in layer_norm(name, dims, bias))


def granite(c: Config) -> Architecture:
    """Llama whose output and down projections and head are kept at 8 bits."""
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, c.attention_bias) + mlp_part(c, c.mlp_bias)
    part = at_8_bits(part, "self_attn.o_proj", "mlp.down_proj")
    layers = dense_layers(c, part, (), norms(c.hidden_size, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings, head_bits=8)


def seed_oss(c: Config) -> Architecture:
    part = attention_part(c, c.head_dim, c.attention_bias, c.attention_out_bias)
    mlp = mlp_part(c, c.mlp_bias)
    layers = dense_layers(c, part, mlp, norms(c.hidden_size, *LLAMA_NORMS), c.head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def internlm3(c: Config) -> Architecture:
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, c.qkv_bias)
    mlp = mlp_part(c, c.bias)
    layers = dense_layers(c, part, mlp, norms(c.hidden_size, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def minicpm(c: Config) -> Architecture:
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim)
    layers = dense_layers(c, part, mlp_part(c), norms(c.hidden_size, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def ernie4_5(c: Config) -> Architecture:
    part = attention_part(c, c.head_width, c.use_bias)
    mlp = mlp_part(c, c.use_bias)
    layers = dense_layers(c, part, mlp, norms(c.hidden_size, *LLAMA_NORMS), c.head_width)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def hunyuan_v1_dense(c: Config) -> Architecture:
    dim = c.head_width
    part = attention_part(c, dim, c.attention_bias)
    if c.use_qk_norm:
        part += under("self_attn", norms(dim, "query_layernorm", "key_layernorm"))
    layers = dense_layers(c, part, mlp_part(c), norms(c.hidden_size, *LLAMA_NORMS), dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def helium(c: Config) -> Architecture:
    """mlx-lm builds the head even where the embeddings are tied."""
    head_dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, c.attention_bias, o_bias=False)
    mlp = mlp_part(c, c.mlp_bias)
    layers = dense_layers(c, part, mlp, norms(c.hidden_size, *LLAMA_NORMS), head_dim)
    return decoder(c, layers, tied=False)


def glm(c: Config) -> Architecture:
    hidden, dim = c.hidden_size, c.head_width
    mlp = under(
        "mlp",
        linear("gate_up_proj", 2 * c.intermediate_size, hidden),
        linear("down_proj", hidden, c.intermediate_size),
    )
    part = attention_part(c, dim, c.attention_bias, o_bias=False)
    layers = dense_layers(c, part, mlp, norms(hidden, *LLAMA_NORMS), dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def phi(c: Config) -> Architecture:
    """Attention and feed-forward part side by side after one norm; biases everywhere."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    heads = c.num_attention_heads
    part = qkvo("self_attn", hidden, heads, c.kv_heads, head_dim, True, o_name="dense")
    mlp = under(
        "mlp",
        linear("fc1", c.intermediate_size, hidden, bias=True),
        linear("fc2", hidden, c.intermediate_size, bias=True),
    )
    first = layer_norm("input_layernorm", hidden)
    layers = dense_layers(c, part, mlp, first, head_dim, gated=False)
    norm = layer_norm("final_layernorm", hidden)
    return decoder(c, layers, tied=False, norm=norm, head_bias=True)


def stablelm(c: Config) -> Architecture:
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    part = attention_part(c, head_dim, c.use_qkv_bias, o_bias=False)
    if c.qk_layernorm:
        for name, count in (("q", c.num_attention_heads), ("k", c.kv_heads)):
            per_head = [f"self_attn.{name}_layernorm.norms.{i}" for i in range(count)]
            part += layer_norms(head_dim, *per_head, bias=False)
    names = LLAMA_NORMS[:1] if c.use_parallel_residual else LLAMA_NORMS
    layers = dense_layers(c, part, mlp_part(c), layer_norms(hidden, *names), head_dim)
    return decoder(c, layers, tied=False, norm=layer_norm("norm", hidden))


def nemotron(c: Config) -> Architecture:
    """No gate in the feed-forward part; norms with biases."""
    hidden, dim = c.hidden_size, c.head_width
    mlp = under(
        "mlp",
        linear("up_proj", c.intermediate_size, hidden, c.mlp_bias),
        linear("down_proj", hidden, c.intermediate_size, c.mlp_bias),
    )
    part = attention_part(c, dim, c.attention_bias)
    layers = dense_layers(c, part, mlp, layer_norms(hidden, *LLAMA_NORMS), dim, gated=False)
    return decoder(c, layers, tied=c.tie_word_embeddings, norm=layer_norm("norm", hidden))


def apertus(c: Config) -> Architecture:
    """A learned activation of four numbers in each layer, and no gate."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    mlp = under(
        "mlp",
        linear("up_proj", c.intermediate_size, hidden, c.mlp_bias),
        linear("down_proj", hidden, c.intermediate_size, c.mlp_bias),
        *(array(f"act_fn.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")),
    )
    part = attention_part(c, head_dim, qk_norm="head")
    norm_part = norms(hidden, "attention_layernorm", "feedforward_layernorm")
    layers = dense_layers(c, part, mlp, norm_part, head_dim, gated=False)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def internlm2(c: Config) -> Architecture:
    hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.kv_heads
    head_dim, size = hidden // heads, c.intermediate_size
    parts = (
        linear("attention.wqkv", (heads + 2 * kv_heads) * head_dim, hidden, c.bias)
        + linear("attention.wo", hidden, heads * head_dim, c.bias)
        + linear("feed_forward.w1", size, hidden)
        + linear("feed_forward.w2", hidden, size)
        + linear("feed_forward.w3", size, hidden)
        + norms(hidden, "attention_norm", "ffn_norm")
    )
    layers = dense_layers(c, parts, (), (), head_dim)
    return decoder(c, layers, tied=c.tie_word_embeddings, embedding="tok_embeddings", head="output")


def nemotron_nas(c: Config) -> Architecture:
    """Llama with heads and widths of each layer by ``block_configs``; some have no attention."""
    blocks = c.block_configs
    layers = [nas_layer(c, i, blocks[i]) for i in range(c.num_hidden_layers)]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def nas_layer(c: Config, index: int, block: dict[str, dict[str, object]]) -> Layer:
    """Raises ``UnsupportedModel`` where a part is replaced by one matrix."""
    softmax, mlp = block.get("attention", {}), block.get("ffn", {})
    if softmax.get("replace_with_linear") or mlp.get("replace_with_linear"):
        raise UnsupportedModel("nemotron-nas with replace_with_linear blocks is not supported")
    hidden, heads = c.hidden_size, c.num_attention_heads
    mixers: list[Mixer] = []
    feed_forward: list[FeedForward] = []
    parts: Part = ()
    if not softmax.get("no_op"):
        kv_heads, dim = heads // softmax["n_heads_in_group"], hidden // heads
        mixers.append(Attention(heads, kv_heads, dim, dim))
        parts += qkvo("self_attn", hidden, heads, kv_heads, dim, c.attention_bias)
        parts += array("input_layernorm", hidden)
    if not mlp.get("no_op"):
        size = nas_intermediate_size(round(float(str(mlp["ffn_mult"])), 6), hidden)
        feed_forward.append(FeedForward(size))
        parts += gated_mlp("mlp", hidden, size, c.mlp_bias)
        parts += array("post_attention_layernorm", hidden)
    return layer(f"model.layers.{index}", mixers, feed_forward, parts)


def nas_intermediate_size(multiplier: float, hidden_size: int) -> int:
    """Two thirds of the multiplied width, rounded up to a multiple of 256."""
    return -(-int(2 * multiplier * hidden_size / 3) // 256) * 256


LLAMA_LIKE = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}

MODULES: Modules = {
    "granite": (granite, {"tie_word_embeddings": True}),
    "seed_oss": (seed_oss, {**LLAMA_LIKE, "attention_out_bias": False}),
    "internlm2": (
        internlm2,
        {"bias": True, "num_key_value_heads": None, "tie_word_embeddings": False},
    ),
    "internlm3": (
        internlm3,
        {
            "bias": False,
            "qkv_bias": False,
            "num_key_value_heads": None,
            "tie_word_embeddings": False,
        },
    ),
    "minicpm": (minicpm, {"tie_word_embeddings": False}),
    "ernie4_5": (ernie4_5, {}),
    "hunyuan_v1_dense": (
        hunyuan_v1_dense,
        {
            "attention_bias": False,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
            "head_dim": None,
        },
    ),
    "helium": (helium, {}),
    "glm": (glm, {"attention_bias": False, "tie_word_embeddings": True}),
    "phi": (
        phi,
        {
            "max_position_embeddings": 2048,
            "vocab_size": 51200,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 10240,
        },
    ),
    "stablelm": (stablelm, {"use_parallel_residual": False, "qk_layernorm": False}),
    "nemotron": (
        nemotron,
        {
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "apertus": (apertus, {"mlp_bias": False}),
    "nemotron-nas": (
        nemotron_nas,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "vocab_size": 128256,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
}
