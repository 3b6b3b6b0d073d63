"""Parameters of the modules that decoders are built from, named as mlx-lm names them.

Each function returns the parameters of one module with names relative to it; ``under`` puts them
in their place. Shapes are those of ``mlx.nn`` (mlx 0.32.4) and of ``mlx_lm/models`` (0.32.2):
matrices ``[output_dims, input_dims]``, experts ``[num_experts, output_dims, input_dims]``,
one-dimensional convolutions ``[channels, kernel, channels / groups]``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from uma.architecture.config import Config
from uma.architecture.layers import Architecture, Experts, FeedForward, Layer, Mixer, Parameter
from uma.errors import CheckpointError

Part = tuple[Parameter, ...]

MAX_LAYER_PARAMETERS = 4_096


def under(prefix: str, *parts: Part) -> Part:
    """The parts as children of ``prefix``."""
    return tuple(
        # All fields in order: dataclasses.replace took most of the time of a large model.
        Parameter(
            f"{prefix}.{p.name}", p.shape, p.kind, p.quantizable, p.bits, p.group_size, p.dtype
        )
        for part in parts
        for p in part
    )


def array(name: str, *shape: int, dtype: Literal["model", "float32"] = "model") -> Part:
    """An array without a quantized form: a norm's weight, a bias, a gate kept as it is."""
    return (Parameter(name, shape, "other", dtype=dtype),)


def linear(
    name: str,
    output_dims: int,
    input_dims: int,
    bias: bool = False,
    *,
    bits: int | None = None,
    quantizable: bool = True,
) -> Part:
    """A matrix, and its bias if it has one.

    ``bits`` is the width that a ``quant_predicate`` forces; mlx-lm gives it in groups of 64.
    """
    group_size = None if bits is None else 64
    weight = Parameter(name, (output_dims, input_dims), "matrix", quantizable, bits, group_size)
    return (weight, *(array(f"{name}.bias", output_dims) if bias else ()))


def unquantized(part: Part, *suffixes: str) -> Part:
    """The matrices whose names end so, or all, kept in full precision by ``quant_predicate``."""
    return tuple(
        replace(p, quantizable=False)
        if p.kind != "other" and (not suffixes or p.name.endswith(suffixes))
        else p
        for p in part
    )


def in_float32(part: Part) -> Part:
    """Parameters that ``cast_predicate`` keeps in float32."""
    return tuple(replace(p, dtype="float32") for p in part)


def router(name: str, num_experts: int, hidden_size: int, bias: bool = False) -> Part:
    """A gate over experts that ``quant_predicate`` keeps at 8 bits in groups of 64."""
    return linear(name, num_experts, hidden_size, bias, bits=8)


def stacked(
    name: str,
    count: int,
    output_dims: int,
    input_dims: int,
    bias: bool = False,
    *,
    quantizable: bool = True,
) -> Part:
    """Matrices of all experts (``SwitchLinear``) or of all heads (``MultiLinear``) in one."""
    weight = Parameter(name, (count, output_dims, input_dims), "matrix", quantizable)
    return (weight, *(array(f"{name}.bias", count, output_dims) if bias else ()))


def switch_glu(
    name: str, num_experts: int, hidden_size: int, intermediate_size: int, bias: bool = False
) -> Part:
    """``SwitchGLU``: the gate, up and down projections of all experts."""
    return under(
        name,
        stacked("gate_proj", num_experts, intermediate_size, hidden_size, bias),
        stacked("up_proj", num_experts, intermediate_size, hidden_size, bias),
        stacked("down_proj", num_experts, hidden_size, intermediate_size, bias),
    )


def switch_mlp(name: str, num_experts: int, hidden_size: int, intermediate_size: int) -> Part:
    """``SwitchMLP``: two matrices an expert, without a gate."""
    return under(
        name,
        stacked("fc1", num_experts, intermediate_size, hidden_size),
        stacked("fc2", num_experts, hidden_size, intermediate_size),
    )


def gated_mlp(name: str, hidden_size: int, intermediate_size: int, bias: bool = False) -> Part:
    """Gate, up and down projections."""
    return under(
        name,
        linear("gate_proj", intermediate_size, hidden_size, bias),
        linear("up_proj", intermediate_size, hidden_size, bias),
        linear("down_proj", hidden_size, intermediate_size, bias),
    )


def layer_norm(name: str, dims: int, bias: bool = True) -> Part:
    """A ``LayerNorm``: weight and bias."""
    return array(name, dims) + (array(f"{name}.bias", dims) if bias else ())


def qkvo(
    name: str,
    hidden_size: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool = False,
    o_bias: bool | None = None,
    v_head_dim: int | None = None,
    o_name: str = "o_proj",
) -> Part:
    """Query, key, value and output projections of an attention."""
    v_dim = v_head_dim or head_dim
    return under(
        name,
        linear("q_proj", num_heads * head_dim, hidden_size, bias),
        linear("k_proj", kv_heads * head_dim, hidden_size, bias),
        linear("v_proj", kv_heads * v_dim, hidden_size, bias),
        linear(o_name, hidden_size, num_heads * v_dim, bias if o_bias is None else o_bias),
    )


def norms(dims: int, *names: str) -> Part:
    """RMS norms of the same width."""
    return tuple(p for name in names for p in array(name, dims))


def layer(
    prefix: str,
    mixers: Sequence[Mixer],
    feed_forward: Sequence[FeedForward | Experts],
    *parts: Part,
) -> Layer:
    """A block with its parameters under ``prefix``.

    Raises:
        CheckpointError: If it has more parameters than a block of any model.
    """
    if sum(map(len, parts)) > MAX_LAYER_PARAMETERS:
        raise CheckpointError(f"config.json gives {prefix} too many parameters")
    return Layer(tuple(mixers), tuple(feed_forward), under(prefix, *parts))


def decoder(
    config: Config,
    layers: Iterable[Layer],
    *,
    tied: bool,
    prefix: str = "model",
    embedding: str = "embed_tokens",
    norm: Part | str = "norm",
    head: str = "lm_head",
    head_bias: bool = False,
    head_bits: int | None = None,
    extra: Part = (),
) -> Architecture:
    """Layers between an embedding, a final norm and, unless ``tied``, a head.

    ``head`` is named from the root, everything else under ``prefix``. ``module`` and
    ``model_type`` are set by ``architecture_from_config``.
    """
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    final = array(norm, hidden_size) if isinstance(norm, str) else norm
    embed = (Parameter(embedding, (vocab_size, hidden_size), "embedding"),)
    lm_head = () if tied else linear(head, vocab_size, hidden_size, head_bias, bits=head_bits)
    return Architecture(
        model_type="",
        module=None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=config.stored("max_position_embeddings"),
        tie_word_embeddings=tied,
        layers=tuple(layers),
        parameters=under(prefix, embed, final) + lm_head + extra,
    )
