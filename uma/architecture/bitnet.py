"""BitNet: ternary matrices, four numbers to a byte, which have no other quantized form."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_DEFAULTS, LLAMA_NORMS, dense_layers
from uma.architecture.layers import Architecture, Parameter
from uma.architecture.parts import Part, array, decoder, norms, under


def bit_linear(name: str, output_dims: int, input_dims: int, bias: bool) -> Part:
    """``BitLinear`` (mlx-lm 0.32.2, ``bitlinear_layers.py``): packed along the outputs."""
    packed = Parameter(name, (-(-output_dims // 4), input_dims), "other", dtype="uint8")
    more = array(f"{name}.bias", output_dims) if bias else ()
    return (packed, *array(f"{name}.weight_scale", 1), *more)


def bitnet(c: Config) -> Architecture:
    """Llama of ternary matrices with a norm before each output projection."""
    hidden, dim, size = c.hidden_size, c.head_width, c.intermediate_size
    heads, kv_heads, bias = c.num_attention_heads, c.kv_heads, c.attention_bias
    part = under(
        "self_attn",
        bit_linear("q_proj", heads * dim, hidden, bias),
        bit_linear("k_proj", kv_heads * dim, hidden, bias),
        bit_linear("v_proj", kv_heads * dim, hidden, bias),
        bit_linear("o_proj", hidden, heads * dim, bias),
        array("attn_sub_norm", hidden),
    )
    mlp = under(
        "mlp",
        bit_linear("gate_proj", size, hidden, c.mlp_bias),
        bit_linear("up_proj", size, hidden, c.mlp_bias),
        bit_linear("down_proj", hidden, size, c.mlp_bias),
        array("ffn_sub_norm", size),
    )
    layers = dense_layers(c, part, mlp, norms(hidden, *LLAMA_NORMS), dim)
    return decoder(c, layers, tied=c.tie_word_embeddings)


BITNET_DEFAULTS = {
    key: value
    for key, value in LLAMA_DEFAULTS.items()
    if key not in ("layer_types", "sliding_window", "num_key_value_heads")
}

MODULES: Modules = {"bitnet": (bitnet, BITNET_DEFAULTS)}
