"""A layer of ``mlx_lm.models`` as MLX's operations (mlx-lm 0.32.2), one primitive at a time.

Forward as it is called, and backward as ``mx.vjp`` makes it, with attention in slices of queries
as in ``uma/runtime/lora/attention.py``.
"""

from collections.abc import Iterator
from dataclasses import replace

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
    SlicedAttention,
    causal_mask,
    fused_attention,
    gelu_tanh,
    rms_norm,
    rotary,
    whole_attention,
)
from uma.engines.mlx_roles import ROLES, module_order, place_of
from uma.memory.adapters import Adapter, layer_adapters
from uma.memory.mlx_program import Program, Value
from uma.quantization import FLOAT32
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


class LayerProgram:
    """One layer in a program; ``differentiated`` layers run under ``mx.vjp``.

    The input of the ``first`` of these has no gradient. ``summed_together`` is what some with a
    gated delta rule do when all arrays are trained (``mlx_gated_delta.py``).
    """

    def __init__(
        self,
        program: Program,
        architecture: Architecture,
        workload: TrainingWorkload,
        layer: Layer,
        length: int,
        backend: Backend,
        *,
        differentiated: bool,
        slice_bytes: int | None,
        inline: bool = False,
        first: bool = False,
        summed_together: bool = False,
    ) -> None:
        self.program, self.architecture, self.workload = program, architecture, workload
        self.layer, self.length, self.backend = layer, length, backend
        self.differentiated, self.slice_bytes, self.inline = differentiated, slice_bytes, inline
        self.first, self.summed_together = first, summed_together
        self.adapters = {a.parameter.name: a for a in layer_adapters(layer, workload)}
        self.given: Iterator[Value] | None = None
        self.trained: list[Value] = []
        self.frozen: list[Value] = []
        self.roles: list[str] = []
        self.masks: dict[str, Value] = {}
        self.asked = 0

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
    def kernel(self) -> int:
        """Tokens that the convolution of a recurrent layer sees."""
        return next(q.shape[1] for q in self.layer.parameters if q.name.endswith("conv1d"))

    @property
    def fused(self) -> bool:
        """Whether norms and rotations are kernels."""
        return self.backend == "metal"

    # Parameters.

    def in_order(self) -> list[Value]:
        """The trained arrays as the module of mlx-lm holds them."""
        order = module_order(self.architecture.model_type)
        places = sorted(range(len(self.trained)), key=lambda n: order.index(self.roles[n]))
        return [self.trained[n] for n in places]

    def _trained(self, role: str, *shape: int, width: int) -> Value:
        if self.given is not None:
            return next(self.given)
        source = self.program.source(*shape, width=width, held=not self.inline)
        if not self.differentiated:
            return source
        primal = self.program.primal(source)
        self.trained.append(primal)
        self.roles.append(place_of(role))
        return primal

    def weight(self, role: str, *shape: int) -> Value:
        """A matrix or vector of the model; frozen ones are the same when a layer runs again."""
        if self.workload.method == "full":
            return self._trained(role, *shape, width=self.width)
        if self.asked == len(self.frozen):
            self.frozen.append(self.program.source(*shape, width=self.width))
        self.asked += 1
        return self.frozen[self.asked - 1]

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

    def mask(self, window: int | None = None) -> Value:
        """Which pairs of tokens see each other, made once for all layers."""
        known, name = self.program.numbers, f"window {window}"
        if name not in known:
            pairs = self.length, self.length
            made = causal_mask(self.program, self.length, window) if self.inline else None
            known[name] = made or self.program.source(*pairs, width=1)
        return self.masks.setdefault(name, known[name])

    def norm(self, x: Value, role: str = "layernorm") -> Value:
        """``nn.RMSNorm``, of Gemma with weights around 0."""
        p = self.program
        weight = self.weight(role, x.shape[-1])
        if self.architecture.model_type.startswith("gemma"):
            weight = p.add(p.scalar(weight.width, "one"), weight)
        return self.normed(x, weight)

    def normed(self, x: Value, weight: Value | None = None) -> Value:
        """``mx.fast.rms_norm``: its fallback, or one kernel each way."""
        if not self.fused:
            return rms_norm(self.program, x, weight)
        given = [x] if weight is None else [x, weight]
        return self.program.op("RMSNorm", given, x.shape, opaque=True, donors=(0,))

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
        p, self.asked = self.program, 0
        around = named(self.layer, "pre_feedforward_layernorm") is not None
        out_first = self.architecture.model_type in ("mamba", "mamba2")
        for part in (*self.layer.mixers, *self.layer.feed_forward):
            out = self.part(part, self.norm(x))
            out = self.norm(out) if around else out
            x = p.add(out, x) if out_first else p.add(x, out)
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
        from uma.engines.mlx_recurrent_layers import recurrent

        return recurrent(self, part, x)

    def attention(self, mixer: Attention, x: Value) -> Value:
        heads, groups = mixer.num_attention_heads, mixer.num_key_value_heads
        q, gate = self.queries(mixer, x)
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
            return self.joined(out, mixer.v_head_dim * heads, self.hidden, gate)
        sliced = SlicedAttention(self, q.shape, k.shape, window if windowed else None)
        out = sliced.run(q, k, v)
        return self.joined(out, mixer.v_head_dim * heads, self.hidden, gate)

    def queries(self, mixer: Attention, x: Value) -> tuple[Value, Value | None]:
        """Queries by heads, and the gate of the output where the projection gives one too."""
        p, heads, width = self.program, mixer.num_attention_heads, mixer.head_dim
        stored = named(self.layer, "q_proj")
        if stored is None or stored.shape[0] != 2 * heads * width:
            return self.heads(self.project(x, "q_proj", heads * width, self.hidden), heads), None
        both = self.heads(self.project(x, "q_proj", 2 * heads * width, self.hidden), heads)
        q, gate = p.split(both, 3, (width, width))
        return q, p.reshape(gate, *gate.shape[:2], heads * width)

    def heads(self, x: Value, count: int) -> Value:
        return self.program.reshape(x, *x.shape[:2], count, x.shape[2] // count)

    def first_heads(self, x: Value) -> Value:
        return self.program.transpose(x, 0, 2, 1, 3)

    def joined(self, out: Value, width: int, hidden: int, gate: Value | None = None) -> Value:
        """Heads put together, gated where there is a gate, and the output projection."""
        p = self.program
        flat = p.reshape(p.transpose(out, 0, 2, 1, 3), self.batch, self.length, width)
        if gate is not None:
            flat = p.multiply(flat, p.unary("Sigmoid", gate))
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
        scores = p.where(self.mask(), scores)
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
        rows = self.batch * self.length
        scores, top = self._routed(part, x)
        top = p.flatten(top, 0, 2)
        order = p.op("ArgSort", [top], (rows * chosen,), FLOAT32)
        back = p.op("ArgSort", [order], (rows * chosen,), FLOAT32)
        index = p.take(top, order)
        wide = p.op("ExpandDims", [x], (*x.shape[:2], 1, 1, self.hidden), None, ((2, 3),))
        taken = p.take(p.flatten(wide, 0, 2), p.divide(order, p.scalar(FLOAT32)))
        y = self._switch(part, taken, index)
        y = p.unflatten(p.take(y, back), 0, (self.batch, self.length, chosen))
        y = p.squeeze(y, (3,))
        y = p.sum(p.multiply(y, p.expand_dims(scores, 3)), (2,))
        if not part.shared_intermediate_size:
            return y
        shared = self.dense(FeedForward(part.shared_intermediate_size, part.gated), x, "shared_")
        if named(self.layer, "shared_expert_gate") is not None:
            gate = p.unary("Sigmoid", self.project(x, "shared_expert_gate", 1, self.hidden))
            shared = p.multiply(gate, shared)
        return p.add(y, shared)

    def _routed(self, part: Experts, x: Value) -> tuple[Value, Value]:
        """The chosen experts' weights, and their numbers."""
        p = self.program
        gates = self.project(x, "gate", part.num_experts, self.hidden)
        sigmoid = self.architecture.model_type.startswith(SIGMOID_GATES)
        gates = p.unary("Sigmoid" if sigmoid else "Softmax", gates)
        ranked = gates
        if sigmoid:  # with a correction that the weights leave out
            ranked = p.unary("Negative", p.add(gates, self.weight("other", part.num_experts)))
        top = p.op("ArgPartition", [ranked], gates.shape, FLOAT32)
        top = p.stop_gradient(p.slice(top, 2, 0, part.num_experts_per_tok))
        scores = p.take_along_axis(gates, top)
        scores = p.divide(scores, p.sum(scores, (2,), keepdims=True))
        return p.scaled(scores) if sigmoid else scores, top

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
