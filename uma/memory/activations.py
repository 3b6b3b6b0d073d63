"""Temporary memory of one call of a model: what lives besides weights and caches.

For MLX's CPU backend these are sets of arrays that are alive together, found by following MLX's
order of evaluation over the graphs of mlx-lm 0.32.2 and checked against its peak counter
(``scripts/probe_peak.py``). MLX evaluates depth by depth from the outputs, so an operation runs as
late as it can (mlx 0.32.4, ``transforms.cpp``, ``eval_impl``); and its CPU encoder counts one task
for every ten operations (``backend/cpu/encoder.h``, ``DISPATCHES_PER_TASK``), so up to nine keep
their inputs a little longer than they need, also under a memory limit. The forms include those.

The Metal backend, where attention is fused and memory is freed late, is in
``uma.memory.metal_activations``.
"""

from uma.architecture.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    Recurrent,
)
from uma.frozen import dataclass
from uma.memory.kv_cache import STEP
from uma.quantization import FLOAT32

SINK_SCORES = 3  # scores, scores with the sink's column, and the copy without it again
PAIRS = 3  # a product, its factor, and one that a busy machine frees late (1 run in 10)
SSM_STEP = 256  # mlx-lm, ssm.py, ssm_attn: tokens of a block whose pairs are materialised
BOOL = 1

# Recurrent layers that mlx-lm steps token by token from Python, so that the graph holds a state
# for every token: always (mamba.py, bailing_moe_linear.py), or where there is no Metal kernel
# (gated_delta.py).
STEPPED = frozenset({"mamba", "linear_attention"})
STEPPED_WITHOUT_KERNEL = frozenset({"gated_delta", "kimi_delta"})

# Recurrent layers whose cached convolution inputs are cut from the array of the whole chunk. The
# cut is evaluated last, so every layer's array lives to the end of the call; where the cut is a
# view (no ``mx.contiguous``: lfm2.py, mamba.py, mamba2.py) it lives until the next one.
CUTS_CHUNK = frozenset({"short_conv", "mamba", "mamba2", "gated_delta", "kimi_delta"})
KEEPS_CHUNK = frozenset({"short_conv", "mamba", "mamba2"})


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model: ``tokens`` new ones a sequence after ``cached_tokens``.

    ``expanded`` says that latent attention caches whole heads; ``unfused`` that the model file
    computes attention itself, with soft-capped scores.
    """

    tokens: int
    cached_tokens: int = 0
    batch_size: int = 1
    activation_bytes: int = 2
    kv_bits: int | None = None
    kv_group_size: int = 64
    expanded: bool = False
    unfused: bool = False

    @property
    def rows(self) -> int:
        return self.batch_size * self.tokens

    def array(self, width: int) -> int:
        """Bytes of an activation with ``width`` elements for every token."""
        return self.rows * width * self.activation_bytes


@dataclass(frozen=True, slots=True)
class Transient:
    """Bytes alive together: attention's scores and masks apart from all others."""

    activations: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.attention

    def __add__(self, other: "Transient") -> "Transient":
        return Transient(self.activations + other.activations, self.attention + other.attention)


def largest(parts: list[Transient]) -> Transient:
    """The one that needs most memory."""
    return max(parts, key=lambda part: part.total, default=Transient())


def attended_tokens(mixer: Mixer, call: Call) -> int:
    """Keys that the scores of one query span: the cached ones that are kept, and the new ones.

    A rotating cache keeps ``sliding_window - 1`` old tokens beside a chunk, and Llama 4's chunked
    one ``attention_chunk_size`` (mlx-lm, ``cache.py``).
    """
    cached = call.cached_tokens
    if isinstance(mixer, Attention):
        if mixer.sliding_window is not None:
            cached = min(cached, mixer.sliding_window - 1)
        elif mixer.attention_chunk_size is not None:
            cached = min(cached, mixer.attention_chunk_size)
    return cached + call.tokens


def score_bytes(mixer: Mixer, call: Call) -> int:
    """One matrix of attention scores, ``[batch, heads, tokens, attended]``."""
    if isinstance(mixer, Recurrent):
        return 0
    heads = mixer.num_attention_heads
    return call.rows * heads * attended_tokens(mixer, call) * call.activation_bytes


def mask_bytes(mixer: Mixer, call: Call) -> int:
    """A boolean mask ``[tokens, attended]``; a single token needs none."""
    if isinstance(mixer, Recurrent) or call.tokens == 1:
        return 0
    return call.tokens * attended_tokens(mixer, call) * BOOL


def query_width(mixer: Attention | LatentAttention) -> int:
    if isinstance(mixer, Attention):
        return mixer.num_attention_heads * mixer.head_dim
    return mixer.num_attention_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)


def output_width(mixer: Attention | LatentAttention) -> int:
    return mixer.num_attention_heads * mixer.v_head_dim


def kv_widths(mixer: Attention | LatentAttention) -> tuple[int, int]:
    """Elements of the new keys and of the new values of one token, before any caching."""
    if isinstance(mixer, Attention):
        heads = mixer.num_key_value_heads
        return heads * mixer.head_dim, heads * mixer.v_head_dim
    heads = mixer.num_attention_heads
    return heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim), heads * mixer.v_head_dim


def held_bytes(layer: Layer, call: Call) -> int:
    """What a layer keeps alive to the end of the call: what its last states are computed from.

    States that no later layer needs are evaluated last. They take the inputs of the convolution;
    for Mamba-2 also its outputs, the scaled inputs in float32, and the decays between the tokens of
    the last block (mlx-lm 0.32.2, ``ssm.py``, ``ssm_attn``).
    """
    held = 0
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent) and mixer.kind in CUTS_CHUNK:
            held += call.array(_conv_width(mixer))
            if mixer.kind == "mamba2" and call.tokens > 1:
                held += call.array(_conv_width(mixer)) + call.rows * mixer.inner_size * FLOAT32
                held += pair_bytes(mixer, call, (call.tokens - 1) % SSM_STEP + 1)
    return held


def kept_bytes(layer: Layer, call: Call) -> int:
    """What a layer's cache keeps alive until its next call, beyond its states."""
    return sum(
        call.array(_conv_width(mixer))
        for mixer in layer.mixers
        if isinstance(mixer, Recurrent) and mixer.kind in KEEPS_CHUNK
    )


def pair_bytes(mixer: Recurrent, call: Call, block: int | None = None) -> int:
    """One of Mamba-2's float32 arrays over the pairs of tokens of a block, for every head."""
    block = min(SSM_STEP, call.tokens) if block is None else block
    return call.batch_size * mixer.num_heads * block * block * FLOAT32


def _conv_width(mixer: Recurrent) -> int:
    return sum(state.shape[-1] for state in mixer.states if "conv" in state.name)


def layer_transient(layer: Layer, hidden_size: int, call: Call) -> Transient:
    """The most that one layer has alive on the CPU backend, its residual stream included."""
    mixing = Transient()
    for mixer in layer.mixers:
        mixing += mixer_transient(mixer, hidden_size, call)
    stages = [
        mixing,
        *(
            _feed_forward(part, hidden_size, has_expert_biases(layer), call)
            for part in layer.feed_forward
        ),
    ]
    residual = Transient(call.array(hidden_size))
    return residual + largest(stages)


def mixer_transient(mixer: Mixer, hidden_size: int, call: Call) -> Transient:
    """The most that a token mixer has alive on the CPU backend."""
    if isinstance(mixer, Recurrent):
        return _recurrent(mixer, hidden_size, call)
    stages = [_projected(mixer, hidden_size, call)]
    if isinstance(mixer, Attention) or call.expanded or call.tokens == 1:
        stages.append(_scored(mixer, call))
    else:
        stages.append(_latent(mixer, call))
    return largest(stages)


def _projected(mixer: Attention | LatentAttention, hidden_size: int, call: Call) -> Transient:
    """The normed input, and queries, keys and values while they are rotated.

    Rotating makes four half-size products beside its input; norms of 16-bit activations go
    through two float32 copies.
    """
    keys, values = kv_widths(mixer)
    queries = query_width(mixer)
    elements = 3 * (queries + keys) + values
    if call.activation_bytes < FLOAT32:
        elements += 2 * queries
    return Transient(call.array(hidden_size + elements))


def _scored(mixer: Attention | LatentAttention, call: Call) -> Transient:
    """Softmax in place over one matrix of scores, with queries, mask and output beside it.

    A sink column makes the scores a new array, and its removal a copy. Expanded latent attention
    keeps the projection that holds keys and values until the values are cached. The values of a
    first chunk of whole cache steps are the projection itself, which the product with the scores
    copies for every head.
    """
    scores = score_bytes(mixer, call)
    if isinstance(mixer, Attention) and mixer.sinks:
        scores *= SINK_SCORES
    beside = call.array(query_width(mixer) + output_width(mixer)) + _unpacked(mixer, call)
    if isinstance(mixer, LatentAttention):
        heads = mixer.num_attention_heads
        beside += call.array(heads * (mixer.qk_nope_head_dim + mixer.v_head_dim))
    if call.cached_tokens == 0 and (call.tokens % STEP == 0 or _slides(mixer)):
        beside += call.array(output_width(mixer))
    return Transient(beside, scores + mask_bytes(mixer, call))


def _unpacked(mixer: Attention | LatentAttention, call: Call) -> int:
    """Quantized keys repeated for every query head: MLX's CPU product wants them contiguous."""
    if call.kv_bits is None or not call.cached_tokens or not isinstance(mixer, Attention):
        return 0
    scales = 2 * call.activation_bytes * (mixer.head_dim // call.kv_group_size)
    one = mixer.head_dim * call.kv_bits // 8 + scales
    return call.batch_size * mixer.num_attention_heads * attended_tokens(mixer, call) * one


def _slides(mixer: Mixer) -> bool:
    return isinstance(mixer, Attention) and mixer.sliding_window is not None


def _latent(mixer: LatentAttention, call: Call) -> Transient:
    """Rotary scores as an additive mask, scores, and the keys and values of all heads expanded.

    mlx-lm 0.32.2, ``deepseek_v3.py``.
    """
    expanded = (
        call.batch_size * attended_tokens(mixer, call) * call.activation_bytes
    ) * mixer.num_attention_heads
    keys, values = expanded * mixer.qk_nope_head_dim, expanded * mixer.v_head_dim
    return Transient(
        call.array(query_width(mixer)) + keys + values,
        2 * score_bytes(mixer, call) + mask_bytes(mixer, call),
    )


def _recurrent(mixer: Recurrent, hidden_size: int, call: Call) -> Transient:
    """Projections and convolution, and either a state for every token or pairs within blocks."""
    conv = _conv_width(mixer)
    inner = mixer.inner_size
    if mixer.kind in STEPPED | STEPPED_WITHOUT_KERNEL:
        state = sum(_elements(s.shape) for s in mixer.states if "conv" not in s.name)
        activations = call.array(hidden_size + 2 * conv + 3 * inner)
        return Transient(activations + call.rows * state * FLOAT32)
    activations = call.array(hidden_size + conv + 2 * inner)
    if mixer.kind == "mamba2":
        return Transient(activations, PAIRS * pair_bytes(mixer, call))
    return Transient(activations + call.array(2 * conv))


def _feed_forward(
    part: FeedForward | Experts, hidden_size: int, biased: bool, call: Call
) -> Transient:
    """The normed input and the arrays between the projections, routed rows included."""
    if isinstance(part, FeedForward):
        return Transient(call.array(hidden_size + _between(part.intermediate_size, part.gated)))
    width = part.moe_intermediate_size
    between = _between(width, part.gated) + (2 * width if biased else 0)
    routed = max(hidden_size + between, 3 * hidden_size + width)
    shared = _between(part.shared_intermediate_size, part.gated)
    router = call.rows * part.num_experts * (call.activation_bytes + 2 * FLOAT32)
    return Transient(
        call.array(hidden_size + max(part.num_experts_per_tok * routed, shared)) + router
    )


def has_expert_biases(layer: Layer) -> bool:
    """Whether the experts add a bias, gathered for every routed row."""
    return any(p.name.endswith("experts.up_proj.bias") for p in layer.parameters)


def _between(intermediate_size: int, gated: bool) -> int:
    """Elements a token between the projections: gate, up, and the activation of the gate.

    The last is in place where MLX finds a C++ compiler to fuse it, a third array where not.
    """
    return (3 if gated else 2) * intermediate_size


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
