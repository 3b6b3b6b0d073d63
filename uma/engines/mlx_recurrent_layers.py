"""Recurrent layers of ``mlx_lm.models`` as MLX's operations (mlx-lm 0.32.2), as far as laid out.

Mamba-2 (``ssm.py``) is laid out by chunks, a few for many, or by two where our own trainer runs it
in its own; the gated delta rule (``gated_delta.py``) by one chunk there, or by the arrays alive of
all its tokens. Other recurrences keep states of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from uma.architecture.layers import Recurrent
from uma.engines.mlx_gated_delta import ADAPTERS, ALL_TRAINED, FIRST, of_all_tokens
from uma.engines.mlx_own_recurrence import Chunks, repeated, ssm_chunk
from uma.engines.mlx_scan import laid_out, scanned
from uma.memory.mlx_program import Program, Value
from uma.memory.recurrence import delta_chunk, scan_chunk
from uma.quantization import FLOAT32

if TYPE_CHECKING:
    from uma.engines.mlx_layers import LayerProgram

STATES_KEPT = 3  # of each token by other recurrences: decayed, updated, and their product


def recurrent(run: LayerProgram, mixer: Recurrent, x: Value) -> Value:
    """Projections into the recurrence, its convolution, the recurrence, the projection out."""
    p, inner = run.program, mixer.inner_size or run.hidden
    matrices = [
        q
        for q in run.layer.parameters
        if q.kind == "matrix" and "in_proj" in q.name.rsplit(".", 1)[-1]
    ]
    names = [q.name.rsplit(".", 1)[-1] for q in matrices]
    parts = [
        run.project(x, name, q.shape[0], run.hidden)
        for name, q in zip(names, matrices, strict=True)
    ] or [run.project(x, "in_proj", 3 * inner, run.hidden)]
    if mixer.kind == "mamba2":
        y = _mamba2(run, mixer, parts[0])
    elif mixer.kind == "gated_delta":
        y = _gated_delta(run, mixer, parts)
    else:
        y = _other(p, mixer, parts[0], inner)
    return run.project(y, "out_proj", run.hidden, inner)


def _mamba2(run: LayerProgram, mixer: Recurrent, projected: Value) -> Value:
    """``mamba2.py``: a convolution of x, B and C, the scan, a gated norm."""
    p, (rows, length) = run.program, projected.shape[:2]
    heads, inner, state = mixer.num_heads, mixer.inner_size, _state(mixer)
    width = projected.shape[2] - inner - heads
    groups = (width - inner) // (2 * state[2])
    gate, mixed, dt = p.split(projected, 2, (inner, width, heads))
    x, b, c = p.split(
        _convolved(run, p.padded(mixed, 1, run.kernel - 1)),
        2,
        (inner, groups * state[2], groups * state[2]),
    )
    x = p.reshape(x, rows, length, heads, inner // heads)
    b, c = (p.reshape(part, rows, length, groups, state[2]) for part in (b, c))
    y = _scanned(run, [x, b, c, dt], state)
    return run.norm(run.activated(gate, p.reshape(y, rows, length, inner)), "norm")


def _scanned(run: LayerProgram, sequences: list[Value], state: Sequence[int]) -> Value:
    p, x, length = run.program, sequences[0], sequences[0].shape[1]
    chunk = scan_chunk(length, state[1] * state[2])
    constants = [run.weight(name, state[0]) for name in ("A_log", "D", "dt_bias")]
    if run.slice_bytes is not None and length > chunk:
        zeros = p.zeros((x.shape[0], *state), FLOAT32)
        scan = partial(ssm_chunk, compiled=not run.differentiated)
        return Chunks(p, sequences, constants, zeros, chunk, scan, x.shape[2:]).run()
    return scanned(p, sequences, constants, laid_out(run.workload.method, run.backend))


def _convolved(run: LayerProgram, padded: Value) -> Value:
    """A causal convolution of each channel, and SiLU."""
    p, (rows, length, channels) = run.program, padded.shape
    weight = run.weight("conv1d", channels, run.kernel, 1)
    shape = rows, length - run.kernel + 1, channels
    out = p.op("Convolution", [padded, weight], shape, None, (None, (0,), (0,)))
    if any(q.name.endswith("conv1d.bias") for q in run.layer.parameters):
        out = p.add(out, run.weight("conv1d", channels))
    return run.activated(out)


def _gated_delta(run: LayerProgram, mixer: Recurrent, parts: Sequence[Value]) -> Value:
    """``qwen3_next.py``: queries, keys and values convolved, the rule, a gated norm."""
    p, (rows, length) = run.program, parts[0].shape[:2]
    heads, wide, narrow = _state(mixer)
    values = heads * wide
    channels = next(q.shape[0] for q in run.layer.parameters if q.name.endswith("conv1d"))
    keys = (channels - values) // 2
    whole = parts[0] if len(parts) <= 2 else p.concatenate(parts[:2], 2)
    whole = p.reshape(whole, rows, length, keys // narrow, whole.shape[2] * narrow // keys)
    each = values * narrow // keys  # of values and of gates for a head of keys
    q, k, v, gate = p.split(whole, 3, (narrow, narrow, each, each))
    v, gate = (p.reshape(x, rows, length, heads, wide) for x in (v, gate))
    flat = p.concatenate([p.reshape(x, rows, length, prod(x.shape[2:])) for x in (q, k, v)], 2)
    before = p.zeros((rows, run.kernel - 1, channels), run.width)
    mixed = _convolved(run, p.concatenate([before, flat], 1))
    q, k, v = p.split(mixed, 2, (keys, keys, values))
    q, k = (p.reshape(part, rows, length, keys // narrow, narrow) for part in (q, k))
    v = p.reshape(v, rows, length, heads, wide)
    q, k = (p.scaled(run.normed(part)) for part in (q, k))
    b, a = p.split(parts[-1], 2, (heads, parts[-1].shape[2] - heads))
    beta = p.unary("Sigmoid", b)
    g = _decay(run, a)
    g = g if g.shape[2] == heads else beta
    y = _ruled(run, [q, k, v, g, beta], (rows, heads, wide, narrow))
    return p.reshape(run.activated(gate, run.norm(y, "norm")), rows, length, values)


def _decay(run: LayerProgram, a: Value) -> Value:
    """``compute_g``: by the time step, a softplus."""
    p, heads = run.program, a.shape[2]
    rate = p.unary("Exp", run.weight("A_log", heads))
    raised = p.add(a, run.weight("dt_bias", heads))
    step = p.binary("LogAddExp", raised, p.scalar(raised.width, "zero"))
    return p.unary("Exp", p.multiply(p.unary("Negative", rate), step))


def _ruled(run: LayerProgram, sequences: list[Value], state: tuple[int, ...]) -> Value:
    p, length = run.program, sequences[2].shape[1]
    chunk = delta_chunk(length)
    if run.slice_bytes is not None:
        if length > chunk:
            out = sequences[2].shape[2:]
            zeros = p.zeros(state, FLOAT32)
            return Chunks(p, sequences, (), zeros, chunk, _rule, out, laid_out=1).run()
        return delta_rule(p, sequences, p.zeros(state, FLOAT32))[0]
    alive = FIRST if run.first else ADAPTERS
    if run.workload.method == "full" and not run.summed_together:
        alive = ALL_TRAINED
    return of_all_tokens(p, sequences, state, alive)


def _rule(
    p: Program, sequences: Sequence[Value], _: Sequence[Value], state: Value
) -> tuple[Value, Value]:
    return delta_rule(p, sequences, state)


def delta_rule(p: Program, sequences: Sequence[Value], state: Value) -> tuple[Value, Value]:
    """``gated_delta_ops``: token by token."""
    q, k, v, g, beta = sequences
    repeats = v.shape[2] // q.shape[2]
    q, k = repeated(p, q, repeats, 2), repeated(p, k, repeats, 2)
    outputs: list[Value] = []
    for t in range(q.shape[1]):
        cut = [p.squeeze(p.slice(x, 1, t, t + 1), (1,)) for x in (q, k, v, g, beta)]
        out, state = _delta_step(p, cut, state)
        outputs.append(p.expand_dims(out, 1))
    return p.concatenate(outputs, 1), state


def _delta_step(p: Program, cut: Sequence[Value], state: Value) -> tuple[Value, Value]:
    """``_gated_delta_step_ops``: decay, what the key recalls, the correction, the read-out."""
    q, k, v, g, beta = cut
    decay = p.op("ExpandDims", [g], (*g.shape, 1, 1), None, ((2, 3),))
    state = p.multiply(state, decay)
    recalled = p.sum(p.multiply(state, p.expand_dims(k, 2)), (3,))
    delta = p.multiply(p.subtract(v, recalled), p.expand_dims(beta, 2))
    state = p.add(state, p.multiply(p.expand_dims(k, 2), p.expand_dims(delta, 3)))
    return p.sum(p.multiply(state, p.expand_dims(q, 2)), (3,)), state


def _other(p: Program, mixer: Recurrent, x: Value, inner: int) -> Value:
    """States of each token, and as many made going back."""
    rows, length = x.shape[:2]
    kept = (rows, length, STATES_KEPT, prod(_state(mixer)))

    def forward() -> Value:
        states.append(p.op("Scan", [x], kept, FLOAT32, opaque=True))
        return p.op("Scan", [states[0]], (rows, length, inner), x.width, opaque=True)

    def backward(g: Value) -> list[Value]:
        back = p.op("Scan", [g, states[0]], kept, FLOAT32, opaque=True)
        return [p.op("Scan", [back], x.shape, x.width, opaque=True)]

    states: list[Value] = []
    return p.custom(forward, backward, [x])


def _state(mixer: Recurrent) -> tuple[int, ...]:
    shapes = [s.shape for s in mixer.states if len(s.shape) == 3]
    return max(shapes, key=prod) if shapes else (1, 1, 1)
