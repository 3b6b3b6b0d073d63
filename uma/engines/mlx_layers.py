"""Layers of ``mlx_lm.models`` in a training step, and the whole step (mlx-lm 0.32.2)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from uma.architecture.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Parameter,
    Recurrent,
)
from uma.engines.mlx_step import FLOAT32, Step, checkpointed, loss
from uma.memory.adapters import Adapter, layer_adapters, trained_layers


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


@dataclass(slots=True)
class LayerRun:
    """One layer of a step: ``index`` tells its arrays from those of other layers."""

    step: Step
    layer: Layer
    index: int
    adapters: dict[str, Adapter]

    def project(self, x: int, role: str, rows: int, columns: int, count: int = 1) -> int:
        """The matrix of a role with its adapter, whatever the family calls it.

        Matrices of several roles in one (``qkv_proj``) are laid out as one for each.
        """
        shape = (rows, columns) if count == 1 else (count, rows, columns)
        parameter = Parameter(f"{self.index}.{role}", shape, "matrix")
        names = ROLES.get(role, (role,))
        found = next((a for n, a in self.adapters.items() if n.endswith(names)), None)
        adapter = None if found is None else replace(found, parameter=parameter)
        return self.step.linear(x, parameter, adapter)

    def forward(self, x: int) -> int:
        step = self.step
        around = named(self.layer, "pre_feedforward_layernorm") is not None
        for i, mixer in enumerate(self.layer.mixers):
            out = self._mix(mixer, self._norm(x, f"norm{i}"))
            x = step.add(x, self._norm(out, f"after{i}") if around else out)
        for i, part in enumerate(self.layer.feed_forward):
            out = self._feed_forward(part, self._norm(x, f"feed{i}"))
            x = step.add(x, self._norm(out, f"fed{i}") if around else out)
        return x

    def _norm(self, x: int, role: str) -> int:
        width = self.step.graph.size(x) // self.step.tokens
        return self.step.norm(x, Parameter(f"{self.index}.{role}", (width,), "other"))

    def _mix(self, mixer: Attention | LatentAttention | Recurrent, x: int) -> int:
        if isinstance(mixer, Attention):
            return self._attention(mixer, x)
        if isinstance(mixer, LatentAttention):
            return self._latent(mixer, x)
        return self._recurrent(mixer, x)

    def _attention(self, mixer: Attention, x: int) -> int:
        step, hidden = self.step, self.step.architecture.hidden_size
        heads, groups = mixer.num_attention_heads, mixer.num_key_value_heads
        q = self.project(x, "q_proj", heads * mixer.head_dim, hidden)
        k = self.project(x, "k_proj", groups * mixer.head_dim, hidden)
        v = self.project(x, "v_proj", groups * mixer.v_head_dim, hidden)
        if named(self.layer, "q_norm") is not None:
            q, k = step.norm(q), step.norm(k)
        q, k = step.rotary(q), step.rotary(k)
        out = attention(step, q, k, v, heads)
        return self.project(step.moved(out), "o_proj", hidden, heads * mixer.v_head_dim)

    def _latent(self, mixer: LatentAttention, x: int) -> int:
        """Keys and values of all heads from the latent; rotary scores as the mask."""
        step, heads, tokens = self.step, mixer.num_attention_heads, self.step.tokens
        hidden, rank = step.architecture.hidden_size, mixer.kv_lora_rank
        wide = heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
        low = named(self.layer, "q_a_proj")
        if low is None:
            q = self.project(x, "q_proj", wide, hidden)
        else:
            inner = low.shape[0]
            narrow = self._norm(self.project(x, "q_a_proj", inner, hidden), "q_a_layernorm")
            q = self.project(narrow, "q_b_proj", wide, inner)
        nope = step.part(q, tokens * heads * mixer.qk_nope_head_dim)
        rope = step.rotary(step.part(q, tokens * heads * mixer.qk_rope_head_dim))
        both = self.project(x, "kv_a_proj_with_mqa", rank + mixer.qk_rope_head_dim, hidden)
        latent = self._norm(step.part(both, tokens * rank), "kv_a_layernorm")
        key_rope = step.rotary(step.part(both, tokens * mixer.qk_rope_head_dim))
        rotary_scores = scores(step, rope, key_rope, heads)
        keys = self._heads(latent, "embed_q", heads * mixer.qk_nope_head_dim, rank)
        values = self._heads(latent, "unembed_out", heads * mixer.v_head_dim, rank)
        out = attention(step, nope, keys, values, heads, rotary_scores)
        return self.project(step.moved(out), "o_proj", hidden, heads * mixer.v_head_dim)

    def _heads(self, latent: int, role: str, rows: int, rank: int) -> int:
        """The latent's products with a matrix for each head, which has no adapter."""
        parameter = Parameter(f"{self.index}.{role}", (rows, rank), "matrix")
        return self.step.linear(latent, parameter, None)

    def _recurrent(self, mixer: Recurrent, x: int) -> int:
        """A recurrence, token by token or in chunks."""
        step, hidden = self.step, self.step.architecture.hidden_size
        inner = mixer.inner_size or hidden
        inputs = [p for p in self.layer.parameters if _is_input(p, hidden)]
        wide = sum(p.shape[0] for p in inputs) or 3 * inner
        projected = self.project(x, "in_proj", wide, hidden)
        if mixer.kind == "mamba2":
            out = chunked_scan(step, projected, mixer, inner)
        elif mixer.kind == "gated_delta":
            out = delta_rule(step, projected, mixer, inner)
        else:
            out = recurrence(step, projected, _state_elements(mixer), inner)
        return self.project(out, "out_proj", hidden, inner)

    def _feed_forward(self, part: FeedForward | Experts, x: int) -> int:
        if isinstance(part, FeedForward):
            return self._dense(part, x, "")
        return self._experts(part, x)

    def _dense(self, part: FeedForward, x: int, prefix: str) -> int:
        hidden, inner = self.step.architecture.hidden_size, part.intermediate_size
        up = self.project(x, f"{prefix}up_proj", inner, hidden)
        if not part.gated:
            return self.project(self.step.elementwise(up), f"{prefix}down_proj", hidden, inner)
        gate = self.project(x, f"{prefix}gate_proj", inner, hidden)
        product = self.step.elementwise(gate, up, kept=2)
        return self.project(product, f"{prefix}down_proj", hidden, inner)

    def _experts(self, part: Experts, x: int) -> int:
        """``SwitchGLU``: rows in the order of their experts, one product for all of them."""
        step, hidden = self.step, self.step.architecture.hidden_size
        rows = step.tokens * part.num_experts_per_tok
        count, inner = part.num_experts, part.moe_intermediate_size
        gates = self.project(x, "gate", count, hidden)
        routed = step.gathered(step.elementwise(gates), rows)
        sorted_rows = step.gathered(x, rows * hidden)
        up = self.project(sorted_rows, "up_proj", inner, hidden, count)
        if part.gated:
            gate = self.project(sorted_rows, "gate_proj", inner, hidden, count)
            up = step.elementwise(gate, up, kept=2)
        else:
            up = step.elementwise(up)
        down = self.project(up, "down_proj", hidden, inner, count)
        out = step.weighted(step.gathered(down, rows * hidden), routed, step.tokens * hidden)
        if not part.shared_intermediate_size:
            return out
        shared = FeedForward(part.shared_intermediate_size, part.gated)
        return step.add(out, self._dense(shared, x, "shared_"))


def _is_input(parameter: Parameter, hidden: int) -> bool:
    """Whether it is a projection into a recurrence: of the stream, and named so."""
    last = parameter.name.rsplit(".", 1)[-1]
    return parameter.kind == "matrix" and parameter.shape[-1] == hidden and "in_proj" in last


def _state_elements(mixer: Recurrent) -> int:
    return max((prod(s.shape) for s in mixer.states if len(s.shape) == 3), default=0)


# Arrays of the parameter's shape that optimizers keep (mlx 0.32.4, optimizers.py).
STATE_ARRAYS = {"adam": 2, "adamw": 2, "adafactor": 1, "sgd": 1, "lion": 1, "muon": 1}


def scores(step: Step, q: int, k: int, heads: int) -> int:
    """Products of all pairs of tokens, masked."""
    graph, width = step.graph, step.graph.width(q)
    pairs = step.workload.batch_size * heads * step.length * step.length
    made = graph.run("Matmul", (q, k), pairs, width)
    out = graph.run("Compiled", (made,), pairs, width, donors=(0,))

    def vjp(gradient: int) -> list[int]:
        masked = graph.run("Compiled", (gradient,), pairs, width, donors=(0,))
        dq = graph.run("Matmul", (masked, k), graph.size(q), width)
        dk = graph.run("Matmul", (masked, q), graph.size(k), width)
        return [dq, dk]

    return graph.record((q, k), out, vjp)


def attention(step: Step, q: int, k: int, v: int, heads: int, mask: int | None = None) -> int:
    """Scores, mask, softmax and the product with the values; all pairs of tokens.

    The softmax is what is kept; its gradient is ``s * (g - sum(g * s))``.
    """
    graph, width = step.graph, step.graph.width(q)
    pairs = step.workload.batch_size * heads * step.length * step.length
    out_elements = graph.size(q) // max(1, graph.size(k)) * graph.size(v)
    if step.workload.attention == "fused" and mask is None:
        return fused_attention(step, (q, k, v), out_elements)
    made = graph.run("Matmul", (q, k), pairs, width)
    extra = () if mask is None else (mask,)
    masked = graph.run("Compiled", (made, *extra), pairs, width, donors=(0,))
    weights = graph.run("Softmax", (masked,), pairs, width, donors=(0,))
    out = graph.run("Matmul", (weights, v), out_elements, width)

    def vjp(gradient: int) -> Sequence[int]:
        dv = graph.run("Matmul", (weights, gradient), graph.size(v), width)
        dw = graph.run("Matmul", (gradient, v), pairs, width)
        product = graph.run("Compiled", (dw, weights), pairs, width, donors=(0,))
        total = graph.run("Reduce", (product,), pairs // step.length, width)
        ds = graph.run("Compiled", (product, weights, total), pairs, width, donors=(0,))
        dq = graph.run("Matmul", (ds, k), graph.size(q), width)
        dk = graph.run("Matmul", (ds, q), graph.size(k), width)
        return [dq, dk, dv, *((ds,) if extra else ())]

    return graph.record((q, k, v, *extra), out, vjp)


def fused_attention(step: Step, inputs: tuple[int, int, int], elements: int) -> int:
    """One kernel each way; only the output is kept, and a float32 a row that is left out."""
    graph, width = step.graph, step.graph.width(inputs[0])
    out = graph.run("ScaledDotProductAttention", inputs, elements, width)

    def vjp(gradient: int) -> list[int]:
        given = (*inputs, out, gradient)
        return [graph.run("AttentionVJP", given, graph.size(i), width) for i in inputs]

    return graph.record(inputs, out, vjp)


SSM_CHUNK = 256  # ssm.py, ssm_attn: step


def chunked_scan(step: Step, x: int, mixer: Recurrent, inner: int) -> int:
    """Mamba-2 (``ssm.py``, ``ssm_attn``): pairs of tokens within chunks, three arrays of them kept.

    The decays are differences of cumulative sums made in full: repeated, cut, summed, raised.
    """
    graph, width = step.graph, step.graph.width(x)
    chunk = min(SSM_CHUNK, step.length)
    pairs = step.tokens * mixer.num_heads * chunk
    values = step.elementwise(step.part(x, step.tokens * inner))  # the convolution, in the end
    gate = step.part(x, step.tokens * inner)
    sums = step.part(x, step.tokens * mixer.num_heads)
    decay = sums
    for _ in range(3):  # repeat, tril, cumsum
        decay = expanded(step, decay, pairs)
    decay = step.elementwise(decay, of_output=True)  # exp
    products = expanded(step, step.part(x, step.tokens * mixer.num_heads), pairs)
    surrogate = step.elementwise(products, decay)
    made = graph.run("Matmul", (surrogate, values), step.tokens * inner, width)

    def vjp(gradient: int) -> list[int]:
        return [
            graph.run("Matmul", (gradient, values), pairs, width),
            graph.run("Matmul", (surrogate, gradient), graph.size(values), width),
        ]

    out = graph.record((surrogate, values), made, vjp)
    return step.norm(step.elementwise(out, gate))


def expanded(step: Step, x: int, elements: int) -> int:
    """``x`` made into more elements, or cut or summed along them; the gradient goes back."""
    graph, width, size = step.graph, step.graph.width(x), step.graph.size(x)
    donors = (0,) if size == elements else ()
    out = graph.run("Expand", (x,), elements, width, donors=donors)
    return graph.record(
        (x,), out, lambda g: [graph.run("Reduce", (g,), size, width, donors=donors)]
    )


# One Qwen3.5 layer, 32 heads of 128 x 128, on Metal (mlx-lm pull request 1870): 4.3, 10.2, 31.4 and
# 108 GB at 512, 1,024, 2,048 and 4,096 tokens. A straight line and a square through the first and
# the last give states of each token and arrays of all tokens for a share of the tokens' slices.
DELTA_STATES = 2.8
DELTA_SLICES = 0.10


def delta_rule(step: Step, x: int, mixer: Recurrent, inner: int) -> int:
    """The gated delta rule, token by token (``gated_delta.py``, ``gated_delta_ops``).

    States are kept for every token, half of them before the gradient, and the gradient of each
    token's slice of queries, keys and values is an array of all tokens.
    """
    graph, width, tokens = step.graph, step.graph.width(x), step.tokens
    state = _state_elements(mixer)
    kept = round(tokens * state * DELTA_STATES / 2)
    wide = 2 * state // max(1, inner // mixer.num_heads) + inner  # of queries, keys and values
    states = graph.run("Scan", (x,), kept, FLOAT32)
    out = graph.run("Scan", (states,), tokens * inner, width)

    def vjp(gradient: int) -> list[int]:
        slices = round(DELTA_SLICES * tokens * step.length * wide)
        back = graph.run("Scan", (gradient, states), kept, FLOAT32)
        padded = graph.run("Pad", (back,), slices, FLOAT32)
        return [graph.run("Reduce", (padded, back), graph.size(x), width)]

    return step.norm(graph.record((x,), out, vjp))


STATES_KEPT = 3  # of each token: decayed, with the update, and their product before a sum


def recurrence(step: Step, x: int, state: int, inner: int) -> int:
    """A scan over tokens: ``STATES_KEPT`` states of each are kept, and as many made going back."""
    graph, width = step.graph, step.graph.width(x)
    kept = step.workload.batch_size * step.length * state
    first = graph.run("Scan", (x,), kept, FLOAT32, outputs=STATES_KEPT)
    states = range(first, first + STATES_KEPT)
    out = graph.run("Scan", tuple(states), step.tokens * inner, width)

    def vjp(gradient: int) -> list[int]:
        made = graph.run("Scan", (gradient, *states), kept, FLOAT32, outputs=STATES_KEPT)
        back = range(made, made + STATES_KEPT)
        return [graph.run("Scan", tuple(back), graph.size(x), width)]

    return graph.record((x,), out, vjp)


def built(step: Step) -> list[int]:
    """The whole step; the arrays that are evaluated: parameters, states, the loss.

    ``mlx_lm/tuner/trainer.py``, ``train``: parameters first, then the optimizer's arrays.
    """
    graph = step.graph
    (value,) = forward_only(step)
    gradients = graph.gradients(value, graph.source(1, FLOAT32), step.trained)
    count = STATE_ARRAYS.get(step.workload.optimizer, 2)
    parameters: list[int] = []
    states: list[int] = []
    for array, gradient in zip(step.trained, gradients, strict=True):
        if gradient is None:
            continue
        size, width = graph.size(array), graph.width(array)
        first = [graph.source(size, width) for _ in range(count)]
        donors = range(1, 2 + count)
        inputs = (array, gradient, *first)
        new = graph.run("Compiled", inputs, size, width, donors=donors, outputs=1 + count)
        parameters.append(new)
        states += range(new + 1, new + 1 + count)
    return [*parameters, *states, value]


def forward_only(step: Step) -> list[int]:
    """Layers, head and loss; the loss."""
    architecture, workload, graph = step.architecture, step.workload, step.graph
    x = graph.source(step.tokens * architecture.hidden_size, step.width)
    trained = {id(layer) for layer in trained_layers(architecture, workload)}
    for index, layer in enumerate(architecture.layers):
        found = layer_adapters(layer, workload) if id(layer) in trained else ()
        run = LayerRun(step, layer, index, {a.parameter.name: a for a in found})
        x = checkpointed(step, run.forward, x) if workload.grad_checkpoint else run.forward(x)
    return [loss(step, step.norm(x))]
