"""llama.cpp's compute buffer: its largest graph, on shapes alone.

llama.cpp reserves the buffer once, for a whole micro-batch at the end of a full context whose
every token has logits (b11434, ``src/llama-context.cpp``, ``sched_reserve``). The operations here
are those of ``src/llama-graph.cpp`` and ``src/models/`` that have results of their own, in the
order that llama.cpp adds them. Results are 32-bit.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
)
from uma.engines.llama_cpp_alloc import Graph, buffer_bytes
from uma.engines.llama_cpp_cache import (
    Cells,
    attentions,
    cache_type,
    ignores_window,
    key_width,
    value_width,
    window_of,
)
from uma.quantization import GGUF_TYPES

FLOAT32, FLOAT16, INDEX = 4, 2, 8
PIPELINE_COPIES = 4  # ggml/CMakeLists.txt, GGML_SCHED_MAX_COPIES
ENDS = 8  # layers kept at either end
ROTATED_DIM = 64  # llama-kv-cache.cpp: quantized caches of such heads are rotated

Placement = Literal["host", "device"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the graph is reserved for.

    On the ``device`` the embeddings arrive as a copy; on the ``host`` they are looked up within
    the graph, beside an unused input for embeddings given instead of tokens. Several devices
    work on ``PIPELINE_COPIES`` micro-batches at a time (``GGML_SCHED_MAX_COPIES``).
    """

    tokens: int
    held: Cells
    flash_attn: bool
    type_k: str = "f16"
    type_v: str = "f16"
    placement: Placement = "device"
    num_devices: int = 1

    def rows(self, width: int) -> int:
        """Bytes of ``width`` numbers a token."""
        return self.tokens * width * FLOAT32


@dataclass(frozen=True, slots=True)
class _Inputs:
    keys: int
    values: int
    masks: dict[bool, int]
    outputs: int
    positions: int


def compute_bytes(architecture: Architecture, batch: MicroBatch) -> int:
    """Bytes of the compute buffers of the devices that run the layers."""
    return sum(device_compute_bytes(architecture, batch))


def device_compute_bytes(architecture: Architecture, batch: MicroBatch) -> list[int]:
    """The same by device: the first has the embeddings, the last has the head."""
    if batch.num_devices == 1:
        return [_device_bytes(architecture, batch, is_first=True, has_head=True)]
    first = _device_bytes(architecture, batch, is_first=True, has_head=False)
    others = batch.num_devices - 2
    middle = _device_bytes(architecture, batch, is_first=False, has_head=False) if others else 0
    last = _device_bytes(architecture, batch, is_first=False, has_head=True)
    return [first, *[middle] * others, last]


def _device_bytes(
    architecture: Architecture, batch: MicroBatch, *, is_first: bool, has_head: bool
) -> int:
    graph = Graph()
    stream, inputs = _inputs(graph, architecture, batch)
    kept = _pipelined(graph, architecture, batch, is_first) if batch.num_devices > 1 else []
    layers = _representative(architecture.layers)
    for index, layer in enumerate(layers, start=1):
        outputs = inputs.outputs if index == len(layers) else None
        stream = _layer(graph, architecture, layer, batch, stream, inputs, outputs)
    if has_head:
        graph.op(batch.rows(architecture.vocab_size), graph.inplace(stream))
    graph.op(0, *kept)
    return buffer_bytes(graph)


def _pipelined(
    graph: Graph, architecture: Architecture, batch: MicroBatch, is_first: bool
) -> list[int]:
    """The copies of all that comes from elsewhere, of which nothing is written over.

    The first device gets the embeddings in both forms and their sum; the others the stream and its
    norm, for one of the reserved graphs leaves the norm to the device before (b11434,
    ``ggml-backend.cpp``, ``ggml_backend_sched_split_graph``; ``llama-context.cpp``,
    ``graph_get_cb``).
    """
    hidden = batch.rows(architecture.hidden_size)
    inputs = [index for index, node in enumerate(graph.nodes) if node.is_input]
    sizes = [graph.nodes[index].size for index in inputs]
    copies = sizes * (PIPELINE_COPIES - 1) + [hidden] * PIPELINE_COPIES * (2 if is_first else 1)
    for size in copies:
        graph.input(size)
    return [*inputs, graph.op(hidden)] if is_first else inputs


def _representative(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers enough to reach the peak: the first, the last, and one of each kind between.

    Results of a layer are freed within the next one, so the pattern of layers repeats in place.
    """
    if len(layers) <= 2 * ENDS:
        return layers
    between = {(layer.mixers, layer.feed_forward): layer for layer in layers[ENDS:-ENDS]}
    return (*layers[:ENDS], *between.values(), *layers[-ENDS:])


def host_compute_bytes(architecture: Architecture, batch: MicroBatch) -> int:
    """Bytes of the host's buffer when every layer is on the device: the inputs of the graph.

    Embeddings, in two forms, positions and masks.
    """
    graph = Graph()
    _inputs(graph, architecture, batch)
    return buffer_bytes(graph) + batch.rows(architecture.hidden_size)


def _inputs(graph: Graph, architecture: Architecture, batch: MicroBatch) -> tuple[int, _Inputs]:
    """The token stream, and the inputs that the layers share."""
    hidden = batch.rows(architecture.hidden_size)
    on_host = batch.placement == "host"
    tokens = graph.input(batch.tokens * 4) if on_host else None
    embeddings = graph.input(hidden)
    mixed = tuple(map(graph.input, (batch.tokens * 4, batch.tokens * INDEX, hidden) * on_host))
    positions = graph.input(batch.tokens * 4)
    mixers, ignored = list(attentions(architecture)), ignores_window(architecture)
    widest = 1 if batch.flash_attn else max((value_width(m) for m in mixers), default=0)
    keys = graph.input(batch.tokens * INDEX)
    values = graph.input(batch.tokens * INDEX * widest)
    windows = sorted({window_of(mixer, ignored) is not None for mixer in mixers})
    size = FLOAT16 if batch.flash_attn else FLOAT32
    masks = {
        windowed: graph.input(
            batch.tokens * (batch.held.window if windowed else batch.held.full) * size
        )
        for windowed in windows
    }
    outputs = graph.input(batch.tokens * 4)
    stream = embeddings
    if tokens is not None:
        stream = graph.op(hidden, tokens)
        looked_up = graph.op(hidden, mixed[0])
        graph.op(hidden, mixed[2])  # a copy to write into, which nothing frees
        graph.op(0, looked_up, mixed[1])
    return stream, _Inputs(keys, values, masks, outputs, positions)


def _layer(
    graph: Graph,
    architecture: Architecture,
    layer: Layer,
    batch: MicroBatch,
    stream: int,
    inputs: _Inputs,
    outputs: int | None,
) -> int:
    """One block: mixers, then feed-forward, each added to the stream; the new stream."""
    hidden = batch.rows(architecture.hidden_size)
    if layer.mixers:
        normed, mixed = graph.inplace(graph.inplace(stream)), list[int]()
        for mixer in layer.mixers:
            if isinstance(mixer, Recurrent):
                mixed.append(_recurrent(graph, mixer, layer, batch, normed, hidden))
            elif isinstance(mixer, LatentAttention):
                mixed.append(_latent(graph, mixer, layer, batch, normed, inputs, hidden))
            else:
                windowed = window_of(mixer, ignores_window(architecture)) is not None
                mask = inputs.masks.get(windowed)
                mixed.append(_attention(graph, mixer, layer, batch, normed, inputs, mask, hidden))
        current = _summed(graph, mixed)
        if outputs is not None:
            current = graph.op(hidden, current, outputs)
            stream = graph.op(hidden, stream, outputs)
        stream = graph.inplace(current, stream)
    if layer.feed_forward:
        normed = graph.inplace(graph.inplace(stream))
        parts = [
            _experts(graph, part, batch, normed, hidden)
            if isinstance(part, Experts)
            else _feed_forward(graph, part, layer, batch, normed, hidden)
            for part in layer.feed_forward
        ]
        stream = graph.inplace(_summed(graph, parts), stream)
    return stream


def _summed(graph: Graph, parts: list[int]) -> int:
    total = parts[0]
    for part in parts[1:]:
        total = graph.inplace(total, part)
    return total


def _attention(
    graph: Graph,
    mixer: Attention,
    layer: Layer,
    batch: MicroBatch,
    normed: int,
    inputs: _Inputs,
    mask: int | None,
    hidden: int,
) -> int:
    queries = mixer.num_attention_heads * mixer.head_dim
    keys, values = key_width(mixer), value_width(mixer)
    if _has(layer, "qkv_proj", "query_key_value", "Wqkv"):
        joined = graph.op(batch.rows(queries + keys + values), normed)
        q = graph.op(batch.rows(queries), joined, inputs.positions)
        k = graph.op(batch.rows(keys), joined, inputs.positions)
        v = joined
    else:
        q = _rotary(graph, layer, graph.op(batch.rows(queries), normed), inputs.positions)
        if mixer.kv_source is not None:
            return _attended(graph, mixer, batch, q, mask, hidden)
        v = graph.op(batch.rows(values), normed)
        k = _rotary(graph, layer, graph.op(batch.rows(keys), normed), inputs.positions)
    if _is_rotated(batch.type_k, mixer.head_dim):
        q, k = graph.op(batch.rows(queries), q), graph.op(batch.rows(keys), k)
    if _is_rotated(batch.type_v, mixer.v_head_dim):
        v = graph.op(batch.rows(values), v)
    graph.op(0, k, inputs.keys)
    graph.op(0, v, inputs.values)
    return _attended(graph, mixer, batch, q, mask, hidden)


def _rotary(graph: Graph, layer: Layer, projected: int, positions: int) -> int:
    """Queries or keys after their norm, if any, and rotary embedding.

    The first operation on heads takes them as a view, which is never overwritten.
    """
    heads = graph.op(graph.nodes[projected].size, projected)
    return graph.inplace(heads, positions) if _has(layer, "q_norm", "q_layernorm") else heads


def _attended(
    graph: Graph, mixer: Attention, batch: MicroBatch, q: int, mask: int | None, hidden: int
) -> int:
    """The output of an attention that stored its keys and values."""
    width = batch.rows(mixer.num_attention_heads * mixer.v_head_dim)
    operands = (q,) if mask is None else (q, mask)
    if batch.flash_attn:
        out = graph.op(width, *operands)
    else:
        scores = _scores(graph, mixer.num_attention_heads, batch, q, mask)
        out = graph.op(width, graph.op(width, scores))
    if _is_rotated(batch.type_v, mixer.v_head_dim):
        out = graph.op(width, out)
    return graph.op(hidden, out)


def _scores(graph: Graph, heads: int, batch: MicroBatch, q: int, mask: int | None) -> int:
    """Scores over every cell that the mask spans, and their softmax over them."""
    cells = batch.held.full
    if mask is not None:
        cells = graph.nodes[mask].size // (batch.tokens * FLOAT32)
    scores = graph.op(batch.rows(heads * cells), q)
    return graph.op(
        graph.nodes[scores].size, scores, *(() if mask is None else (mask,)), reuses=(scores,)
    )


def _latent(
    graph: Graph,
    mixer: LatentAttention,
    layer: Layer,
    batch: MicroBatch,
    normed: int,
    inputs: _Inputs,
    hidden: int,
) -> int:
    """Latent attention with the key projection absorbed into the queries (``deepseek2.cpp``)."""
    heads, rank, rope = mixer.num_attention_heads, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    compressed = next((p for p in layer.parameters if p.name.endswith("q_a_proj")), None)
    q = normed
    if compressed is not None:
        q = graph.inplace(graph.inplace(graph.op(batch.rows(compressed.shape[0]), normed)))
    q = graph.op(batch.rows(heads * (mixer.qk_nope_head_dim + rope)), q)
    absorbed = graph.op(batch.rows(heads * rank), q)
    rotary = graph.op(batch.rows(heads * rope), q, inputs.positions)
    q = graph.op(batch.rows(heads * (rank + rope)), absorbed, rotary)
    joined = graph.op(batch.rows(rank + rope), normed)
    latent = graph.inplace(graph.op(batch.rows(rank), joined))
    k = graph.op(
        batch.rows(rank + rope), latent, graph.op(batch.rows(rope), joined, inputs.positions)
    )
    graph.op(0, k, inputs.keys)
    mask = inputs.masks[False]
    if batch.flash_attn:
        out = graph.op(batch.rows(heads * rank), q, mask)
    else:
        out = graph.op(batch.rows(heads * rank), _scores(graph, heads, batch, q, mask))
    width = batch.rows(heads * mixer.v_head_dim)
    return graph.op(hidden, graph.op(width, graph.op(width, out)))


def _recurrent(
    graph: Graph, mixer: Recurrent, layer: Layer, batch: MicroBatch, normed: int, hidden: int
) -> int:
    """Projections, the convolution over them, states read and written, the gated output.

    The widest results of these layers; llama.cpp has more steps, each no wider.
    """
    widths = [
        p.shape[0] for p in layer.parameters if p.kind == "matrix" and ".in_proj" in p.name
    ] or [max(mixer.inner_size, mixer.num_heads * mixer.head_dim)] * 3
    projected = graph.op(batch.rows(sum(widths)), normed)
    sizes = [batch.held.streams * FLOAT32 * prod(state.shape) for state in mixer.states]
    states = graph.op(sum(sizes), projected)
    convolved = graph.op(batch.rows(max(widths)) + sum(sizes[:1]), projected, states)
    mixed = graph.op(batch.rows(max(widths)), convolved)
    inner = max(mixer.inner_size, mixer.num_heads * mixer.head_dim)
    out = graph.op(batch.rows(inner) + sum(sizes[1:]), mixed, states)
    return graph.op(hidden, graph.op(batch.rows(inner), out, projected))


def _feed_forward(
    graph: Graph, part: FeedForward, layer: Layer, batch: MicroBatch, normed: int, hidden: int
) -> int:
    return graph.op(hidden, _gated(graph, part, layer, batch, normed))


def _gated(graph: Graph, part: FeedForward, layer: Layer, batch: MicroBatch, normed: int) -> int:
    width = batch.rows(part.intermediate_size)
    if not part.gated:
        return graph.inplace(graph.op(width, normed))
    if _has(layer, "gate_up_proj"):
        return graph.op(width, graph.op(2 * width, normed))
    return graph.op(width, graph.op(width, normed), graph.op(width, normed))


def _experts(graph: Graph, part: Experts, batch: MicroBatch, normed: int, hidden: int) -> int:
    """A routed sum of experts, and the shared ones (``build_moe_ffn``)."""
    chosen = part.num_experts_per_tok
    probabilities = graph.inplace(graph.op(batch.rows(part.num_experts), normed))
    order = graph.op(batch.rows(part.num_experts), probabilities)
    weights = graph.op(batch.rows(chosen), probabilities, order)
    width = batch.rows(chosen * part.moe_intermediate_size)
    inner = graph.op(width, normed, order)
    if part.gated:
        inner = graph.op(width, inner, graph.op(width, normed, order))
    outputs = graph.inplace(graph.op(chosen * hidden, inner, order), weights)
    total = graph.op(hidden, outputs)
    for _ in range(chosen - 1):
        total = graph.inplace(total, outputs)
    if part.shared_intermediate_size:
        width = batch.rows(part.shared_intermediate_size)
        inner = graph.op(width, normed)
        if part.gated:
            inner = graph.op(width, inner, graph.op(width, normed))
        total = graph.inplace(total, graph.op(hidden, inner))
    return total


def _is_rotated(type_name: str, head_dim: int) -> bool:
    return GGUF_TYPES[cache_type(type_name)][0] > 1 and head_dim % ROTATED_DIM == 0


def _has(layer: Layer, *endings: str) -> bool:
    return any(parameter.name.endswith(endings) for parameter in layer.parameters)
