"""What the gated delta rule holds under ``mlx_lm.lora`` (mlx-lm 0.32.2, ``gated_delta.py``).

In training every backend runs ``gated_delta_ops``, one step for each token (``use_kernel=not
self.training``). A step keeps its decayed and its updated state, and going backward makes a
gradient of each; that of a token's slice of the queries, keys and values is an array of all tokens
(``SliceUpdate``), and nearly all of these are there before the first sum of them. Some 60
operations a token are too many to lay out, so that the states and slices alive are counted.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from uma.architecture.layers import Layer, Recurrent
from uma.memory.liveness import MAX_WIDTH
from uma.memory.mlx_program import WAITING, Program, Value
from uma.quantization import FLOAT32

STATES = 2  # of a token, each way
WAITS = WAITING + 10  # for what has just begun as well


class Alive(NamedTuple):
    """Arrays alive where slices need most: how many for each token, and how many more or fewer."""

    states: tuple[float, float]
    keys: tuple[float, float]
    values: tuple[float, float]


# Counted in the order of evaluation of layers laid out token by token, of 129, 257 and 513 tokens:
# with adapters, the same where a layer's input has no gradient, and with all arrays trained, where
# queries come after the sums of keys.
ADAPTERS = Alive(states=(2.17, -16), keys=(1.78, 5), values=(0.87, -22))
FIRST = ADAPTERS._replace(states=(0.22, -4))
ALL_TRAINED = Alive(states=(2.14, -62), keys=(0.85, 0), values=(0.80, -13))
# Places among the updates taken at once of a layer's first array, found by laying out all twenty
# token by token, with dense layers and experts; and those before a layer of another kind only.
TOGETHER, BEFORE_OTHERS = (17, 19), (0, 1)


def is_ruled(layer: Layer) -> bool:
    """Whether a gated delta rule is in it."""
    return any(isinstance(m, Recurrent) and m.kind == "gated_delta" for m in layer.mixers)


def summed_together(arrays: Sequence[int], ruled: Sequence[bool]) -> list[bool]:
    """Of each layer trained whole whether slices of queries and keys are all there at once.

    The walk from the updates takes ``MAX_WIDTH`` of them at once, layer by layer, and goes down one
    level first where more wait. Where it reaches the gradients of a rule decides which it takes in
    turns. Layers have so many ``arrays``; in those ``ruled`` is a rule. Those of the first, whose
    input has no gradient, and of the last come one after the other.

    >>> summed_together([17, 16] * 4, [True, False] * 4).index(True)  # behind 99 arrays
    6
    """
    found = [False] * len(arrays)
    for n in range(1, len(arrays) - 1):
        place = sum(arrays[:n]) % MAX_WIDTH
        found[n] = ruled[n] and place in (TOGETHER if ruled[n + 1] else TOGETHER + BEFORE_OTHERS)
    return found


def of_all_tokens(
    p: Program, sequences: Sequence[Value], state: Sequence[int], alive: Alive
) -> Value:
    """The rule over ``sequences``: queries, keys, values, decays, rates; ``state`` of all rows."""
    q, _, v = sequences[:3]
    rows, length, heads, wide = v.shape
    _, keys, values = (max(0, round(each * length + more)) for each, more in alive)
    space = rows * length * heads * (keys * state[-1] * q.width + values * wide * v.width)
    kept: list[Value] = []
    for shape in _states(FIRST, length, state):  # so that a first layer has no sizes of its own
        p.value(shape, FLOAT32)

    def forward() -> Value:
        for shape in _states(alive, length, state):
            kept.append(p.op("Scan", sequences, shape, FLOAT32, opaque=True))
        return p.op("Scan", kept[-2:], v.shape, v.width, opaque=True)

    def backward(g: Value) -> list[Value]:
        early, last = ((x, p.op("Scan", [g, x], x.shape, opaque=True)) for x in kept[-2:])
        done = _awaited(p, p.op("Reduce", [g, *early], (), opaque=True))
        given = [done, *last]
        by_q = p.op("SliceUpdate", given, q.shape, q.width, (space,), opaque=True)
        rest = [*given, _awaited(p, by_q)]
        return [
            by_q,
            *(p.op("SliceUpdate", rest, x.shape, x.width, opaque=True) for x in sequences[1:]),
        ]

    return p.custom(forward, backward, sequences)


def _states(alive: Alive, length: int, state: Sequence[int]) -> list[tuple[int, int]]:
    """Shapes of the states that are free before slices need most, and of those that are not."""
    each, more = alive.states
    late = max(0, round(each * length + more)) // (2 * STATES)
    return [(STATES * count, prod(state)) for count in (length - late, late)]


def _awaited(p: Program, x: Value) -> Value:
    """A number that is there when all that was used to make ``x`` is free."""
    for _ in range(WAITS):
        x = p.op("Wait", [x], (), opaque=True)
    return x
