"""Earlier decoders: GPT-J, OLMo 1, OpenELM, Phi-3-small, Phixtral, Lille, Talkie, PLaMo 1."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import attention_part, dense_layers, mlp_part
from uma.architecture.dense_variants import layer_norms
from uma.architecture.gpt import equal_heads
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward, Layer, Parameter
from uma.architecture.parts import (
    array,
    decoder,
    gated_mlp,
    layer,
    layer_norm,
    linear,
    norms,
    stacked,
    under,
)


def gptj(c: Config) -> Architecture:
    """Attention and feed-forward part side by side after one norm."""
    width = c.n_embd
    part = (
        layer_norm("ln_1", width)
        + under("attn", *(linear(f"{x}_proj", width, width) for x in ("k", "v", "q", "out")))
        + linear("mlp.fc_in", 4 * width, width, bias=True)
        + linear("mlp.fc_out", width, 4 * width, bias=True)
    )
    mixer, dense = equal_heads(width, c.n_head), FeedForward(4 * width, gated=False)
    return decoder(
        c.named(hidden_size=width, max_position_embeddings=c.n_positions),
        [layer(f"model.h.{i}", [mixer], [dense], part) for i in range(c.n_layer)],
        tied=False,
        embedding="wte",
        norm=layer_norm("ln_f", width),
        head_bias=True,
    )


def olmo(c: Config) -> Architecture:
    """OLMo 1 in its own names: norms without weights, gate and up in one matrix."""
    width, size = c.d_model, c.get("mlp_hidden_size") or c.mlp_ratio * c.d_model
    part = (
        linear("ff_proj", size, width)
        + linear("ff_out", width, size // 2)
        + linear("att_proj", 3 * width, width)
        + linear("attn_out", width, width)
    )
    mixer, dense = equal_heads(width, c.n_heads), FeedForward(size // 2)
    prefix = "model.transformer"
    return decoder(
        c.named(hidden_size=width, vocab_size=c.embedding_size),
        [layer(f"{prefix}.blocks.{i}", [mixer], [dense], part) for i in range(c.n_layers)],
        tied=c.weight_tying,
        prefix=prefix,
        embedding="wte",
        norm=(),
        head=f"{prefix}.ff_out",
    )


def openelm_size(c: Config, index: int) -> int:
    """The multiplied width, rounded to a multiple of ``ffn_dim_divisor``, at most 10 % less."""
    wanted, divisor = c.ffn_multipliers[index] * c.model_dim, c.ffn_dim_divisor
    size = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return int(size + divisor if size < 0.9 * wanted else size)


def openelm(c: Config) -> Architecture:
    """Heads and widths of each layer's own."""
    width, dim = c.model_dim, c.head_dim

    def block(i: int) -> Layer:
        heads, kv_heads, size = c.num_query_heads[i], c.num_kv_heads[i], openelm_size(c, i)
        part = (
            linear("attn.qkv_proj", (heads + 2 * kv_heads) * dim, width)
            + linear("attn.out_proj", width, heads * dim)
            + (norms(dim, "attn.q_norm", "attn.k_norm") if c.normalize_qk_projections else ())
            + linear("ffn.proj_1", 2 * size, width)
            + linear("ffn.proj_2", width, size)
            + norms(width, "ffn_norm", "attn_norm")
        )
        mixer = Attention(heads, kv_heads, dim, dim)
        return layer(f"transformer.layers.{i}", [mixer], [FeedForward(size)], part)

    return decoder(
        c.named(hidden_size=width),
        [block(i) for i in range(c.num_transformer_layers)],
        tied=c.share_input_output_layers,
        prefix="transformer",
        embedding="token_embeddings",
    )


def phi3small(c: Config) -> Architecture:
    """Biases and norms with biases; some layers attend to blocks, with a full cache."""
    hidden, heads, size = c.hidden_size, c.num_attention_heads, c.ff_intermediate_size
    dim = hidden // heads
    part = (
        linear("self_attn.query_key_value", (heads + 2 * c.kv_heads) * dim, hidden, bias=True)
        + linear("self_attn.dense", hidden, hidden, bias=True)
        + linear("mlp.up_proj", 2 * size, hidden, bias=True)
        + linear("mlp.down_proj", hidden, size, bias=True)
        + layer_norms(hidden, "input_layernorm", "post_attention_layernorm")
    )
    layers = dense_layers(c.named(intermediate_size=size), part, (), (), dim)
    return decoder(c, layers, tied=True, norm=layer_norm("final_layernorm", hidden))


def phixtral(c: Config) -> Architecture:
    """Experts made of Phi-2 models, attention beside them."""
    width, count, vocab = c.model_dim, c.num_local_experts, c.num_vocab
    part = (
        linear("mixer.Wqkv", 3 * width, width, bias=True)
        + linear("mixer.out_proj", width, width, bias=True)
        + layer_norm("ln", width)
        + stacked("moe.switch_mlp.fc1", count, 4 * width, width, bias=True)
        + stacked("moe.switch_mlp.fc2", count, width, 4 * width, bias=True)
        + linear("moe.gate", count, width)
    )
    mixer = equal_heads(width, c.num_heads)
    experts = Experts(count, c.num_experts_per_tok, 4 * width, gated=False)
    layers = [layer(f"transformer.h.{i}", [mixer], [experts], part) for i in range(c.num_layers)]
    head = layer_norm("lm_head.ln", width) + linear("lm_head.linear", vocab, width, bias=True)
    return decoder(
        c.named(hidden_size=width, vocab_size=vocab),
        layers,
        tied=True,
        prefix="transformer",
        embedding="embd.wte",
        norm=(),
        extra=head,
    )


def lille(c: Config) -> Architecture:
    """Norms inside the parts; a width of two thirds of four times the model's, by 256."""
    width, heads, kv_heads = c.n_embd, c.n_head, c.n_kv_heads
    dim, size = width // heads, 256 * round(int(8 * width / 3) / 256)
    part = (
        linear("attention.qkv_proj", (heads + 2 * kv_heads) * dim, width)
        + linear("attention.out_proj", width, heads * dim)
        + array("attention.norm", width)
        + array("feed_forward.norm", width)
        + gated_mlp("feed_forward", width, size)
    )
    mixer = Attention(heads, kv_heads, dim, dim)
    return decoder(
        c.named(hidden_size=width, max_position_embeddings=c.block_size),
        [
            layer(f"transformer.layers.{i}", [mixer], [FeedForward(size)], part)
            for i in range(c.n_layer)
        ],
        tied=True,
        prefix="transformer",
        embedding="tok_embeddings",
    )


def talkie(c: Config) -> Architecture:
    """Norms without weights, gains of one number, a head that has no quantized form."""
    hidden, heads, dim, size = (
        c.hidden_size,
        c.num_attention_heads,
        c.head_dim,
        c.intermediate_size,
    )
    part = (
        under(
            "attn",
            *(linear(f"attn_{x}", heads * dim, hidden) for x in ("query", "key", "value")),
            linear("attn_resid", hidden, heads * dim),
            array("head_gain.head_g", heads),
        )
        + linear("mlp.mlp_gate", size, hidden)
        + linear("mlp.mlp_linear", size, hidden)
        + linear("mlp.mlp_resid", hidden, size)
        + tuple(p for x in ("attn_gain", "mlp_gain", "embed_skip") for p in array(f"{x}.a_g", 1))
    )
    mixer = Attention(heads, heads, dim, dim)
    layers = [
        layer(f"model.blocks.{i}", [mixer], [FeedForward(size)], part)
        for i in range(c.num_hidden_layers)
    ]
    head = (Parameter("lm_head", (c.vocab_size, hidden), "other"), *array("lm_head_gain.w_g", 1))
    return decoder(c, layers, tied=True, embedding="embed", norm=(), extra=head)


def plamo(c: Config) -> Architecture:
    """Attention and feed-forward part side by side; ``n_shared_head`` queries a key."""
    kv_heads = -(-c.num_attention_heads // c.n_shared_head)
    c = c.named(num_key_value_heads=kv_heads)
    dim = c.hidden_size // c.num_attention_heads
    part = attention_part(c, dim) + mlp_part(c) + array("norm", c.hidden_size)
    mixer = Attention(c.num_attention_heads, kv_heads, dim, dim)
    layers = [
        layer(f"model.layers.layers.{i}", [mixer], [FeedForward(c.intermediate_size)], part)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=False)


MODULES: Modules = {
    "gptj": (
        gptj,
        {"n_embd": 4096, "vocab_size": 50400, "n_positions": 2048, "n_head": 16, "n_layer": 28},
    ),
    "olmo": (olmo, {"mlp_ratio": 4, "weight_tying": False}),
    "openelm": (openelm, {"normalize_qk_projections": True, "share_input_output_layers": True}),
    "phi3small": (phi3small, {}),
    "phixtral": (
        phixtral,
        {
            "num_vocab": 51200,
            "model_dim": 2560,
            "num_heads": 32,
            "num_layers": 32,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
        },
    ),
    "lille-130m": (lille, {}),
    "talkie": (
        talkie,
        {
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "head_dim": 128,
            "intermediate_size": 13696,
            "vocab_size": 65540,
            "max_position_embeddings": 2048,
        },
    ),
    "plamo": (plamo, {"n_shared_head": 8}),
}
