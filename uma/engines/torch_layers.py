"""One decoder layer as transformers' modelling files run it, in sizes.

Functions name their values as those files do, because a name keeps a buffer alive.
"""

from collections.abc import Sequence

from uma.architecture.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
)
from uma.engines.torch_ops import Program
from uma.frozen import dataclass
from uma.memory.autograd import Buffer, Tensor
from uma.quantization import FLOAT32

MAX_EXPERTS = 8  # are laid out one by one; of more, so many groups: more change moments little
EXPERT_GROUPS = 3
NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: ``sequences`` of ``length`` tokens on each of ``parts`` devices.

    Attention has a part of the heads and all tokens instead: under tensor parallelism, whose
    sequences are split outside of it (Megatron, arXiv:2205.05198, section 4.2.2), and between
    DeepSpeed-Ulysses' all-to-alls (arXiv:2309.14509, section 3.1).
    """

    sequences: int
    length: int
    parts: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def pairs(self, heads: int) -> int:
        """Scores of one device: its part of ``heads``, all tokens with all tokens."""
        return self.sequences * heads * self.length**2 * self.parts


def decoder_layer(run: Program, layer: Layer, x: Tensor, hidden: int, batch: Batch) -> Tensor:
    """``x`` through one block: norm, mixer, sum, norm, feed-forward, sum.

    Gemma 2, OLMo 2 and others have norms after mixer and feed-forward too, or instead.
    """
    names = {p.name.rpartition(".")[2] for p in layer.parameters}
    after = not names.isdisjoint(NORMS_AFTER)
    before = not after or "input_layernorm" in names
    residual = x
    for mixer in layer.mixers:
        hidden_states = run.norm(x, x.width) if before else x
        hidden_states = _mix(run, mixer, hidden_states, hidden, batch)
        if after:
            hidden_states = run.norm(hidden_states, x.width)
        residual = run.add(residual, hidden_states)
        del hidden_states
    if not layer.feed_forward:
        return residual
    hidden_states = run.norm(residual, residual.width) if before else residual
    hidden_states = _feed_forward(run, layer.feed_forward, hidden_states, hidden)
    if after:
        hidden_states = run.norm(hidden_states, residual.width)
    return run.add(residual, hidden_states)


def _mix(
    run: Program,
    mixer: Attention | LatentAttention | Recurrent,
    x: Tensor,
    hidden: int,
    batch: Batch,
) -> Tensor:
    if isinstance(mixer, Attention):
        return _attention(run, mixer, x, hidden, batch)
    if isinstance(mixer, LatentAttention):
        return _latent(run, mixer, x, hidden, batch)
    return _recurrent(run, mixer, x, hidden)


def _attention(run: Program, mixer: Attention, x: Tensor, hidden: int, batch: Batch) -> Tensor:
    heads, groups = mixer.num_attention_heads, mixer.num_key_value_heads
    query_states = run.linear("q_proj", x, heads * mixer.head_dim, hidden)
    key_states = run.linear("k_proj", x, groups * mixer.head_dim, hidden)
    value_states = run.linear("v_proj", x, groups * mixer.v_head_dim, hidden)
    if run.settings.query_norms:
        query_states = run.norm(query_states, query_states.width)
        key_states = run.norm(key_states, key_states.width)
    query_states = run.rotary(query_states)
    key_states = run.rotary(key_states)
    attn_output = _scores(
        run, query_states, key_states, value_states, heads, heads // max(1, groups), batch
    )
    del query_states, key_states, value_states
    return run.linear("o_proj", attn_output, hidden, heads * mixer.v_head_dim)


def _latent(run: Program, mixer: LatentAttention, x: Tensor, hidden: int, batch: Batch) -> Tensor:
    """Keys and values expanded to all heads (``modeling_deepseek_v3.py``)."""
    heads = mixer.num_attention_heads
    wide = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    rank = mixer.kv_lora_rank
    query_states = run.rotary(run.linear("q_proj", x, heads * wide, hidden))
    compressed = run.linear("kv_a_proj_with_mqa", x, rank + mixer.qk_rope_head_dim, hidden)
    compressed = run.norm(compressed, compressed.width)
    kv_dim = heads * (wide + mixer.v_head_dim)
    expanded = run.linear("kv_b_proj", compressed, kv_dim, compressed.elements // batch.tokens)
    del compressed
    key_states = run.scale(_part(run, expanded, heads * wide, batch))
    value_states = run.scale(_part(run, expanded, heads * mixer.v_head_dim, batch))
    del expanded
    attn_output = _scores(run, query_states, key_states, value_states, heads, 1, batch)
    del query_states, key_states, value_states
    return run.linear("o_proj", attn_output, hidden, heads * mixer.v_head_dim)


def _part(run: Program, x: Tensor, width: int, batch: Batch) -> Tensor:
    """A view of some columns; its gradient is padded to the whole."""
    size = x.size_bytes

    def back(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(size)]

    return run.graph.apply([x], x.buffer, batch.tokens * width, x.width, back)


def _scores(
    run: Program, q: Tensor, k: Tensor, v: Tensor, heads: int, repeats: int, batch: Batch
) -> Tensor:
    kernel = run.settings.kernel
    given = q.width
    if kernel == "flash":
        if run.settings.repeats_kv and repeats > 1:
            k, v = (_repeated(run, side, repeats) for side in (k, v))
            repeats = 1
        q, k, v = (run.cast(side, run.settings.compute_width) for side in (q, k, v))
        out = _fused_attention(run, q, k, v, heads, batch, accumulate=FLOAT32, repeats=repeats)
        return run.cast(out, given)
    if repeats > 1:  # repeat_kv
        k, v = (_repeated(run, side, repeats) for side in (k, v))
    if kernel == "efficient":
        return _fused_attention(run, q, k, v, heads, batch, accumulate=0, repeats=1)
    return _eager(run, q, k, v, heads, batch)


def _repeated(run: Program, x: Tensor, repeats: int) -> Tensor:
    """Keys or values copied to every query head; the gradient is summed again."""
    size = x.size_bytes

    def back(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(size)]

    return run.node([x], x.elements * repeats, x.width, back)


def _fused_attention(
    run: Program,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    batch: Batch,
    *,
    accumulate: int,
    repeats: int,
) -> Tensor:
    """One kernel: saves its inputs, its output and a float32 a row.

    The backward of flash-attn 2 sums the gradient of the queries in float32, and makes those of
    the keys and values for every query head first (``flash_api.cpp``, ``mha_bwd``: ``dq_accum``,
    ``dk_expanded``).
    """
    rows = batch.tokens * heads * FLOAT32
    sum_of_rows = run.memory.buffer(rows)
    out_elements = v.elements * repeats
    out = run.memory.buffer(out_elements * q.width)
    saved = (q.buffer, k.buffer, v.buffer, out, sum_of_rows)
    sizes = [side.size_bytes for side in (q, k, v)]
    temporary = rows + q.elements * accumulate
    if repeats > 1:
        temporary += (k.size_bytes + v.size_bytes) * repeats

    def back(grad: Buffer) -> Sequence[Buffer]:
        work = run.memory.buffer(temporary)
        found = [run.memory.buffer(size) for size in sizes]
        return found if saved and work else []

    return run.graph.apply([q, k, v], out, out_elements, q.width, back)


def _eager(run: Program, q: Tensor, k: Tensor, v: Tensor, heads: int, batch: Batch) -> Tensor:
    """Scores in full: product, scale, mask, float32 softmax, cast, dropout of 0, product.

    ``eager_attention_forward``: the softmax saves its float32 output; both products save theirs.
    """
    pairs = batch.pairs(heads)
    width = q.width
    q_size, k_size, v_size = (side.size_bytes for side in (q, k, v))
    saved_qk = (q.buffer, k.buffer)

    def back_scores(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(q_size), run.memory.buffer(k_size)] if saved_qk else []

    scores = run.node([q, k], pairs, width, back_scores)
    scores = run.scale(scores)
    if run.settings.caps_scores:
        scores = run.scale(run.activation(run.scale(scores)))
    scores = _masked(run, scores)
    weights = _softmax(run, scores)
    del scores
    weights = run.cast(weights, width)
    saved_wv = (weights.buffer, v.buffer)

    def back_values(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(pairs * width), run.memory.buffer(v_size)] if saved_wv else []

    out = run.node([weights, v], v.elements, width, back_values)
    del weights
    return run.scale(out)  # transpose, contiguous


def _masked(run: Program, scores: Tensor) -> Tensor:
    def back(grad: Buffer) -> Sequence[Buffer]:
        return [grad]

    return run.node([scores], scores.elements, scores.width, back)


def _softmax(run: Program, scores: Tensor) -> Tensor:
    """In float32 from any width, and back; its backward makes one product more.

    torch 2.13, ``native/cuda/SoftMax.cu``: ``softmax_cuda_out`` reads half precision itself, and
    ``softmax_backward_cuda_out`` has ``tmp = grad * output``.
    """
    buffer = run.memory.buffer(scores.elements * FLOAT32)
    size, wide = scores.size_bytes, scores.elements * FLOAT32

    def back(grad: Buffer) -> Sequence[Buffer]:
        temporary = run.memory.buffer(wide)
        found = run.memory.buffer(size)
        return [found] if buffer and temporary else []

    return run.graph.apply([scores], buffer, scores.elements, FLOAT32, back)


def _recurrent(run: Program, mixer: Recurrent, x: Tensor, hidden: int) -> Tensor:
    """Linear attention in chunks: projections, a state a chunk, and the gate.

    What a kernel keeps differs by family; the values it reads and their gradients are kept here.
    """
    inner = mixer.inner_size or hidden
    mixed = run.linear("in_proj", x, 3 * inner, hidden)
    gate = run.linear("in_proj_z", x, inner, hidden)
    size = mixed.size_bytes
    saved = mixed.buffer

    def back(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(size)] if saved else []

    out = run.node([mixed], mixed.elements // 3, mixed.width, back)
    del mixed
    out = run.multiply(run.norm(out, out.width), run.activation(gate))
    return run.linear("out_proj", out, hidden, inner)


def _feed_forward(
    run: Program, parts: tuple[FeedForward | Experts, ...], x: Tensor, hidden: int
) -> Tensor:
    outs = [
        _dense(run, part, x, hidden)
        if isinstance(part, FeedForward)
        else _experts(run, part, x, hidden)
        for part in parts
    ]
    total = outs.pop(0)
    while outs:
        total = run.add(total, outs.pop(0))
    return total


def _dense(run: Program, part: FeedForward, x: Tensor, hidden: int) -> Tensor:
    inner = part.intermediate_size
    if not part.gated:
        up = run.linear("up_proj", x, inner, hidden)
        return run.linear("down_proj", run.activation(up), hidden, inner)
    matrices = [run.linears(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(how.fused and how.rank for how in matrices) and not run.settings.dropout:
        return _fused_dense(run, x, inner, hidden)
    gate = run.linear("gate_proj", x, inner, hidden)
    if run.settings.fused_gates:
        product = run.gated(gate, run.linear("up_proj", x, inner, hidden))
    else:
        gate = run.activation(gate)
        product = run.multiply(gate, run.linear("up_proj", x, inner, hidden))
    del gate
    return run.linear("down_proj", product, hidden, inner)


def _fused_dense(run: Program, x: Tensor, inner: int, hidden: int) -> Tensor:
    """Unsloth's ``LoRA_MLP`` (``kernels/fast_lora.py``): one node that saves its input and halves.

    Going backward it makes the product again, writes the gradients of both halves over them, and
    that of the input over the input.
    """
    how, width = run.linears("gate_proj"), run.settings.compute_width
    x = run.cast(x, width)
    wide = x.elements // hidden * inner * width
    weight = inner * hidden * how.temporary_width
    trained = round(3 * how.rank * (hidden + inner) * run.alike)

    def product(size_bytes: int) -> Buffer:
        copy = run.memory.buffer(weight)
        found = run.memory.buffer(size_bytes)
        del copy
        return found

    saved = x.buffer, product(wide), product(wide)
    both = run.memory.buffer(wide)
    out = product(x.size_bytes)
    del both

    def back(grad: Buffer) -> Sequence[Buffer]:
        again = product(wide)
        run.gradient(trained)
        run.memory.passing(weight)
        del again
        return [saved[0]]

    return run.graph.apply([x], out, x.elements, width, back, starts=True)


def _experts(run: Program, part: Experts, x: Tensor, hidden: int) -> Tensor:
    """Each expert with its share of the tokens, summed into one result.

    A loop (``modeling_mixtral.py``), or all at once (``modeling_granitemoe.py``;
    ``integrations/moe.py``, ``grouped_mm_experts_forward``).
    """
    routed = x.elements * part.num_experts_per_tok
    groups = part.num_experts if part.num_experts <= MAX_EXPERTS else EXPERT_GROUPS
    if run.settings.sorted_experts:
        groups = 1
    run.alike = part.num_experts / groups / run.settings.expert_devices
    run.linears = run.settings.experts or run.settings.linear
    inner = FeedForward(part.moe_intermediate_size, part.gated)
    total = run.graph.tensor(x.elements, x.width)
    for _ in range(groups):
        share = _rows(run, x, routed // groups)
        found = run.weighted(_dense(run, inner, share, hidden))
        total = _summed(run, total, found)
        del share, found
    run.alike, run.linears = 1, run.settings.linear
    if part.shared_intermediate_size:
        shared = FeedForward(part.shared_intermediate_size, part.gated)
        total = run.add(total, _dense(run, shared, x, hidden))
    return total


def _rows(run: Program, x: Tensor, elements: int) -> Tensor:
    """Some rows of ``x``; the gradient is written into one of the whole size."""
    size = x.size_bytes

    def back(grad: Buffer) -> Sequence[Buffer]:
        return [run.memory.buffer(size)]

    return run.node([x], elements, x.width, back)


def _summed(run: Program, total: Tensor, found: Tensor) -> Tensor:
    """``index_add_``: in place; the gradient of the part is gathered."""
    size = found.size_bytes

    def back(grad: Buffer) -> Sequence[Buffer]:
        return [grad, run.memory.buffer(size)]

    return run.graph.apply([total, found], total.buffer, total.elements, total.width, back)
