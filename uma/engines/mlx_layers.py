"""A layer of ``mlx_lm.models`` as MLX's operations (mlx-lm 0.32.2), one primitive at a time.

Forward as it is called, and backward as ``mx.vjp`` makes it, with attention in slices of queries
as in ``uma/runtime/lora/attention.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    Parameter,
)
from uma.engines.mlx_recurrent_layers import recurrent
from uma.memory.adapters import Adapter, layer_adapters
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend, TrainingWorkload

FLOAT32 = 4
MASKED_QUERIES = 64  # uma/runtime/lora/attention.py
LEAST_QUERIES = 16
SORTED_ROWS = 64  # switch_layers.py: so many rows are sorted by their experts
GELU = ("gemma", "recurrent_gemma", "phi", "starcoder2", "gpt")  # gated by gelu, or plain gelu


def named(layer: Layer, *ends: str) -> Parameter | None:
    """The layer's parameter whose name ends so."""
    for end in ends:
        for parameter in layer.parameters:
            if parameter.name.endswith(end):
                return parameter
    return None


# Names of the same matrices in other families, by the roles that a layer is laid out in.
ROLES = {
    "q_proj": ("q_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_q"),
    "k_proj": ("k_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_k"),
    "v_proj": ("v_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_v"),
    "o_proj": ("o_proj", "out_proj", "dense", "c_proj", "wo"),
    "gate_proj": ("gate_proj", "gate_up_proj", "w1", "fc1", "linear_in"),
    "up_proj": ("up_proj", "gate_up_proj", "w3", "w2", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
    "shared_gate_proj": ("gate_proj",),
    "shared_up_proj": ("up_proj",),
    "shared_down_proj": ("down_proj",),
    "in_proj": ("in_proj", "in_proj_qkvz", "in_proj_qkv"),
    "gate": (".gate", ".router"),
}

# Trained parts in the order in which mlx-lm's modules hold them, mixers first.
ORDER = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "embed_q",
    "unembed_out",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_norm",
    "in_proj",
    "out_proj",
    "gate",
    "gate_proj",
    "down_proj",
    "up_proj",
    "switch gate_proj",
    "switch up_proj",
    "switch down_proj",
    "shared_gate_proj",
    "shared_up_proj",
    "shared_down_proj",
    "layernorm",
    "other",
)


@dataclass(slots=True)
class LayerProgram:
    """One layer in a program; ``differentiated`` layers run under ``mx.vjp``."""

    program: Program
    architecture: Architecture
    workload: TrainingWorkload
    layer: Layer
    length: int
    backend: Backend
    differentiated: bool
    slice_bytes: int | None
    inline: bool = False
    given: Iterator[Value] | None = None
    trained: list[Value] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    masks: dict[str, Value] = field(default_factory=dict)
    adapters: dict[str, Adapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = {a.parameter.name: a for a in layer_adapters(self.layer, self.workload)}

    @property
    def batch(self) -> int:
        return self.workload.batch_size

    @property
    def width(self) -> int:
        return self.workload.dtype_bytes

    @property
    def hidden(self) -> int:
        return self.architecture.hidden_size

    @property
    def fused(self) -> bool:
        """Whether norms and rotations are kernels."""
        return self.backend == "metal"

    # Parameters.

    def in_order(self) -> list[Value]:
        """The trained arrays as the module of mlx-lm holds them."""
        places = sorted(range(len(self.trained)), key=lambda n: ORDER.index(self.roles[n]))
        return [self.trained[n] for n in places]

    def _trained(self, role: str, *shape: int, width: int) -> Value:
        if self.given is not None:
            return next(self.given)
        source = self.program.source(*shape, width=width, held=not self.inline)
        if not self.differentiated:
            return source
        primal = self.program.primal(source)
        self.trained.append(primal)
        self.roles.append(role if role in ORDER else "other")
        return primal

    def weight(self, role: str, *shape: int) -> Value:
        if self.workload.method == "full":
            return self._trained(role, *shape, width=self.width)
        return self.program.source(*shape, width=self.width)

    def adapter(self, role: str, rows: int, columns: int) -> Adapter | None:
        names = ROLES.get(role, (role,))
        found = next((a for n, a in self.adapters.items() if n.endswith(names)), None)
        return found and replace(found, parameter=Parameter(role, (rows, columns), "matrix"))

    def project(self, x: Value, role: str, rows: int, columns: int) -> Value:
        """``nn.Linear``, ``LoRALinear`` or ``DoRALinear`` of a role."""
        p, adapter = self.program, self.adapter(role, rows, columns)
        weight = self.weight(role, rows, columns)
        if adapter is not None and adapter.magnitude:
            return self._dora(x, role, weight, adapter)
        y = self._product(x, weight)
        if adapter is None:
            return y
        a, b = self._factors(role, adapter)
        z = p.matmul(p.matmul(x, a), b)
        return p.add(y, p.astype(p.scaled(z), x.width))

    def _product(self, x: Value, weight: Value) -> Value:
        if self.workload.quantized:
            return self.program.quantized_matmul(x, weight, weight.shape[0])
        return self.program.matmul(x, self.program.swapped(weight))

    def _factors(self, role: str, adapter: Adapter) -> tuple[Value, Value]:
        a = self._trained(role, adapter.columns, adapter.rank, width=FLOAT32)
        return a, self._trained(role, adapter.rank, adapter.rows, width=FLOAT32)

    def _dora(self, x: Value, role: str, weight: Value, adapter: Adapter) -> Value:
        """``tuner/dora.py``: the weight dequantized, and the norm of its sum with the factors."""
        p = self.program
        if self.workload.quantized:
            weight = p.op("Quantize", [weight], weight.shape)
        m = self._trained(role, adapter.rows, width=FLOAT32)
        a, b = self._factors(role, adapter)
        y = p.matmul(x, p.swapped(weight))
        z = p.matmul(p.matmul(x, a), b)
        out = p.add(y, p.astype(p.scaled(z), x.width))
        sum_ = p.add(weight, p.matmul(p.scaled(p.swapped(b)), p.swapped(a)))
        norm = p.op("Sqrt", [p.sum(p.unary("Square", sum_), (1,))], (adapter.rows,))
        return p.multiply(p.astype(p.divide(m, p.stop_gradient(norm)), x.width), out)

    # Parts.

    def mask(self, name: str) -> Value:
        """Which pairs of tokens see each other, made once for all layers."""
        known, pairs = self.program.numbers, (self.length, self.length)
        if name not in known:
            known[name] = self.program.source(*pairs, width=1)
        return self.masks.setdefault(name, known[name])

    def norm(self, x: Value, role: str = "layernorm") -> Value:
        """``mx.fast.rms_norm``: its fallback, or one kernel each way."""
        p = self.program
        weight = self.weight(role, x.shape[-1])
        if self.fused:
            return p.op("RMSNorm", [x, weight], x.shape, opaque=True, donors=(0,))
        return rms_norm(p, x, weight)

    def rotated(self, x: Value, *, pairs: bool = False) -> Value:
        """``mx.fast.rope`` of ``(batch, heads, length, width)``: of neighbours with ``pairs``."""
        p = self.program
        if self.fused:
            return p.op("RoPE", [x], x.shape, opaque=True, donors=(0,))
        return rotary(p, x, pairs=pairs)

    def activated(self, gate: Value, up: Value | None = None) -> Value:
        """SiLU or GELU of ``gate``, times ``up``: compiled outside of gradients."""
        p = self.program
        gelu = self.architecture.model_type.startswith(GELU)
        if not (self.differentiated or self.inline):
            if up is None or gelu:
                gate = p.compiled(gate)
                return gate if up is None else p.multiply(gate, up)
            return p.compiled(gate, up)
        out = gelu_tanh(p, gate) if gelu else p.multiply(gate, p.unary("Sigmoid", gate))
        return out if up is None else p.multiply(out, up)

    def forward(self, x: Value) -> Value:
        p = self.program
        around = named(self.layer, "pre_feedforward_layernorm") is not None
        for part in (*self.layer.mixers, *self.layer.feed_forward):
            out = self.part(part, self.norm(x))
            x = p.add(x, self.norm(out) if around else out)
        return x

    def part(self, part: Mixer | FeedForward | Experts, x: Value) -> Value:
        if isinstance(part, Attention):
            return self.attention(part, x)
        if isinstance(part, LatentAttention):
            return self.latent(part, x)
        if isinstance(part, FeedForward):
            return self.dense(part, x, "")
        if isinstance(part, Experts):
            return self.experts(part, x)
        return recurrent(self, part, x)

    def attention(self, mixer: Attention, x: Value) -> Value:
        heads, groups = mixer.num_attention_heads, mixer.num_key_value_heads
        q = self.heads(self.project(x, "q_proj", heads * mixer.head_dim, self.hidden), heads)
        k = self.heads(self.project(x, "k_proj", groups * mixer.head_dim, self.hidden), groups)
        v = self.heads(self.project(x, "v_proj", groups * mixer.v_head_dim, self.hidden), groups)
        normed = named(self.layer, "q_norm") is not None
        late = self.architecture.model_type.startswith("gemma")
        if normed and not late:
            q, k = self.norm(q, "q_norm"), self.norm(k, "q_norm")
        q, k, v = (self.first_heads(part) for part in (q, k, v))
        if normed and late:
            q, k = self.norm(q, "q_norm"), self.norm(k, "q_norm")
        q, k = self.rotated(q), self.rotated(k)
        window = mixer.sliding_window or mixer.attention_chunk_size
        windowed = window is not None and window < self.length
        if self.workload.attention == "fused":
            out = fused_attention(self.program, q, k, v)
            return self.joined(out, mixer.v_head_dim * heads, self.hidden)
        sliced = SlicedAttention(self, q.shape, k.shape, window if windowed else None)
        out = sliced.run(q, k, v)
        return self.joined(out, mixer.v_head_dim * heads, self.hidden)

    def heads(self, x: Value, count: int) -> Value:
        return self.program.reshape(x, *x.shape[:2], count, x.shape[2] // count)

    def first_heads(self, x: Value) -> Value:
        return self.program.transpose(x, 0, 2, 1, 3)

    def joined(self, out: Value, width: int, hidden: int) -> Value:
        """Heads put together, and the output projection."""
        p = self.program
        flat = p.reshape(p.transpose(out, 0, 2, 1, 3), self.batch, self.length, width)
        return self.project(flat, "o_proj", hidden, width)

    def latent(self, mixer: LatentAttention, x: Value) -> Value:
        """``deepseek_v3.py``: keys and values of all heads; rotary scores as the mask."""
        p, heads, rank = self.program, mixer.num_attention_heads, mixer.kv_lora_rank
        nope, rope = mixer.qk_nope_head_dim, mixer.qk_rope_head_dim
        low = named(self.layer, "q_a_proj")
        if low is None:
            q = self.project(x, "q_proj", heads * (nope + rope), self.hidden)
        else:
            narrow = self.project(x, "q_a_proj", low.shape[0], self.hidden)
            narrow = self.norm(narrow, "q_a_layernorm")
            q = self.project(narrow, "q_b_proj", heads * (nope + rope), low.shape[0])
        q = self.first_heads(self.heads(q, heads))
        both = self.project(x, "kv_a_proj_with_mqa", rank + rope, self.hidden)
        compressed, k_rope = p.split(both, 2, (rank, rope))
        latent = p.expand_dims(self.norm(compressed, "kv_a_layernorm"), 1)
        k_rope = self.first_heads(self.heads(k_rope, 1))
        q_nope, q_rope = p.split(q, 3, (nope, rope))
        q_rope = self.rotated(q_rope, pairs=True)
        k_rope = self.rotated(k_rope, pairs=True)
        scores = p.matmul(p.scaled(q_rope), p.swapped(k_rope))
        scores = p.where(self.mask("causal"), scores)
        keys = p.matmul(latent, self.weight("embed_q", heads, rank, nope))
        unembed = self.weight("unembed_out", heads, mixer.v_head_dim, rank)
        values = p.matmul(latent, p.swapped(unembed))
        out = whole_attention(p, q_nope, keys, values, scores)
        return self.joined(out, heads * mixer.v_head_dim, self.hidden)

    def dense(self, part: FeedForward, x: Value, prefix: str) -> Value:
        hidden, inner = self.hidden, part.intermediate_size
        if not part.gated:
            up = self.activated(self.project(x, f"{prefix}up_proj", inner, hidden))
            return self.project(up, f"{prefix}down_proj", hidden, inner)
        gate = self.project(x, f"{prefix}gate_proj", inner, hidden)
        up = self.project(x, f"{prefix}up_proj", inner, hidden)
        return self.project(self.activated(gate, up), f"{prefix}down_proj", hidden, inner)

    def experts(self, part: Experts, x: Value) -> Value:
        """``SwitchGLU`` with rows in the order of their experts."""
        p, chosen = self.program, part.num_experts_per_tok
        rows = self.batch * self.length * chosen
        gates = p.softmax(self.project(x, "gate", part.num_experts, self.hidden))
        top = p.op("ArgPartition", [gates], gates.shape, FLOAT32)
        top = p.stop_gradient(p.slice(top, 2, 0, chosen))
        scores = p.take_along_axis(gates, top)
        scores = p.divide(scores, p.sum(scores, (2,), keepdims=True))
        order = p.op("ArgSort", [p.flatten(top, 0, 2)], (rows,), FLOAT32)
        back = p.op("ArgSort", [order], (rows,), FLOAT32)
        index = p.op("Gather", [p.flatten(top, 0, 2), order], (rows,), FLOAT32)
        flat = p.reshape(x, self.batch * self.length, 1, self.hidden)
        taken = p.take(flat, p.divide(order, p.scalar(FLOAT32)))
        y = self._switch(part, taken, index)
        y = p.unflatten(p.take(y, back), 0, (self.batch, self.length, chosen))
        y = p.squeeze(y, (3,))
        y = p.sum(p.multiply(y, p.expand_dims(scores, 3)), (2,))
        if not part.shared_intermediate_size:
            return y
        shared = FeedForward(part.shared_intermediate_size, part.gated)
        return p.add(y, self.dense(shared, x, "shared_"))

    def _switch(self, part: Experts, x: Value, index: Value) -> Value:
        inner, count, hidden = part.moe_intermediate_size, part.num_experts, self.hidden
        up = self._stacked(x, index, "up_proj", count, inner, hidden)
        gate = self._stacked(x, index, "gate_proj", count, inner, hidden) if part.gated else None
        product = self.activated(up) if gate is None else self.activated(gate, up)
        return self._stacked(product, index, "down_proj", count, hidden, inner)

    def _stacked(
        self, x: Value, index: Value, role: str, count: int, rows: int, columns: int
    ) -> Value:
        p, adapter = self.program, self.adapter(role, rows, columns)
        y = p.gather_mm(x, p.swapped(self.weight(f"switch {role}", count, rows, columns)), index)
        if adapter is None:
            return y
        a = self._trained(f"switch {role}", count, adapter.rank, columns, width=FLOAT32)
        b = self._trained(f"switch {role}", count, rows, adapter.rank, width=FLOAT32)
        z = p.gather_mm(p.gather_mm(x, p.swapped(a), index), p.swapped(b), index)
        return p.add(y, p.astype(p.scaled(z), x.width))


@dataclass(frozen=True, slots=True)
class SlicedAttention:
    """Slices of queries one after the other, forward and backward."""

    run_of: LayerProgram
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: int | None

    def places(self) -> list[tuple[int, int, int, int]]:
        """First query of each slice, the one after its last, and the same of its keys."""
        run, length, keys = self.run_of, self.queries[2], self.keys[2]
        row = self.queries[0] * self.queries[1] * keys * run.width
        if run.slice_bytes is None:
            return [(0, length, 0, keys)]
        count = max(LEAST_QUERIES, run.slice_bytes // row)
        if self.window is not None:
            count = min(count, MASKED_QUERIES)
        return [
            (a, min(a + count, length), self._first(a), keys - length + min(a + count, length))
            for a in range(0, length, count)
        ]

    def _first(self, query: int) -> int:
        return 0 if self.window is None else max(0, query - self.window + 1)

    def run(self, q: Value, k: Value, v: Value) -> Value:
        places, p = self.places(), self.run_of.program
        mask = None
        if self.window is not None:
            mask = self.run_of.mask(f"window {self.window}")
        if len(places) == 1:
            return whole_attention(p, q, k, v, mask, causal=mask is None)

        def part(place: tuple[int, int, int, int], q: Value, k: Value, v: Value) -> Value:
            start, stop, first, end = place
            seen = None
            if mask is not None:
                seen = p.slice(p.slice(mask, 0, start, stop), 1, first, end)
            rows = p.slice(q, 2, start, stop)
            k, v = p.slice(k, 2, first, end), p.slice(v, 2, first, end)
            return whole_attention(p, rows, k, v, seen, causal=mask is None)

        def forward() -> Value:
            outputs: list[Value] = []
            for place in places:
                outputs.append(part(place, p.depends(q, *outputs[-1:]), k, v))
            return p.concatenate(outputs, 2)

        def backward(g: Value) -> list[Value]:
            total: list[Value] = []
            for place in places:
                piece = p.slice(g, 2, place[0], place[1])
                primals = [p.primal(p.depends(q, *total)), p.primal(k), p.primal(v)]
                new = p.vjp([(part(place, *primals), piece)], primals)
                total = [p.add(a, b) for a, b in zip(total, new, strict=True)] if total else new
            return total

        return p.custom(forward, backward, (q, k, v))


def rms_norm(p: Program, x: Value, weight: Value) -> Value:
    """``mlx/fast.cpp``, the fallback of ``rms_norm``."""
    wide = p.astype(x, FLOAT32)
    mean = p.scaled(p.sum(p.unary("Square", wide), (len(x.shape) - 1,), keepdims=True))
    root = p.unary("Sqrt", p.add(mean, p.scalar(FLOAT32)))
    return p.multiply(p.astype(p.multiply(wide, root), x.width), weight)


def rotary(p: Program, x: Value, *, pairs: bool) -> Value:
    """``mlx/fast.cpp``, the fallback of ``rope``: two halves, or neighbours, turned and joined."""
    length, half = x.shape[2], x.shape[3] // 2
    place = p.scaled(p.add(p.arange(length), p.scalar(FLOAT32, "offset")), "one")
    each = p.unary("Exp", p.scaled(p.arange(half), "base"))
    angle = p.multiply(p.expand_dims(place, 1), each)
    cosines, sines = (p.astype(p.unary(name, angle), x.width) for name in ("Cos", "Sin"))
    if pairs:
        one, two = (p.every_other(x, first) for first in (0, 1))
    else:
        one, two = p.slice(x, 3, 0, half), p.slice(x, 3, half, 2 * half)
    first = p.subtract(p.multiply(one, cosines), p.multiply(two, sines))
    second = p.add(p.multiply(one, sines), p.multiply(two, cosines))
    if not pairs:
        return p.concatenate([first, second], 3)
    joined = p.concatenate([p.expand_dims(part, 4) for part in (first, second)], 4)
    return p.reshape(joined, *x.shape)


def gelu_tanh(p: Program, x: Value) -> Value:
    """``nn.gelu_approx``: half of ``x`` times one more than a tangent of ``x`` and its cube."""
    cube = p.scaled(p.binary("Power", x, p.scalar(x.width)))
    inner = p.unary("Tanh", p.scaled(p.add(x, cube)))
    return p.multiply(p.scaled(x), p.add(inner, p.scalar(x.width)))


def whole_attention(
    p: Program, q: Value, k: Value, v: Value, mask: Value | None, *, causal: bool = False
) -> Value:
    """``mlx/fast.cpp``, the fallback of ``scaled_dot_product_attention``."""
    heads, groups = q.shape[1], k.shape[1]
    q = p.scaled(q)
    repeats = heads // groups
    if repeats > 1:
        q = p.unflatten(q, 1, (groups, repeats))
        k, v = p.expand_dims(k, 2), p.expand_dims(v, 2)
    scores = p.matmul(q, p.swapped(k))
    if causal:
        rows, columns = scores.shape[-2:]
        queries = p.expand_dims(p.arange(rows), 1)
        keys = p.expand_dims(p.arange(columns), 0)
        pairs = (rows, columns)
        sides = [p.broadcast_to(side, pairs) for side in (queries, keys)]
        mask = p.op("GreaterEqual", sides, pairs, 1)
    if mask is not None:
        if mask.width == 1:
            scores = p.where(mask, scores)
        else:
            scores = p.add(scores, p.unflatten(mask, 1, (groups, repeats)) if repeats > 1 else mask)
    out = p.matmul(p.softmax(scores), v)
    return p.flatten(out, 1, 2) if repeats > 1 else out


def fused_attention(p: Program, q: Value, k: Value, v: Value) -> Value:
    """One kernel each way; only the output is kept, and a float32 a row that is left out."""
    made: list[Value] = []

    def forward() -> Value:
        shape = (*q.shape[:3], v.shape[3])
        made.append(p.op("ScaledDotProductAttention", [q, k, v], shape, opaque=True))
        return made[0]

    def backward(g: Value) -> list[Value]:
        given = [q, k, v, made[0], g]
        return [p.op("AttentionVJP", given, x.shape, opaque=True) for x in (q, k, v)]

    return p.custom(forward, backward, [q, k, v])
