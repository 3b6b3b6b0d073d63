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
from uma.engines.mlx_attention import (
    FLOAT32,
    SlicedAttention,
    fused_attention,
    gelu_tanh,
    rms_norm,
    rotary,
    whole_attention,
)
from uma.engines.mlx_recurrent_layers import recurrent
from uma.memory.adapters import Adapter, layer_adapters
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend, TrainingWorkload

SIGMOID_GATES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "kimi", "bailing", "dots1", "minimax")
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
        gates = self.project(x, "gate", part.num_experts, self.hidden)
        sigmoid = self.architecture.model_type.startswith(SIGMOID_GATES)
        gates = p.unary("Sigmoid" if sigmoid else "Softmax", gates)
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
