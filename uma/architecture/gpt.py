"""Older decoders: GPT-2, GPT-NeoX, the first Qwen, EXAONE 3, nanochat."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense_variants import layer_norms
from uma.architecture.layers import Architecture, Attention, FeedForward, Parameter
from uma.architecture.parts import Part, decoder, layer, layer_norm, linear, norms, under


def equal_heads(width: int, heads: int) -> Attention:
    """As many heads of keys and values as of queries."""
    return Attention(heads, heads, width // heads, width // heads)


def gpt2(c: Config) -> Architecture:
    """Learned positions, a tied head, norms with biases."""
    width = c.n_embd
    part = (
        linear("attn.c_attn", 3 * width, width, bias=True)
        + linear("attn.c_proj", width, width, bias=True)
        + linear("mlp.c_fc", 4 * width, width, bias=True)
        + linear("mlp.c_proj", width, 4 * width, bias=True)
        + layer_norms(width, "ln_1", "ln_2")
    )
    mixer, dense = equal_heads(width, c.n_head), FeedForward(4 * width, gated=False)
    layers = [layer(f"model.h.{i}", [mixer], [dense], part) for i in range(c.n_layer)]
    positions = (Parameter("model.wpe", (c.n_positions, width), "embedding"),)
    return decoder(
        c.named(hidden_size=width, max_position_embeddings=c.n_positions),
        layers,
        tied=True,
        embedding="wte",
        norm=layer_norm("ln_f", width),
        extra=positions,
    )


def gpt_neox(c: Config) -> Architecture:
    hidden = c.hidden_size
    part = (
        linear("attention.query_key_value", 3 * hidden, hidden, bias=True)
        + linear("attention.dense", hidden, hidden, bias=True)
        + linear("mlp.dense_h_to_4h", 4 * hidden, hidden, bias=True)
        + linear("mlp.dense_4h_to_h", hidden, 4 * hidden, bias=True)
        + layer_norms(hidden, "input_layernorm", "post_attention_layernorm")
    )
    mixer = equal_heads(hidden, c.num_attention_heads)
    dense = FeedForward(4 * hidden, gated=False)
    layers = [layer(f"model.h.{i}", [mixer], [dense], part) for i in range(c.num_hidden_layers)]
    return decoder(
        c,
        layers,
        tied=False,
        embedding="embed_in",
        norm=layer_norm("final_layer_norm", hidden),
        head="model.embed_out",
    )


def qwen(c: Config) -> Architecture:
    """The first Qwen: half of ``intermediate_size`` in each of two matrices."""
    hidden, heads, bias = c.hidden_size, c.num_attention_heads, not c.no_bias
    width, size = c.kv_channels * heads, c.intermediate_size // 2
    part = (
        linear("attn.c_attn", 3 * width, hidden, bias=True)
        + linear("attn.c_proj", width, hidden, bias)
        + linear("mlp.w1", size, hidden, bias)
        + linear("mlp.w2", size, hidden, bias)
        + linear("mlp.c_proj", hidden, size, bias)
        + norms(hidden, "ln_1", "ln_2")
    )
    mixer, dense = equal_heads(width, heads), FeedForward(size)
    layers = [
        layer(f"transformer.h.{i}", [mixer], [dense], part) for i in range(c.num_hidden_layers)
    ]
    return decoder(
        c,
        layers,
        tied=False,
        prefix="transformer",
        embedding="wte",
        norm="ln_f",
        head_bias=bias,
    )


def exaone(c: Config) -> Architecture:
    hidden, heads, dim, size = (
        c.hidden_size,
        c.num_attention_heads,
        c.head_width,
        c.intermediate_size,
    )
    attention: Part = under(
        "attn.attention",
        linear("q_proj", heads * dim, hidden, c.attention_bias),
        linear("k_proj", c.kv_heads * dim, hidden, c.attention_bias),
        linear("v_proj", c.kv_heads * dim, hidden, c.attention_bias),
        linear("out_proj", hidden, heads * dim, c.attention_bias),
    )
    part = (
        attention
        + linear("mlp.c_fc_0", size, hidden, c.mlp_bias)
        + linear("mlp.c_fc_1", size, hidden, c.mlp_bias)
        + linear("mlp.c_proj", hidden, size, c.mlp_bias)
        + norms(hidden, "ln_1", "ln_2")
    )
    mixer = Attention(heads, c.kv_heads, dim, dim)
    layers = [
        layer(f"transformer.h.{i}", [mixer], [FeedForward(size)], part) for i in range(c.num_layers)
    ]
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        prefix="transformer",
        embedding="wte",
        norm="ln_f",
    )


def nanochat(c: Config) -> Architecture:
    """Norms without weights; two matrices in the feed-forward part."""
    hidden, heads, size = c.hidden_size, c.num_attention_heads, c.intermediate_size
    dim = hidden // heads
    part = (
        linear("attn.c_q", heads * dim, hidden)
        + linear("attn.c_k", c.kv_heads * dim, hidden)
        + linear("attn.c_v", c.kv_heads * dim, hidden)
        + linear("attn.c_proj", hidden, hidden)
        + linear("mlp.c_fc", size, hidden)
        + linear("mlp.c_proj", hidden, size)
    )
    mixer, dense = Attention(heads, c.kv_heads, dim, dim), FeedForward(size, gated=False)
    layers = [
        layer(f"transformer.h.{i}", [mixer], [dense], part) for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=False, prefix="transformer", embedding="wte", norm=())


def gpt_bigcode(c: Config) -> Architecture:
    """GPT-2 with one head of keys and values (StarCoder)."""
    width, heads, size = c.n_embd, c.n_head, c.n_inner
    dim = width // heads
    kv_heads = c.num_key_value_heads or (1 if c.multi_query else heads)
    part = (
        linear("attn.c_attn", width + 2 * kv_heads * dim, width, c.attention_bias)
        + linear("attn.c_proj", width, width, c.attention_bias)
        + linear("mlp.c_fc", size, width, c.mlp_bias)
        + linear("mlp.c_proj", width, size, c.mlp_bias)
        + layer_norms(width, "ln_1", "ln_2")
    )
    mixer, dense = Attention(heads, kv_heads, dim, dim), FeedForward(size, gated=False)
    layers = [layer(f"transformer.h.{i}", [mixer], [dense], part) for i in range(c.n_layer)]
    return decoder(
        c.named(hidden_size=width, max_position_embeddings=c.n_positions),
        layers,
        tied=c.tie_word_embeddings,
        prefix="transformer",
        embedding="wte",
        norm=layer_norm("ln_f", width),
        extra=(Parameter("transformer.wpe", (c.n_positions, width), "embedding"),),
    )


MODULES: Modules = {
    "nanochat": (
        nanochat,
        {
            "hidden_size": 1280,
            "num_hidden_layers": 20,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "vocab_size": 65536,
            "max_position_embeddings": 2048,
            "intermediate_size": 5120,
        },
    ),
    "gpt_bigcode": (
        gpt_bigcode,
        {
            "num_key_value_heads": None,
            "multi_query": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (gpt2, {}),
    "gpt_neox": (gpt_neox, {}),
    "qwen": (
        qwen,
        {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "kv_channels": 128,
            "max_position_embeddings": 8192,
            "intermediate_size": 11008,
            "no_bias": True,
            "vocab_size": 151936,
        },
    ),
    "exaone": (
        exaone,
        {
            "head_dim": None,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
}
