"""Recurrent layers of ``mlx_lm.models`` as MLX's operations (mlx-lm 0.32.2), as far as laid out.

Mamba-2 (``ssm.py``) is laid out whole, or by one chunk where our own trainer runs it in chunks; the
gated delta rule (``gated_delta.py``) by one chunk, or by a few tokens. Other recurrences keep
states of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from uma.architecture.layers import Recurrent
from uma.memory.mlx_program import Program, Value
from uma.memory.recurrence import delta_chunk, scan_chunk

if TYPE_CHECKING:
    from uma.engines.mlx_layers import LayerProgram

FLOAT32 = 4
SSM_STEP = 256  # ssm.py, ssm_attn: step
LAID_OUT = 16  # chunks of one scan at most
STATES_KEPT = 3  # of each token by other recurrences: decayed, updated, and their product

# One Qwen3.5 layer, 32 heads of 128 x 128, on Metal (mlx-lm pull request 1870): 4.3, 10.2, 31.4 and
# 108 GB at 512, 1,024, 2,048 and 4,096 tokens. A straight line and a square through the first and
# the last give states of each token and arrays of all tokens for a share of the tokens' slices.
DELTA_STATES = 2.8
DELTA_SLICES = 0.10

Scan = Callable[[Program, Sequence[Value], Value], tuple[Value, Value]]
"""Outputs and the next state from sequences (tokens second) and a state."""


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
    x, b, c = p.split(_convolved(run, mixed), 2, (inner, groups * state[2], groups * state[2]))
    x = p.reshape(x, rows, length, heads, inner // heads)
    b, c = (p.reshape(part, rows, length, groups, state[2]) for part in (b, c))
    y = _scanned(run, [x, b, c, dt], state)
    return run.norm(run.activated(gate, p.reshape(y, rows, length, inner)), "other")


def _scanned(run: LayerProgram, sequences: list[Value], state: Sequence[int]) -> Value:
    p, x, length = run.program, sequences[0], sequences[0].shape[1]
    chunk = scan_chunk(length, state[1] * state[2])
    if run.slice_bytes is not None and length > chunk:
        return by_chunks(run, sequences, (x.shape[0], *state), chunk, _scan)
    outputs: list[Value] = []
    dtx, dta = _steps(p, sequences[0], sequences[3])
    carried: Value | None = None
    for at in range(0, length, SSM_STEP):
        end = min(at + SSM_STEP, length)
        cut = [p.slice(part, 1, at, end) for part in (dtx, dta, *sequences[1:3])]
        y, carried = _ssm_step(p, cut, carried)
        outputs.append(y)
    return p.add(p.concatenate(outputs, 1), p.scaled(x))


def _scan(p: Program, sequences: Sequence[Value], state: Value) -> tuple[Value, Value]:
    """``ssm_attn`` of one chunk."""
    x, b, c, dt = sequences
    dtx, dta = _steps(p, x, dt)
    y, carried = _ssm_step(p, [dtx, dta, b, c], state)
    return p.add(y, p.scaled(x)), carried


def _steps(p: Program, x: Value, dt: Value) -> tuple[Value, Value]:
    """Inputs and decays by their time steps."""
    raised = p.add(p.astype(dt, FLOAT32), p.scalar(FLOAT32))
    step = p.unary("Exp", raised)  # for softplus and its clipping
    dta = p.scaled(step)
    return p.multiply(p.reshape(step, *step.shape, 1), x), dta


def _ssm_step(p: Program, cut: Sequence[Value], state: Value | None) -> tuple[Value, Value]:
    """``ssm_attn``, ``_step``: pairs of tokens within the chunk, and the state before it."""
    dtx, dta, b, c = cut
    rows, length, heads, width = dtx.shape
    groups, size = b.shape[2], b.shape[3]
    repeats = heads // groups
    b = p.transpose(b, 0, 2, 3, 1)
    pairs = _repeated(p, p.matmul(p.transpose(c, 0, 2, 1, 3), b), repeats, 1)
    spread = p.broadcast_to(
        p.expand_dims(p.transpose(dta, 0, 2, 1), 3), (rows, heads, length, length)
    )
    spread = p.op("Reshape", [spread], (rows, heads, length, length))
    decay = p.unary("Exp", p.op("Scan", [_lower(p, spread)], spread.shape))
    weights = _lower(p, p.multiply(pairs, decay))
    y = p.transpose(p.matmul(weights, p.transpose(dtx, 0, 2, 1, 3)), 0, 2, 1, 3)
    last = p.transpose(p.slice(decay, 2, length - 1, length), 0, 3, 1, 2)
    b = p.transpose(_repeated(p, b, repeats, 1), 0, 1, 3, 2)
    held = p.transpose(p.multiply(dtx, last), 0, 2, 3, 1)
    new = p.matmul(held, b)
    if state is None:
        return y, new
    grown = p.unary("Exp", p.op("Scan", [dta], dta.shape))
    final = p.reshape(p.slice(grown, 1, length - 1, length), rows, heads, 1, 1)
    new = p.add(new, p.multiply(final, state))
    c = p.reshape(c, rows, length, groups, 1, size, 1)
    before = p.reshape(state, rows, 1, groups, repeats, width, size)
    seen = p.flatten(p.squeeze(p.matmul(before, c), (5,)), 2, 3)
    return p.add(y, p.multiply(p.expand_dims(grown, 3), seen)), new


def _lower(p: Program, x: Value) -> Value:
    """``mx.tril``: the lower triangle of the last two axes."""
    length = x.shape[-1]
    sides = [p.broadcast_to(p.expand_dims(p.arange(length), i), (length, length)) for i in (1, 0)]
    return p.where(p.op("GreaterEqual", sides, (length, length), 1), x)


def _repeated(p: Program, x: Value, count: int, axis: int) -> Value:
    if count == 1:
        return x
    shape = list(x.shape)
    shape.insert(axis + 1, count)
    return p.flatten(p.broadcast_to(p.expand_dims(x, axis + 1), tuple(shape)), axis, axis + 1)


def _convolved(run: LayerProgram, x: Value) -> Value:
    """A causal convolution of each channel, and SiLU."""
    p, channels = run.program, x.shape[2]
    stored = next(q for q in run.layer.parameters if q.name.endswith("conv1d"))
    kernel = stored.shape[1]
    padded = p.padded(x, 1, kernel - 1)
    weight = run.weight("other", channels, kernel, 1)
    out = p.op("Convolution", [padded, weight], x.shape, None, (None, (0,), (0,)))
    if any(q.name.endswith("conv1d.bias") for q in run.layer.parameters):
        out = p.add(out, run.weight("other", channels))
    return run.activated(out)


def _gated_delta(run: LayerProgram, mixer: Recurrent, parts: Sequence[Value]) -> Value:
    """``qwen3_next.py``: queries, keys and values convolved, the rule, a gated norm."""
    p, (rows, length) = run.program, parts[0].shape[:2]
    heads, wide, narrow = _state(mixer)
    values = heads * wide
    channels = next(q.shape[0] for q in run.layer.parameters if q.name.endswith("conv1d"))
    keys = (channels - values) // 2
    whole = parts[0] if len(parts) <= 2 else p.concatenate(parts[:2], 2)
    mixed, gate = p.split(whole, 2, (channels, values))
    mixed = _convolved(run, p.concatenate(p.split(mixed, 2, (keys, keys, values)), 2))
    q, k, v = p.split(mixed, 2, (keys, keys, values))
    q, k = (p.reshape(part, rows, length, keys // narrow, narrow) for part in (q, k))
    v = p.reshape(v, rows, length, heads, wide)
    q, k = (p.scaled(run.norm(part, "other")) for part in (q, k))
    b, a = p.split(parts[-1], 2, (heads, parts[-1].shape[2] - heads))
    beta = p.unary("Sigmoid", b)
    g = p.unary("Exp", p.scaled(p.unary("Exp", p.add(p.astype(a, FLOAT32), p.scalar(FLOAT32)))))
    g = g if g.shape[2] == heads else beta
    y = _ruled(run, [q, k, v, g, beta], (rows, heads, wide, narrow))
    gate = p.reshape(gate, rows, length, heads, wide)
    return p.reshape(run.activated(gate, run.norm(y, "other")), rows, length, values)


def _ruled(run: LayerProgram, sequences: list[Value], state: Sequence[int]) -> Value:
    p, (rows, length) = run.program, sequences[2].shape[:2]
    chunk = delta_chunk(length)
    if run.slice_bytes is not None:
        if length > chunk:
            return by_chunks(run, sequences, state, chunk, delta_rule)
        return delta_rule(p, sequences, p.zeros(tuple(state), FLOAT32))[0]
    return _of_all_tokens(p, sequences, rows * length * prod(state[1:]))


def _of_all_tokens(p: Program, sequences: list[Value], state: int) -> Value:
    """States of every token, and the gradient of each token's slices as an array of all tokens."""
    rows, length = sequences[0].shape[:2]
    kept = (round(state * DELTA_STATES / 2),)
    wide = sum(prod(x.shape[2:]) for x in sequences[:3])

    def forward() -> Value:
        states.append(p.op("Scan", sequences, kept, FLOAT32, opaque=True))
        return p.op("Scan", states, sequences[2].shape, sequences[2].width, opaque=True)

    def backward(g: Value) -> list[Value]:
        slices = (round(DELTA_SLICES * rows * length * length * wide),)
        back = p.op("Scan", [g, *states], kept, FLOAT32, opaque=True)
        padded = p.op("Pad", [back], slices, FLOAT32, opaque=True)
        given = [padded, back]
        return [p.op("Reduce", given, x.shape, x.width, opaque=True) for x in sequences]

    states: list[Value] = []
    return p.custom(forward, backward, sequences)


def delta_rule(p: Program, sequences: Sequence[Value], state: Value) -> tuple[Value, Value]:
    """``gated_delta_ops``: token by token."""
    q, k, v, g, beta = sequences
    repeats = v.shape[2] // q.shape[2]
    q, k = _repeated(p, q, repeats, 2), _repeated(p, k, repeats, 2)
    outputs: list[Value] = []
    for t in range(q.shape[1]):
        cut = [p.squeeze(p.slice(x, 1, t, t + 1), (1,)) for x in (q, k, v, g, beta)]
        out, state = _delta_step(p, cut, state)
        outputs.append(p.expand_dims(out, 1))
    return p.concatenate(outputs, 1), state


def _delta_step(p: Program, cut: Sequence[Value], state: Value) -> tuple[Value, Value]:
    """``_gated_delta_step_ops``: decay, what the key recalls, the correction, the read-out."""
    q, k, v, g, beta = cut
    state = p.multiply(state, p.expand_dims(p.expand_dims(g, 2), 3))
    recalled = p.sum(p.multiply(state, p.expand_dims(k, 2)), (3,))
    delta = p.multiply(p.subtract(v, recalled), p.expand_dims(beta, 2))
    state = p.add(state, p.multiply(p.expand_dims(k, 2), p.expand_dims(delta, 3)))
    return p.sum(p.multiply(state, p.expand_dims(q, 2)), (3,)), state


def by_chunks(
    run: LayerProgram, sequences: list[Value], state: Sequence[int], chunk: int, scan: Scan
) -> Value:
    """``uma/runtime/lora/recurrence.py``: the chunks, or one where there are many."""
    length = sequences[0].shape[1]
    places = [(at, min(at + chunk, length)) for at in range(0, length, chunk)]
    if scan is delta_rule or len(places) > LAID_OUT:
        return _alike(run, sequences, state, places, scan)
    p = run.program
    states = [p.source(*state, width=FLOAT32)]

    def cut(place: tuple[int, int], done: Sequence[Value]) -> list[Value]:
        return [p.slice(p.depends(x, *done), 1, *place) for x in sequences]

    def forward() -> Value:
        outputs: list[Value] = []
        for place in places:
            output, new = scan(p, cut(place, outputs[-1:]), states[-1])
            outputs.append(output)
            states.append(new)
        return p.concatenate(outputs, 1)

    def backward(g: Value) -> list[Value]:
        by_state, found, done = p.zeros(tuple(state), FLOAT32), [], list[Value]()
        for place, before in zip(reversed(places), reversed(states[:-1]), strict=True):
            primals = [p.primal(x) for x in (*cut(place, done), before)]
            output, new = scan(p, primals[:-1], primals[-1])
            done = p.vjp([(output, p.slice(g, 1, *place)), (new, by_state)], primals)
            by_state = done[-1]
            found.append(done[:-1])
        return [p.concatenate(parts, 1) for parts in zip(*reversed(found), strict=True)]

    return p.custom(forward, backward, sequences)


def _alike(
    run: LayerProgram,
    sequences: list[Value],
    state: Sequence[int],
    places: list[tuple[int, int]],
    scan: Scan,
) -> Value:
    """One chunk is laid out, the rest are like it.

    Outputs and the states between chunks stay; going back, one chunk's arrays at a time. There are
    more operations in it than may wait, so that what was before is free.
    """
    p, width, chunk = run.program, sequences[0].width, places[0][1]
    out = next(x for x in sequences if x.shape[2] == state[1] and len(x.shape) == 4).shape
    between = (len(places), *state)

    def forward() -> Value:
        space = _chunk_bytes(run, sequences, state, chunk, scan, back=False)
        states = p.op("Scan", sequences, between, FLOAT32, opaque=True)
        kept.append(states)
        given = [*sequences, p.awaited(states)]
        made = p.op("Scan", given, out, width, opaque=True, workspace_bytes=space)
        return p.awaited(made)

    def backward(g: Value) -> list[Value]:
        space = _chunk_bytes(run, sequences, state, chunk, scan, back=True)
        given = [*sequences, kept[0], p.awaited(g)]
        first = p.op("Scan", given, sequences[0].shape, opaque=True, workspace_bytes=space)
        first = p.awaited(first)
        rest = [p.op("Scan", [*given, first], x.shape, opaque=True) for x in sequences[1:]]
        return [p.op("Concatenate", [x] * between[0], x.shape) for x in (first, *rest)]

    kept: list[Value] = []
    return p.custom(forward, backward, sequences)


def _chunk_bytes(
    run: LayerProgram,
    sequences: Sequence[Value],
    state: Sequence[int],
    chunk: int,
    scan: Scan,
    *,
    back: bool,
) -> int:
    """The peak of one chunk, above what it is cut from."""
    p = Program()
    cut = [p.source(x.shape[0], chunk, *x.shape[2:], width=x.width) for x in sequences]
    given = [*cut, p.source(*state, width=FLOAT32)]
    if back:
        given = [p.primal(x) for x in given]
    out, new = scan(p, given[:-1], given[-1])
    roots = [out, new]
    if back:
        pairs = [(x, p.source(*x.shape, width=x.width)) for x in roots]
        roots = p.vjp(pairs, given)
    return p.most(roots, run.backend) - sum(x.nbytes for x in p.sources)


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
