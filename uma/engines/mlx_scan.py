"""Mamba-2's scan as ``mlx_lm`` runs it, of any length for the price of a few chunks.

``ssm_attn`` (mlx-lm 0.32.2, ``ssm.py``) takes chunks of 256 tokens. MLX's order of evaluation goes
through all of them at once, so that those between the first and the last, which are alike, are
laid out as a few with the rows of many: as much is alive as of all. Gradients of a chunk's first
state by each of its tokens, which are the widest, are made for one chunk after the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from uma.engines.mlx_own_recurrence import ssm_step, time_step
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend, Method

STEP = 256  # ssm.py, ssm_attn: step
# Chunks that are laid out at most. On Metal three have the gradients of their first state by each
# token alive at once, of however many there are, and the first chunk has none; where gradients of
# whole matrices wait, two more show what is alive with them. On the CPU a hundred operations wait,
# which are those of some twelve chunks.
ON_METAL, ON_METAL_FULL, ON_CPU = 4, 6, 12


class Piece(NamedTuple):
    """Chunks that are laid out as one: their first token, their rows together, tokens of each."""

    start: int
    rows: int
    tokens: int


def pieces(rows: int, length: int, most: int) -> list[Piece]:
    """The first chunk, the last, and ``most - 2`` with the rows of all between them.

    >>> [tuple(piece) for piece in pieces(4, 2047, 4)]
    [(0, 4, 256), (256, 12, 256), (512, 12, 256), (1792, 4, 255)]
    """
    starts = range(0, length, STEP)
    last = Piece(starts[-1], rows, length - starts[-1])
    if len(starts) <= most:
        return [*[Piece(start, rows, STEP) for start in starts[:-1]], last]
    between, parts = rows * (len(starts) - 2), most - 2
    ends = [between * n // parts for n in range(parts + 1)]
    pairs = zip(starts[1:], ends, ends[1:], strict=False)
    middle = [Piece(start, end - begin, STEP) for start, begin, end in pairs]
    return [Piece(0, rows, STEP), *middle, last]


def laid_out(method: Method, backend: Backend) -> int:
    """How many chunks are laid out at most."""
    if backend == "cpu":
        return ON_CPU
    return ON_METAL_FULL if method == "full" else ON_METAL


def scanned(p: Program, sequences: Sequence[Value], constants: Sequence[Value], most: int) -> Value:
    """Outputs from inputs, ``B``, ``C`` and time steps; ``A_log``, ``D`` and the steps' bias."""
    x, b, c, dt = sequences
    a_log, d, bias = constants
    rows, length, heads, _ = x.shape
    found = pieces(rows, length, most)
    outputs: list[Value] = []
    dtx, dta = _by_steps(p, x, time_step(p, dt, bias), a_log)
    carried: Value | None = None
    for piece in found:
        cut = [_cut(p, part, piece) for part in (dtx, dta, b, c)]
        if carried:  # read as the state before each of the chunks
            carried = carried._replace(shape=(piece.rows, *carried.shape[1:]))
        y, carried = ssm_step(p, cut, carried, rows)
        outputs.append(y)
    skipped = p.multiply(x, p.reshape(d, 1, 1, heads, 1))
    return p.add(_joined(p, outputs, found, x.shape), skipped)


def _by_steps(p: Program, x: Value, step: Value, a_log: Value) -> tuple[Value, Value]:
    """Inputs and decays by their time steps."""
    decay = p.unary("Negative", p.unary("Exp", a_log))
    dta = p.multiply(step, p.reshape(decay, 1, 1, a_log.shape[0]))
    return p.multiply(p.reshape(step, *step.shape, 1), x), dta


def _cut(p: Program, x: Value, piece: Piece) -> Value:
    """A view of the tokens of ``piece``, in its rows."""
    start, rows, tokens = piece
    if tokens == x.shape[1]:
        return x
    first = (0, start, *(0 for _ in x.shape[2:]))
    shape = (rows, tokens, *x.shape[2:])
    end = tuple(a + b for a, b in zip(first, shape, strict=True))
    return p.op("Slice", [x], shape, None, (first, end, (1,) * len(shape)))


def _joined(
    p: Program, outputs: Sequence[Value], found: Sequence[Piece], shape: Sequence[int]
) -> Value:
    if len(outputs) == 1:
        return outputs[0]

    def backward(g: Value) -> list[Value]:
        return [_cut(p, g, piece) for piece in found]

    return p.op("Concatenate", outputs, shape, None, (1,), backward=backward)
