"""Temporary memory of one call on MLX's Metal backend. Derived from the source; not run on a Mac.

Attention is fused for most head sizes, so no scores exist. But memory is freed late: a command
buffer keeps the inputs and outputs of its operations until the GPU has completed it, and MLX
encodes up to ten of them ahead. A command buffer is closed when the arrays in it exceed 40 or 50 x
2^20 *elements* or it has 40 or 50 operations. So what is alive is what the last eleven command
buffers allocated: for a long prompt the temporaries of several layers. (mlx 0.32.4:
``backend/metal/eval.cpp``, ``backend/metal/device.cpp``, ``transforms.cpp``.)

A layer is written here as the list of its operations, each with what it allocates and what it
touches; counting command buffers over that list gives the peak.
"""

import sys
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import add, sub

from uma.architecture.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    Recurrent,
)
from uma.memory.activations import (
    STEPPED,
    Call,
    Transient,
    attended_tokens,
    has_expert_biases,
    kv_widths,
    mixer_transient,
    output_width,
    query_width,
)
from uma.memory.metal_mamba2 import mamba2
from uma.quantization import FLOAT32

IN_FLIGHT = 11  # command buffers: transforms.cpp, MAX_ACTIVE_TASKS = 10, checked after one more
MAX_ELEMENTS = 50 << 20  # device.cpp: max_mb_per_buffer of Max and Ultra chips, 40 of the others;
MAX_OPERATIONS = 50  # it counts elements, because CommandEncoder adds array.data_size()

STEADY_LAYERS = 40  # more than the buffers in flight span: at least 16 operations a layer

# scaled_dot_product_attention.cpp, use_fallback: (query, value) head sizes with a fused kernel
# that is used, for more than 8 queries and for fewer. 192 and 256 have one that is slower.
FUSED_MANY = frozenset({64, 72, 80, 96, 128})
FUSED_FEW = frozenset({64, 96, 128, 256})
FEW_QUERIES = 8
MAX_GROUPED_QUERIES = 32


def is_fused(mixer: Attention, call: Call) -> bool:
    """Whether Metal computes this attention without a matrix of scores."""
    if call.unfused or call.kv_bits is not None:
        return False
    if mixer.head_dim != mixer.v_head_dim:
        return call.tokens <= FEW_QUERIES and (mixer.head_dim, mixer.v_head_dim) == (192, 128)
    if call.tokens > FEW_QUERIES:
        return mixer.head_dim in FUSED_MANY
    group = mixer.num_attention_heads // mixer.num_key_value_heads
    return mixer.head_dim in FUSED_FEW and call.tokens * group <= MAX_GROUPED_QUERIES


Operation = tuple[tuple[tuple[int, int], ...], int, int]
"""Arrays touched, each with its elements; bytes allocated, and those of attention."""
PARAMETERS = -1  # the number of an array of weights, which only one operation of a layer reads


class LayerTape(tuple[Operation, ...]):
    """The operations of a layer in their order."""

    @cached_property
    def counted(self) -> list[tuple[int, int, tuple[tuple[int, int], ...], int, int]]:
        """What each adds to a command buffer: elements, parameters, bytes, attention's bytes.

        Between them are the arrays that an operation before it touched, with the last of those and
        their elements: they count again in another command buffer.
        """
        last: dict[int, int] = {}
        found = []
        for place, (touched, more, scores) in enumerate(self):
            fresh = parameters = 0
            again = []
            for array, size in touched:
                if array == PARAMETERS:
                    parameters += size
                elif array not in last:
                    fresh += size
                elif last[array] != place:
                    again.append((last[array], size))
                last[array] = place
            found.append((fresh, parameters, tuple(again), more, scores))
        return found

    def elements(self, weight_elements: float) -> int:
        """Those of all operations in one command buffer."""
        fresh, weights, known = self._elements
        if weight_elements not in known:
            known[weight_elements] = fresh + sum([int(n * weight_elements) for n in weights])
        return known[weight_elements]

    @cached_property
    def _elements(self) -> tuple[int, list[int], dict[float, int]]:
        counted = self.counted
        return sum([one[0] for one in counted]), [one[1] for one in counted if one[1]], {}

    @cached_property
    def size_bytes(self) -> tuple[int, int]:
        """Bytes of all operations, and those of attention."""
        return sum(more for *_, more, _ in self.counted), sum(held for *_, held in self.counted)


class Tape:
    """Operations of a layer, recorded in order."""

    def __init__(self, call: Call, weight_elements: float) -> None:
        self.call, self.weight_elements = call, weight_elements
        self.operations: list[Operation] = []
        self.arrays: list[int] = []

    def array(self, elements: int) -> int:
        self.arrays.append(elements)
        return len(self.arrays) - 1

    def run(
        self,
        width: int,
        *inputs: int,
        weights: int = 0,
        elements: int | None = None,
        attention: bool = False,
        in_place: int | None = None,
        dtype_bytes: int | None = None,
    ) -> int:
        """An operation with ``width`` elements a token as output, or ``elements`` in all.

        ``weights`` are the parameters that it reads. With ``in_place`` it writes over that input.
        ``dtype_bytes`` is the width of an element where it is not that of the activations.
        """
        elements = self.call.rows * width if elements is None else elements
        output = self.array(elements) if in_place is None else in_place
        arrays = self.arrays
        parts = [(i, arrays[i]) for i in (*inputs, output)]
        if weights:
            parts.append((PARAMETERS, int(weights * self.weight_elements)))
        touched = tuple(parts)
        size = elements * (dtype_bytes or self.call.activation_bytes)
        size = size if in_place is None else 0
        self.operations.append((touched, 0, size) if attention else (touched, size, 0))
        return output

    def keep(self, size_bytes: int) -> None:
        """Count bytes that the last operation read and that are free once it has run."""
        touched, activations, attention = self.operations[-1]
        self.operations[-1] = (touched, activations + size_bytes, attention)


def layer_tape(
    layer: Layer, hidden_size: int, call: Call, weight_elements: float, grown_bytes: int = 0
) -> LayerTape:
    """The operations of one layer on Metal.

    ``weight_elements`` is the number of array elements per parameter: 1 for 16-bit weights, about
    0.16 for 4-bit ones packed in 32-bit words. ``grown_bytes`` are the layer's keys and values if
    its cache is reallocated by this call: the old arrays and the appended zeros.
    """
    tape = Tape(call, weight_elements)
    residual = tape.array(call.rows * hidden_size)
    for mixer in layer.mixers:
        mixed = _mix(tape, mixer, hidden_size, residual, grown_bytes)
        residual = tape.run(hidden_size, residual, in_place=mixed)
    for part in layer.feed_forward:
        normed = tape.run(hidden_size, residual)
        if isinstance(part, FeedForward):
            out = _dense(tape, part.intermediate_size, part.gated, hidden_size, normed)
        else:
            out = _experts(tape, part, hidden_size, normed, has_expert_biases(layer))
        residual = tape.run(hidden_size, residual, in_place=out)
    return LayerTape(tape.operations)


def _mix(tape: Tape, mixer: Mixer, hidden_size: int, residual: int, grown_bytes: int) -> int:
    normed = tape.run(hidden_size, residual)
    if isinstance(mixer, Recurrent):
        return _recurrent(tape, mixer, hidden_size, normed)
    keys, values = kv_widths(mixer)
    if isinstance(mixer, LatentAttention) and not tape.call.expanded:
        keys, values = mixer.kv_lora_rank, mixer.qk_rope_head_dim
    queries = query_width(mixer)
    q = tape.run(queries, normed, weights=queries * hidden_size)
    new = [tape.run(width, normed, weights=width * hidden_size) for width in (keys, values)]
    q, new[0] = tape.run(queries, q), tape.run(keys, new[0])  # rotated; norms are in place
    slots = tape.call.batch_size * attended_tokens(mixer, tape.call)
    caches = [tape.array(slots * width) for width in (keys, values)]
    for cache, added in zip(caches, new, strict=True):
        if grown_bytes:
            tape.run(0, tape.array(tape.arrays[cache]), in_place=cache)
            tape.keep(grown_bytes // 2)
        tape.run(0, added, in_place=cache)
    if isinstance(mixer, Attention) or tape.call.expanded:
        out = _attend(tape, mixer, q, caches)
    else:
        out = _latent(tape, mixer, q)
    return tape.run(hidden_size, out, weights=output_width(mixer) * hidden_size)


def _attend(tape: Tape, mixer: Attention | LatentAttention, q: int, caches: list[int]) -> int:
    width = output_width(mixer)
    if isinstance(mixer, Attention) and is_fused(mixer, tape.call):
        return tape.run(width, q, *caches)
    elements = mixer.num_attention_heads * tape.call.rows * attended_tokens(mixer, tape.call)
    q = tape.run(query_width(mixer), q)
    scores = tape.run(0, q, caches[0], elements=elements, attention=True)
    for _ in ("mask", "softmax"):
        tape.run(0, scores, in_place=scores)
    out = tape.run(width, scores, caches[1])
    return tape.run(width, out)


def _latent(tape: Tape, mixer: LatentAttention, q: int) -> int:
    """Rotary scores are an array; keys and values of all heads are expanded (deepseek_v3.py)."""
    call, heads = tape.call, mixer.num_attention_heads
    attended = attended_tokens(mixer, call)
    elements = heads * call.rows * attended
    scores = tape.run(0, q, elements=elements, attention=True)
    tape.run(0, scores, in_place=scores)
    expand = call.batch_size * heads * attended if call.tokens > 1 else 0
    keys = tape.run(0, elements=expand * mixer.qk_nope_head_dim)
    values = tape.run(0, elements=expand * mixer.v_head_dim)
    return tape.run(heads * mixer.v_head_dim, q, keys, values, scores)


def _recurrent(tape: Tape, mixer: Recurrent, hidden_size: int, normed: int) -> int:
    """Projection, convolution, recurrence in one kernel or, for Mamba-1, as on the CPU."""
    if mixer.kind == "mamba2":
        return mamba2(tape, mixer, hidden_size, normed)
    conv = sum(state.shape[-1] for state in mixer.states if "conv" in state.name)
    inner = mixer.inner_size
    x = tape.run(conv + inner, normed, weights=(conv + inner) * hidden_size)
    for _ in ("joined", "with the former inputs", "convolved"):
        x = tape.run(conv, x)
    x = tape.run(conv + inner, x)
    if mixer.kind in STEPPED:
        part = mixer_transient(mixer, hidden_size, tape.call)
        tape.keep(part.total)
    x = tape.run(inner, x)
    return tape.run(hidden_size, x, weights=inner * hidden_size)


def _dense(tape: Tape, width: int, gated: bool, hidden_size: int, normed: int) -> int:
    up = tape.run(width, normed, weights=width * hidden_size)
    if gated:
        gate = tape.run(width, normed, weights=width * hidden_size)
        tape.run(width, gate, in_place=up)
    else:
        tape.run(width, up, in_place=up)
    return tape.run(hidden_size, up, weights=width * hidden_size)


def _experts(tape: Tape, part: Experts, hidden_size: int, normed: int, biased: bool) -> int:
    """Rows sorted by expert, their projections, and back; the shared experts beside.

    A bias is gathered for every row before it is added (mlx-lm 0.32.2, ``switch_layers.py``).
    """
    chosen, width = part.num_experts_per_tok, part.moe_intermediate_size
    for size in (tape.call.activation_bytes, FLOAT32, FLOAT32):  # logits, softmax, partition
        tape.run(part.num_experts * size // tape.call.activation_bytes, normed)
    stacked = part.num_experts * width * hidden_size

    def project(output: int, rows: int) -> int:
        found = tape.run(chosen * output, rows, weights=stacked)
        if biased:
            tape.run(0, tape.run(chosen * output), in_place=found)
        return found

    rows = tape.run(chosen * hidden_size, normed)
    up = project(width, rows)
    if part.gated:
        gate = project(width, rows)
        tape.run(chosen * width, gate, in_place=up)
    down = project(hidden_size, up)
    unsorted = tape.run(chosen * hidden_size, down)
    tape.run(chosen * hidden_size, in_place=unsorted)
    out = tape.run(hidden_size, unsorted)
    if part.shared_intermediate_size:
        shared = _dense(tape, part.shared_intermediate_size, part.gated, hidden_size, normed)
        out = tape.run(hidden_size, out, in_place=shared)
    return out


def run_ahead(
    layers: Sequence[LayerTape], residual_bytes: int, weight_elements: float = 1.0
) -> Transient:
    """The most that the command buffers in flight hold while ``layers`` run one after another.

    ``weight_elements`` are array elements for each of the weights that the tapes tell.
    Equal layers are the same object: what one does to the open buffer depends on it and on what
    that counts already, and comes again. Where all are equal, nothing new comes once the same
    buffers have come twice and are no longer in flight.
    """
    activations, attention, counted = [residual_bytes], [0], (0, 0)
    known: dict[tuple[int, tuple[int, int]], _Step] = {}
    alike = len(set(map(id, layers))) == 1
    came: tuple[int, tuple[int, int]] | None = None
    end = sys.maxsize
    for tape in layers[:STEADY_LAYERS]:
        key = (id(tape), counted)
        step = known.get(key)
        if step is None:
            step = known[key] = _encoded(tape, weight_elements, *counted)
        elif alike and came is None:
            came = key
        elif key == came and end == sys.maxsize:
            end = len(activations) + IN_FLIGHT
        more, scores, counted = step
        activations[-1] += more[0]
        attention[-1] += scores[0]
        if len(more) > 1:
            activations += more[1:]
            attention += scores[1:]
            if len(activations) > end:
                break
    width = min(IN_FLIGHT, len(activations))
    before = [0, *accumulate(map(add, activations, attention))]
    windows = list(map(sub, before[width:], before))
    first = windows.index(max(windows))
    buffers = slice(first, first + width)
    return Transient(sum(activations[buffers]), sum(attention[buffers]))


_Step = tuple[list[int], list[int], tuple[int, int]]


def _encoded(tape: LayerTape, weight_elements: float, operations: int, elements: int) -> _Step:
    """What a layer adds to the open buffer and to those that it opens, attention's bytes apart.

    ``operations`` and ``elements`` are those of the open buffer before it; after it they come last.
    """
    whole = elements + tape.elements(weight_elements)
    if operations + len(tape) <= MAX_OPERATIONS and whole <= MAX_ELEMENTS:
        size, scored = tape.size_bytes
        return [size], [scored], (operations + len(tape), whole)
    activations, attention = [0], [0]
    size = scored = first = 0
    for place, (fresh, parameters, again, more, scores) in enumerate(tape.counted):
        operations += 1
        elements += fresh
        if parameters:
            elements += int(parameters * weight_elements)
        for before, held in again:
            if before < first:
                elements += held
        size += more
        scored += scores
        if operations > MAX_OPERATIONS or elements > MAX_ELEMENTS:
            activations[-1], attention[-1] = size, scored
            activations.append(0)
            attention.append(0)
            operations = elements = size = scored = 0
            first = place + 1
    activations[-1], attention[-1] = size, scored
    return activations, attention, (operations, elements)
