"""Temporary memory of one call of a transformers model: what lives beside weights and caches.

Python frees an array when the last variable that names it goes, so the sets of arrays that are
alive together follow from the modules' text (transformers 5.24.0, ``models/*/modeling_*.py``) and
were checked against real runs (``scripts/record_transformers.py``). Sizes are in elements of the
model's dtype for every token; float32 copies count ``Call.float32`` elements each.
"""

from dataclasses import dataclass

from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
)
from uma.engines.transformers_cache import window_of
from uma.memory.activations import Transient

INT64 = 8
RECURRENT_CHUNK = 64  # modeling_qwen3_next.py, torch_chunk_gated_delta_rule: chunk_size


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``tokens`` new ones a sequence, ``attended`` with those that are cached."""

    tokens: int
    attended: int
    batch_size: int = 1
    dtype_bytes: int = 2
    eager: bool = False
    latent_cache: bool = True
    grouped_experts: bool = True

    @property
    def rows(self) -> int:
        return self.batch_size * self.tokens

    @property
    def float32(self) -> int:
        """Elements that a float32 copy of one element takes; the copy is skipped in float32."""
        return 4 // self.dtype_bytes if self.dtype_bytes < 4 else 0

    def array(self, width: int) -> int:
        """Bytes of an array with ``width`` elements for every new token."""
        return self.rows * width * self.dtype_bytes


def transient(architecture: Architecture, call: Call) -> Transient:
    """The most that a call has alive, in the layer that needs most.

    All along there are the embeddings, the input of the layer, cosines and sines, and masks.
    """
    held = Transient(call.array(architecture.hidden_size) + _rotary(architecture, call))
    held += Transient(0, _masks(architecture, call))
    stages = [
        stage
        for layer in set(architecture.layers)
        for stage in _stages(layer, architecture.hidden_size, call)
    ]
    return held + max(stages, key=lambda stage: stage.total)


def _rotary(architecture: Architecture, call: Call) -> int:
    """Cosines and sines for every token and rotary base; its position and its number as int64."""
    bases = set()
    for layer in architecture.layers:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                local = mixer.sliding_window is not None and "gemma3" in architecture.model_type
                bases.add((local, mixer.head_dim))
            elif isinstance(mixer, LatentAttention):
                bases.add((False, mixer.qk_rope_head_dim))
    tables = call.tokens * 2 * sum(width for _, width in bases) * call.dtype_bytes
    return tables + (call.tokens + call.rows) * INT64


def _masks(architecture: Architecture, call: Call) -> int:
    """Masks over new and attended tokens, made once for all layers of a kind.

    Eager attention adds them, in the model's dtype. Scaled dot-product attention needs none where
    the causal order says it all, else a boolean one (``masking_utils.py``).
    """
    windows = {window_of(layer) for layer in architecture.layers if _attends(layer)}
    if call.eager:
        return len(windows) * call.rows * call.attended * call.dtype_bytes
    return sum(call.rows * call.attended for window in windows if _is_masked(window, call))


def _attends(layer: Layer) -> bool:
    return any(isinstance(mixer, (Attention, LatentAttention)) for mixer in layer.mixers)


def _is_masked(window: int | None, call: Call) -> bool:
    return call.eager or (window is not None and call.tokens > 1 and call.attended > window)


def _stages(layer: Layer, hidden_size: int, call: Call) -> list[Transient]:
    """Sets of arrays that are alive together while one layer runs, its input included.

    The caller still names the layer's input when the residual sum has replaced it.
    """
    normed = Transient(call.array(hidden_size * (1 + 2 * call.float32)))
    stages = [normed]
    mixing = Transient()
    for mixer in layer.mixers:
        inner = _mixer_stages(mixer, layer, call)
        mixing = max([mixing, *inner], key=lambda stage: stage.total)
    stages.append(Transient(call.array(2 * hidden_size)) + mixing)
    beside = Transient(call.array(3 * hidden_size), _kept_scores(layer, call))
    stages += [
        beside + Transient(_feed_forward(part, layer, hidden_size, call))
        for part in layer.feed_forward
    ]
    return stages


def _kept_scores(layer: Layer, call: Call) -> int:
    """Eager attention's scores, which it returns and the layer names to its end."""
    heads = sum(
        mixer.num_attention_heads
        for mixer in layer.mixers
        if call.eager and not isinstance(mixer, Recurrent)
    )
    return call.rows * heads * call.attended * call.dtype_bytes


def _mixer_stages(
    mixer: Attention | LatentAttention | Recurrent, layer: Layer, call: Call
) -> list[Transient]:
    if isinstance(mixer, Attention):
        return _attention_stages(mixer, layer, call)
    if isinstance(mixer, LatentAttention):
        return _latent_stages(mixer, call)
    return [Transient(_recurrent(mixer, call))]


def _attention_stages(mixer: Attention, layer: Layer, call: Call) -> list[Transient]:
    """Norms of queries, rotation of queries and keys, and attention itself.

    Rotation has the array, its products with cosines and with sines, and the rotated halves.
    """
    queries = mixer.num_attention_heads * mixer.head_dim
    keys = mixer.num_key_value_heads * mixer.head_dim
    values = mixer.num_key_value_heads * mixer.v_head_dim
    stages = [
        Transient(call.array(4 * queries + keys + values)),
        Transient(call.array(2 * queries + 4 * keys + values)),
    ]
    if any(parameter.name.endswith("q_norm") for parameter in layer.parameters):
        stages.append(Transient(call.array(queries * (1 + 2 * call.float32))))
    attended = _attended(mixer, window_of(layer), call)
    return [*stages, Transient(call.array(queries), attended)]


def _attended(mixer: Attention, window: int | None, call: Call) -> int:
    """Bytes of scores or output, and of keys and values repeated for every query head.

    Eager attention repeats them always. Scaled dot-product attention does with a mask or with
    heads wider than 256, but for a single token (``sdpa_attention.py``); repeating one head is a
    view.
    """
    heads = mixer.num_attention_heads
    repeated = 0
    if 1 < mixer.num_key_value_heads < heads and _repeats(mixer, window, call):
        width = heads * (mixer.head_dim + mixer.v_head_dim)
        repeated = call.batch_size * call.attended * width * call.dtype_bytes
    return repeated + _scores(heads, mixer.v_head_dim, call, mixer.sinks)


def _scores(heads: int, v_head_dim: int, call: Call, sinks: bool = False) -> int:
    """Scores of eager attention, or the output of a fused one with a float32 for every row.

    Scores stand beside a float32 copy and its softmax; with sinks, beside themselves with the
    sink's column and the softmax of that.
    """
    if not call.eager:
        return call.array(heads * v_head_dim) + call.rows * heads * 4
    copies = 3 * call.dtype_bytes if sinks else call.dtype_bytes * (1 + call.float32) + 4
    return call.rows * heads * call.attended * copies


def _repeats(mixer: Attention, window: int | None, call: Call) -> bool:
    if call.eager:
        return True
    wide = not mixer.head_dim == mixer.v_head_dim <= 256
    return call.tokens > 1 and (wide or _is_masked(window, call))


def _latent_stages(mixer: LatentAttention, call: Call) -> list[Transient]:
    """Queries and the keys and values of all heads, expanded from the latents of all tokens."""
    key = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    heads = mixer.num_attention_heads
    tokens = call.attended if call.latent_cache else call.tokens
    both = key + mixer.qk_nope_head_dim + mixer.v_head_dim
    expanded = call.batch_size * tokens * heads * both * call.dtype_bytes
    queries = call.array(2 * heads * key + mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    return [Transient(queries, expanded + _scores(heads, mixer.v_head_dim, call))]


def _recurrent(mixer: Recurrent, call: Call) -> int:
    """Projections, convolution and gate, their float32 copies, and a state for every chunk."""
    conv = sum(state.shape[-1] for state in mixer.states if "conv" in state.name)
    state = sum(
        state.shape[0] * state.shape[-1] * state.shape[-2]
        for state in mixer.states
        if "conv" not in state.name and len(state.shape) > 2
    )
    chunks = call.batch_size * -(-call.tokens // RECURRENT_CHUNK)
    width = 3 * conv + mixer.inner_size * (3 + 2 * call.float32)
    return call.array(width) + chunks * state * 4


def _feed_forward(part: FeedForward | Experts, layer: Layer, hidden_size: int, call: Call) -> int:
    """Arrays between the projections: gate, up and their product; routed rows for experts.

    A projection that holds gate and up together stays whole until both are used.
    """
    if isinstance(part, FeedForward):
        together = any(p.name.endswith("gate_up_proj") for p in layer.parameters)
        width = (4 if together else 3) if part.gated else 2
        return call.array(width * part.intermediate_size)
    inner = part.moe_intermediate_size * (4 if part.gated else 2)
    if any(p.name.endswith("experts.gate_proj.bias") for p in layer.parameters):
        inner = 9 * part.moe_intermediate_size  # gpt-oss: gathered biases, clamped gate and up
    chosen = part.num_experts_per_tok
    routing = part.num_experts * call.dtype_bytes + 5 * chosen * INT64
    if call.grouped_experts:
        routed = chosen * max(4 * hidden_size, hidden_size + inner)
    else:
        # The loop over experts: a mean share of the rows for each, and a one-hot of int64.
        routed = hidden_size + -(-chosen * (2 * hidden_size + inner) // part.num_experts)
        routing += chosen * part.num_experts * INT64
    shared = hidden_size + 3 * part.shared_intermediate_size
    return call.array(max(routed, shared)) + call.rows * routing
