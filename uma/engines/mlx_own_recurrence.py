"""Recurrent layers in chunks of tokens, as our own trainer runs them.

``uma/runtime/lora/recurrence.py``: the states between chunks are kept, and each chunk runs again
when its gradient is due. Of many chunks those are laid out that are alive with most of what the
others leave: the last on the way there, and the first, which come last on the way back. Of the
others several are taken as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from uma.memory.liveness import Operation
from uma.memory.mlx_program import Program, Value, broadcast
from uma.quantization import FLOAT32

# Chunks at each end of a scan that are laid out: more give the same peak, and of the gated delta
# rule one does. The others are taken as BETWEEN at most: 3 % more in one of 48 cases, else 1 %.
LAID_OUT = 2
BETWEEN = 16

Scan = Callable[[Program, Sequence[Value], Sequence[Value], Value], tuple[Value, Value]]
"""Outputs and the next state from sequences (tokens second), constants and a state."""


class Place(NamedTuple):
    """The first token of chunks that are taken as one, the one after their last, and how many."""

    start: int
    stop: int
    chunks: int


@dataclass(slots=True)
class Chunks:
    """One recurrence over all tokens; ``out`` are the dimensions of a token's output.

    ``states`` are those before the chunks of each place.
    """

    program: Program
    sequences: Sequence[Value]
    constants: Sequence[Value]
    state: Value
    chunk: int
    scan: Scan
    out: Sequence[int]
    laid_out: int = LAID_OUT
    states: list[list[Value]] = field(default_factory=list)

    @property
    def inputs(self) -> list[Value]:
        return [*self.sequences, *self.constants, self.state]

    def run(self) -> Value:
        return self.program.custom(self._forward, self._backward, self.inputs)

    def _places(self) -> list[Place]:
        """Those at both ends one by one."""
        length, ends = self.sequences[0].shape[1], self.laid_out
        count = -(-length // self.chunk)
        between = max(0, count - 2 * ends)
        parts = min(between, BETWEEN)
        firsts = [*range(count + 1)]
        firsts[ends : ends + between] = [ends + between * n // parts for n in range(parts)]
        return [
            Place(first * self.chunk, min(end * self.chunk, length), end - first)
            for first, end in pairwise(firsts)
        ]

    def _cut(self, place: Place, done: Sequence[Value]) -> list[Value]:
        """The sequences of chunks, none of which can be read before ``done``."""
        given, (start, stop, _) = after(self.program, done, self.inputs), place
        return [self.program.slice(x, 1, start, stop) for x in given[: len(self.sequences)]]

    def _forward(self) -> Value:
        p, state = self.program, self.state
        outputs: list[Value] = []
        places = self._places()
        for n, place in enumerate(places, start=self.laid_out - len(places)):
            parts = self._cut(place, outputs[-1:])
            self.states.append([state])
            if n < 0:
                rows, length = parts[0].shape[:2]
                output = p.op("Scan", [*parts, state], (rows, length, *self.out), opaque=True)
                if place.chunks > 1:
                    within = ((place.chunks - 1) * rows, *state.shape[1:])
                    made = p.op("Scan", [output, state], within, FLOAT32, opaque=True)
                    self.states[-1].append(made)
                given = [output, *self.states[-1]]
                state = p.op("Scan", given, state.shape, FLOAT32, opaque=True)
            else:
                output, state = self.scan(p, parts, self.constants, state)
            outputs.append(output)
        return p.concatenate(outputs, 1)

    def _backward(self, g: Value) -> list[Value]:
        p, count = self.program, len(self.sequences)
        by_state = p.zeros(self.state.shape, FLOAT32)
        found: list[Sequence[Value]] = []
        done: list[Value] = []
        total: list[Value] = []
        for n, place in reversed(list(enumerate(self._places()))):
            state, *more = self.states[n]
            primals = [*self._cut(place, done), *self.constants, state]
            by_output = p.slice(g, 1, place.start, place.stop)
            if n < self.laid_out:
                new = self._way_back(primals, by_output, by_state)
            else:
                given = [*primals, *more, by_output, by_state]
                new = [p.op("Scan", given, x.shape, x.width, opaque=True) for x in primals]
            by_state = new.pop()
            found.append(new[:count])
            sums = [p.add(a, b) for a, b in zip(total, new[count:], strict=True)] if total else []
            total = sums or new[count:]
            done = [*new, by_state, *total]
        joined = [p.concatenate(parts, 1) for parts in zip(*reversed(found), strict=True)]
        return [*joined, *total, by_state]

    def _way_back(self, primals: list[Value], by_output: Value, by_state: Value) -> list[Value]:
        """The gradients of a chunk's sequences, constants and state."""
        p, count = self.program, len(self.sequences)
        primals = [p.primal(x) for x in primals]
        output, state = self.scan(p, primals[:count], primals[count:-1], primals[-1])
        return p.vjp([(output, by_output), (state, by_state)], primals)


def after(p: Program, done: Sequence[Value], values: Sequence[Value]) -> list[Value]:
    """``values``, none of which can be read before ``done``: one operation for all."""
    if not done:
        return list(values)
    made = [p.value(x.shape, x.width) for x in values]
    inputs = tuple(x.number for x in (*values, *done))
    p.operations.append(Operation("Depends", inputs, tuple(x.number for x in made)))
    return made


def ssm_chunk(
    p: Program,
    sequences: Sequence[Value],
    constants: Sequence[Value],
    state: Value,
    *,
    compiled: bool,
) -> tuple[Value, Value]:
    """``ssm_attn`` of mlx-lm 0.32.2 (``ssm.py``), of one step of tokens after a state.

    What is ``compiled`` there is so outside of gradients.
    """
    x, b, c, dt = sequences
    a_log, d, dt_bias = constants
    rows, length, heads, _ = x.shape
    step = p.compiled(dt, dt_bias) if compiled else time_step(p, dt, dt_bias)
    decay = p.unary("Negative", p.unary("Exp", a_log))
    dta = p.multiply(step, p.reshape(decay, 1, 1, heads))
    dtx = p.multiply(p.reshape(step, rows, length, heads, 1), x)
    y, new = ssm_step(p, [dtx, dta, b, c], state)
    return p.add(y, p.multiply(x, p.reshape(d, 1, 1, heads, 1))), new


def time_step(p: Program, dt: Value, bias: Value) -> Value:
    """``compute_dt``: a softplus, clipped on both sides."""
    x = p.binary("LogAddExp", p.add(p.astype(dt, FLOAT32), bias), p.scalar(FLOAT32))
    return p.binary("Minimum", p.binary("Maximum", x, p.scalar(FLOAT32)), p.scalar(FLOAT32))


def ssm_step(
    p: Program, cut: Sequence[Value], state: Value | None, at_once: int | None = None
) -> tuple[Value, Value]:
    """``_step`` of ``ssm_attn``: pairs of tokens within it, and the state before it.

    ``at_once`` are the rows, if not all, for which states are made for each token at once.
    """
    dtx, dta, b, c = cut
    rows, length, heads, width = dtx.shape
    groups, size = b.shape[2], b.shape[3]
    repeats = heads // groups
    b = p.transpose(b, 0, 2, 3, 1)
    pairs = repeated(p, p.matmul(p.transpose(c, 0, 2, 1, 3), b), repeats, 1)
    spread = repeated(p, p.expand_dims(p.transpose(dta, 0, 2, 1), 3), length, 3)
    decay = p.unary("Exp", p.op("Scan", [lower(p, spread)], spread.shape))
    weights = lower(p, p.multiply(pairs, decay))
    y = p.transpose(p.matmul(weights, p.transpose(dtx, 0, 2, 1, 3)), 0, 2, 1, 3)
    last = p.transpose(p.slice(decay, 2, length - 1, length), 0, 3, 1, 2)
    b = p.transpose(repeated(p, b, repeats, 1), 0, 1, 3, 2)
    held = p.multiply(dtx, last)
    held = p.transpose(p.transpose(held, 0, 2, 1, 3), 0, 1, 3, 2)
    new = p.matmul(held, b)
    if state is None:
        return y, new
    grown = p.unary("Exp", p.op("Scan", [dta], dta.shape))
    final = p.squeeze(p.slice(grown, 1, length - 1, length), (1,))
    final = p.op("ExpandDims", [final], (rows, heads, 1, 1), None, ((2, 3),))
    new = p.add(new, p.multiply(final, state))
    c = p.reshape(c, rows, length, groups, 1, size, 1)
    before = p.reshape(state, rows, 1, groups, repeats, width, size)
    seen = p.flatten(p.squeeze(_read(p, before, c, at_once or rows), (5,)), 2, 3)
    return p.add(y, p.multiply(p.expand_dims(grown, 3), seen)), new


def _read(p: Program, state: Value, c: Value, at_once: int) -> Value:
    """States times ``C`` of each token; gradients of states are products of each token too."""
    lead = broadcast(state.shape[:-2], c.shape[:-2])
    state = p.broadcast_to(state, (*lead, *state.shape[-2:]))
    c = p.broadcast_to(c, (*lead, *c.shape[-2:]))

    def backward(g: Value) -> list[Value]:
        by_state = p.op("Matmul", [g, p.swapped(c)], (at_once, *state.shape[1:]))
        return [by_state._replace(shape=state.shape), p.matmul(p.swapped(state), g)]

    return p.op("Matmul", [state, c], (*lead, state.shape[-2], 1), backward=backward)


def lower(p: Program, x: Value) -> Value:
    """``mx.tril``: the lower triangle of the last two axes."""
    length = x.shape[-1]
    sides = [p.broadcast_to(p.expand_dims(p.arange(length), i), (length, length)) for i in (1, 0)]
    return p.where(p.op("GreaterEqual", sides, (length, length), 1), x)


def repeated(p: Program, x: Value, count: int, axis: int) -> Value:
    """``mx.repeat``."""
    if count == 1:
        return x
    shape = list(x.shape)
    shape.insert(axis + 1, count)
    spread = p.broadcast_to(p.expand_dims(x, axis + 1), tuple(shape))
    shape[axis : axis + 2] = [x.shape[axis] * count]
    return p.op("Reshape", [spread], shape)
