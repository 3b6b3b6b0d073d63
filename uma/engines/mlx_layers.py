"""Layers of ``mlx_lm.models`` in a training step, and the whole step (mlx-lm 0.32.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class LayerRun:
    """One layer of a step."""

    step: Step
    layer: Layer
    adapters: dict[str, Adapter]

    def linear(self, x: int, *ends: str) -> int:
        parameter = named(self.layer, *ends)
        assert parameter is not None, ends
        return self.step.linear(x, parameter, self.adapters.get(parameter.name))

    def forward(self, x: int) -> int:
        step = self.step
        around = named(self.layer, "pre_feedforward_layernorm") is not None
        before = "pre_feedforward_layernorm" if around else "post_attention_layernorm"
        for mixer in self.layer.mixers:
            out = self._mix(mixer, self._norm(x, "input_layernorm", "norm"))
            x = step.add(x, self._norm(out, "post_attention_layernorm") if around else out)
        for part in self.layer.feed_forward:
            out = self._feed_forward(part, self._norm(x, before))
            x = step.add(x, self._norm(out, "post_feedforward_layernorm") if around else out)
        return x

    def _norm(self, x: int, *ends: str) -> int:
        return self.step.norm(x, named(self.layer, *ends))

    def _mix(self, mixer: Attention | LatentAttention | Recurrent, x: int) -> int:
        if isinstance(mixer, Attention):
            return self._attention(mixer, x)
        if isinstance(mixer, LatentAttention):
            return self._latent(mixer, x)
        return self._recurrent(mixer, x)

    def _attention(self, mixer: Attention, x: int) -> int:
        step = self.step
        q = self.linear(x, "q_proj")
        k = self.linear(x, "k_proj")
        v = self.linear(x, "v_proj")
        if named(self.layer, "q_norm") is not None:
            q, k = step.norm(q), step.norm(k)
        q, k = step.rotary(q), step.rotary(k)
        out = attention(step, q, k, v, mixer.num_attention_heads)
        return self.linear(step.moved(out), "o_proj")

    def _feed_forward(self, part: FeedForward | Experts, x: int) -> int:
        return self._dense(part, x) if isinstance(part, FeedForward) else self._experts(part, x)

    def _dense(self, part: FeedForward, x: int) -> int:
        if not part.gated:
            return self.linear(self.step.elementwise(self.linear(x, "up_proj")), "down_proj")
        gate, up = self.linear(x, "gate_proj"), self.linear(x, "up_proj")
        return self.linear(self.step.elementwise(gate, up, kept=2), "down_proj")

    def _latent(self, mixer: LatentAttention, x: int) -> int:
        """Keys and values of all heads from the latent; rotary scores as the mask."""
        step, heads, tokens = self.step, mixer.num_attention_heads, self.step.tokens
        if named(self.layer, "q_a_proj") is not None:
            low = step.norm(self.linear(x, "q_a_proj"), named(self.layer, "q_a_layernorm"))
            q = self.linear(low, "q_b_proj")
        else:
            q = self.linear(x, "q_proj")
        nope = step.part(q, tokens * heads * mixer.qk_nope_head_dim)
        rope = step.rotary(step.part(q, tokens * heads * mixer.qk_rope_head_dim))
        both = self.linear(x, "kv_a_proj_with_mqa")
        latent = step.norm(
            step.part(both, tokens * mixer.kv_lora_rank), named(self.layer, "kv_a_layernorm")
        )
        key_rope = step.rotary(step.part(both, tokens * mixer.qk_rope_head_dim))
        rotary_scores = scores(step, rope, key_rope, heads)
        keys = self._heads(latent, "embed_q", heads * mixer.qk_nope_head_dim)
        values = self._heads(latent, "unembed_out", heads * mixer.v_head_dim)
        out = attention(step, nope, keys, values, heads, rotary_scores)
        return self.linear(step.moved(out), "o_proj")

    def _heads(self, latent: int, end: str, rows: int) -> int:
        parameter = named(self.layer, end)
        assert parameter is not None
        weight = self.step.weight(parameter)
        return self.step.matmul(latent, weight, parameter.size // rows, rows)

    def _recurrent(self, mixer: Recurrent, x: int) -> int:
        """A recurrence, token by token: states of all tokens are kept for the gradient."""
        step = self.step
        inputs = [p for p in self.layer.parameters if _is_input(p)]
        ins = [step.linear(x, p, self.adapters.get(p.name)) for p in inputs]
        inner = mixer.inner_size or step.architecture.hidden_size
        if mixer.kind == "mamba2":
            out = chunked_scan(step, ins[0], mixer, inner)
        elif mixer.kind == "gated_delta":
            out = delta_rule(step, ins[0], mixer, inner)
        else:
            out = recurrence(step, ins, _state_elements(mixer), inner)
        return self.linear(out, "out_proj")

    def _experts(self, part: Experts, x: int) -> int:
        """``SwitchGLU``: rows in the order of their experts, one product for all of them."""
        step, hidden = self.step, self.step.architecture.hidden_size
        rows = step.tokens * part.num_experts_per_tok
        routed = self._routed(part, x, rows)
        sorted_rows = step.gathered(x, rows * hidden)
        gate = self._stacked(sorted_rows, "gate_proj", "fc1")
        inner = step.elementwise(gate, self._stacked(sorted_rows, "up_proj"), kept=2)
        down = step.gathered(self._stacked(inner, "down_proj", "fc2"), rows * hidden)
        out = step.weighted(down, routed, step.tokens * hidden)
        if not part.shared_intermediate_size:
            return out
        return step.add(out, self._shared(x))

    def _routed(self, part: Experts, x: int, rows: int) -> int:
        """The weights of the chosen experts: a softmax of all, the largest, their share."""
        router = next(
            (
                p
                for p in self.layer.parameters
                if p.shape[:1] == (part.num_experts,) and len(p.shape) == 2
            ),
            None,
        )
        assert router is not None
        gates = self.step.linear(x, router, self.adapters.get(router.name))
        return self.step.gathered(self.step.elementwise(gates), rows)

    def _stacked(self, x: int, *ends: str) -> int:
        parameter = next(
            p for p in self.layer.parameters if len(p.shape) == 3 and p.name.endswith(ends)
        )
        return self.step.linear(x, parameter, self.adapters.get(parameter.name))

    def _shared(self, x: int) -> int:
        def found(end: str) -> Parameter:
            return next(
                p
                for p in self.layer.parameters
                if "shared" in p.name and p.name.endswith(end) and len(p.shape) == 2
            )

        def run(value: int, end: str) -> int:
            parameter = found(end)
            return self.step.linear(value, parameter, self.adapters.get(parameter.name))

        return run(self.step.elementwise(run(x, "gate_proj"), run(x, "up_proj")), "down_proj")


# Arrays of the parameter's shape that optimizers keep (mlx 0.32.4, optimizers.py).
STATE_ARRAYS = {"adam": 2, "adamw": 2, "adafactor": 1, "sgd": 1, "lion": 1, "muon": 1}


def _is_input(parameter: Parameter) -> bool:
    last = parameter.name.rsplit(".", 1)[-1]
    return parameter.kind == "matrix" and last.startswith("in_proj")


def _state_elements(mixer: Recurrent) -> int:
    return max((prod(s.shape) for s in mixer.states if len(s.shape) == 3), default=0)


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
    decay = step.elementwise(decay)
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


def recurrence(step: Step, inputs: Sequence[int], state: int, inner: int) -> int:
    """A scan over tokens: ``STATES_KEPT`` states of each are kept, and as many made going back."""
    graph, width = step.graph, step.graph.width(inputs[0])
    kept = step.workload.batch_size * step.length * state
    first = graph.run("Scan", inputs, kept, FLOAT32, outputs=STATES_KEPT)
    states = range(first, first + STATES_KEPT)
    out = graph.run("Scan", tuple(states), step.tokens * inner, width)

    def vjp(gradient: int) -> list[int]:
        made = graph.run("Scan", (gradient, *states), kept, FLOAT32, outputs=STATES_KEPT)
        back = range(made, made + STATES_KEPT)
        return [graph.run("Scan", tuple(back), graph.size(i), graph.width(i)) for i in inputs]

    return graph.record(inputs, out, vjp)


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
    for layer in architecture.layers:
        found = layer_adapters(layer, workload) if id(layer) in trained else ()
        run = LayerRun(step, layer, {a.parameter.name: a for a in found})
        x = checkpointed(step, run.forward, x) if workload.grad_checkpoint else run.forward(x)
    return [loss(step, step.norm(x))]
