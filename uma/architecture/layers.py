"""What a layer is made of: its token mixers, its feed-forward parts, its parameters.

Field names are those of ``config.json`` and mlx-lm. A layer lists its mixers because some models
run two side by side (Falcon-H1: Mamba-2 and attention).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Literal

from uma.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention that caches keys and values of every head.

    ``sliding_window`` is the number of latest tokens that a query sees; ``attention_chunk_size``
    is Llama 4's block within which it looks. ``kv_source`` is the layer whose cache this layer
    reads instead of holding its own (Gemma 3n and 4). ``index_head_dim`` is the width of the key
    that an indexer of blocks caches (MiniMax M3).
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    sinks: bool = False
    kv_source: int | None = None
    index_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): per token one latent and one shared rotary key.

    ``index_head_dim`` is the width of the key that a sparse-attention indexer caches, if there is
    one (DeepSeek V3.2). Whether an engine caches the latent or the expanded heads is the engine's
    rule, not the model's.

    DeepSeek V4 and V4.1 keep every latent of the latest ``sliding_window`` tokens only, and of the
    others one for each ``compress_ratio`` tokens (``None``: none); the same ratio holds for the
    indexer's keys, of which one stands for ``index_compress_ratio`` tokens elsewhere (GLM 5 Next).
    ``kv_source`` is the layer whose compressed latents this layer reads instead of its own.
    """

    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_head_dim: int | None = None
    index_n_heads: int | None = None
    index_topk: int | None = None
    sliding_window: int | None = None
    compress_ratio: int | None = None
    index_compress_ratio: int | None = None
    kv_source: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """One array of constant size that a recurrent layer keeps per sequence (no batch axis).

    Where mlx-lm keeps it as a view of a larger array, ``per_token`` elements for each token of
    the last call stay in memory with it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["model", "float32"]
    per_token: int = 0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer whose memory of the past does not grow: linear attention, Mamba, convolution."""

    kind: str
    states: tuple[State, ...]
    num_heads: int = 1
    head_dim: int = 0
    inner_size: int = 0


Mixer = Attention | LatentAttention | Recurrent


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense feed-forward part; ``gated`` ones have an up and a gate projection."""

    intermediate_size: int
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token runs ``num_experts_per_tok`` of them and the shared ones."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    gated: bool = True


ParameterKind = Literal["matrix", "embedding", "other"]
"""``matrix`` and ``embedding`` have a quantized form in MLX; ``other`` has none."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One stored array.

    ``name`` is its path in mlx-lm's module without ``.weight``; experts are stacked as
    ``[num_experts, output_dims, input_dims]``. ``quantizable`` is false where mlx-lm's
    ``quant_predicate`` keeps a matrix in full precision; ``bits`` is the width that it forces
    instead of the asked one (Qwen3-MoE's router: 8). ``dtype`` is ``float32`` where the module
    itself insists on it, ``uint8`` where several numbers are packed in a byte (BitNet).
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    quantizable: bool = True
    bits: int | None = None
    group_size: int | None = None
    dtype: Literal["model", "float32", "uint8"] = "model"

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True, slots=True)
class Layer:
    """One block of the decoder."""

    mixers: tuple[Mixer, ...]
    feed_forward: tuple[FeedForward | Experts, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)  # without slots: what is counted once is kept
class Architecture:
    """A decoder as its layers.

    ``parameters`` are those outside the layers: embeddings, final norm, head. ``module`` is the
    file of ``mlx_lm.models`` that runs it, or ``None`` where mlx-lm has none.

    ``vision_parameters`` are those of a vision tower and its projector, ``mtp_parameters`` those
    of layers for multi-token prediction: parts of the published model that ``parameters`` leaves
    out. 0 if it has none, ``None`` if it has some and the config does not decide how many.
    """

    model_type: str
    module: str | None
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()
    vision_parameters: int | None = 0
    mtp_parameters: int | None = 0

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """For every layer the first of its kind: the same mixers and feed-forward parts.

        Kinds are few, and told by identity.
        """
        first: dict[object, Layer] = {}
        return tuple(
            first.setdefault((layer.mixers, layer.feed_forward), layer) for layer in self.layers
        )

    @cached_property
    def alike(self) -> tuple[Layer, ...]:
        """For every layer the first whose parameters are the same but for their names."""
        first: dict[object, Layer] = {}
        return tuple(
            first.setdefault(tuple(map(_STORED_AS, layer.parameters)), layer)
            for layer in self.layers
        )

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, each expert counted."""
        return sum(count * _elements(some) for some, count in self.counted_parameters)

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest one; experts are one array."""
        return max(p.size for some, _ in self.counted_parameters for p in some)

    @cached_property
    def counted_parameters(self) -> tuple[tuple[tuple[Parameter, ...], int], ...]:
        """Those outside the layers once, those of each kind of layer as often as there are."""
        layers = {id(layer): layer for layer in self.alike}
        counts = Counter(map(id, self.alike))
        inside = ((layers[key].parameters, count) for key, count in counts.items())
        return ((self.parameters, 1), *inside)


_STORED_AS = attrgetter("shape", "kind", "quantizable", "bits", "group_size", "dtype")


def _elements(some: Iterable[Parameter]) -> int:
    return sum(p.size for p in some)


def parameters(architecture: Architecture) -> Iterator[Parameter]:
    """Every parameter: those outside the layers, then those of each layer."""
    yield from architecture.parameters
    for layer in architecture.layers:
        yield from layer.parameters
