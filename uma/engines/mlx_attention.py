"""Attention, norms and rotations as MLX's operations without kernels (``mlx/fast.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from uma.frozen import dataclass
from uma.memory.mlx_program import Program, Value
from uma.quantization import FLOAT32
from uma.workload import Backend

if TYPE_CHECKING:
    from uma.engines.mlx_layers import LayerProgram

MASKED_QUERIES = 64  # uma/runtime/lora/attention.py
LEAST_QUERIES = 16
LAID_OUT = 6  # slices of one attention at most

Place = tuple[int, int, int, int]
"""First query of a slice, the one after its last, and the same of the keys that it sees."""


@dataclass(frozen=True, slots=True)
class SlicedAttention:
    """Slices of queries one after the other, forward and backward."""

    run_of: LayerProgram
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    window: int | None

    def places(self) -> list[Place]:
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
        mask = None if self.window is None else self.run_of.mask(self.window)
        if len(places) == 1:
            return whole_attention(p, q, k, v, mask, causal=mask is None)
        if len(places) > LAID_OUT:
            return self._alike(places, q, k, v)

        def backward(g: Value) -> list[Value]:
            return _backward(p, places, (q, k, v), g, mask)

        return p.custom(lambda: _forward(p, places, (q, k, v), mask), backward, (q, k, v))

    def _alike(self, places: list[Place], q: Value, k: Value, v: Value) -> Value:
        """Many slices, of which the last ones are laid out, as the others are like them."""
        p, inputs = self.run_of.program, (q, k, v)
        shape = (*q.shape[:3], v.shape[3])
        forms = tuple([(x.shape, x.width) for x in inputs])
        masked, backend = self.window is not None, self.run_of.backend
        space_of = partial(_space, tuple(places[-LAID_OUT:]), forms, masked, backend)

        def forward() -> Value:
            space = space_of(back=False)
            parts = p.op("Slices", inputs, shape, opaque=True, arguments=(space,))
            return p.op("Concatenate", [parts] * len(places), shape)

        def backward(g: Value) -> list[Value]:
            space = space_of(back=True)
            by_q = p.op("Slices", [*inputs, p.awaited(g)], q.shape, opaque=True, arguments=(space,))
            done = [p.awaited(by_q), *inputs]
            return [done[0], *(p.op("Slices", done, x.shape, opaque=True) for x in (k, v))]

        return p.custom(forward, backward, inputs)


@lru_cache(maxsize=16)
def _space(
    places: tuple[Place, ...],
    forms: tuple[tuple[tuple[int, ...], int], ...],
    masked: bool,
    backend: Backend,
    *,
    back: bool,
) -> int:
    """What some slices take beside their results and inputs, of shapes and bytes an element."""
    p = Program()
    q, k, v = (p.source(*shape, width=width) for shape, width in forms)
    mask = p.source(q.shape[2], k.shape[2], width=1) if masked else None
    if back:
        g = p.source(*q.shape[:3], v.shape[3], width=q.width)
        made = _backward(p, places, (q, k, v), g, mask)
    else:
        made = [_forward(p, places, (q, k, v), mask)]
    return max(0, p.above(made, backend) - sum(x.nbytes for x in made))


def _part(p: Program, place: Place, inputs: Sequence[Value], mask: Value | None) -> Value:
    """The attention of one slice."""
    (start, stop, first, end), (q, k, v) = place, inputs
    seen = None
    if mask is not None:
        seen = p.slice(p.slice(mask, 0, start, stop), 1, first, end)
    rows = p.slice(q, 2, start, stop)
    k, v = p.slice(k, 2, first, end), p.slice(v, 2, first, end)
    return whole_attention(p, rows, k, v, seen, causal=mask is None)


def _forward(
    p: Program, places: Sequence[Place], inputs: tuple[Value, Value, Value], mask: Value | None
) -> Value:
    q, k, v = inputs
    outputs: list[Value] = []
    for place in places:
        outputs.append(_part(p, place, (p.depends(q, *outputs[-1:]), k, v), mask))
    return p.concatenate(outputs, 2)


def _backward(
    p: Program,
    places: Sequence[Place],
    inputs: tuple[Value, Value, Value],
    g: Value,
    mask: Value | None,
) -> list[Value]:
    q, k, v = inputs
    total: list[Value] = []
    for place in places:
        piece = p.slice(g, 2, place[0], place[1])
        primals = [p.primal(p.depends(q, *total)), p.primal(k), p.primal(v)]
        new = p.vjp([(_part(p, place, primals, mask), piece)], primals)
        total = [p.add(a, b) for a, b in zip(total, new, strict=True)] if total else new
    return total


def rms_norm(p: Program, x: Value, weight: Value | None) -> Value:
    """``mlx/fast.cpp``, the fallback of ``rms_norm``."""
    wide = p.astype(x, FLOAT32)
    mean = p.scaled(p.sum(p.unary("Square", wide), (len(x.shape) - 1,), keepdims=True))
    root = p.unary("Sqrt", p.add(mean, p.scalar(FLOAT32)))
    out = p.astype(p.multiply(wide, root), x.width)
    return out if weight is None else p.multiply(out, weight)


def rotary(p: Program, x: Value, *, pairs: bool) -> Value:
    """``mlx/fast.cpp``, the fallback of ``rope``: two halves, or neighbours, turned and joined."""
    length, half = x.shape[2], x.shape[3] // 2
    offset = p.op("AsType", [p.scalar(FLOAT32, "offset")], ())
    place = p.scaled(p.add(p.arange(length), offset), "one")
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


def causal_mask(p: Program, length: int, window: int | None) -> Value:
    """``models/base.py``, ``create_causal_mask`` of mlx-lm: pairs of a query and an earlier key."""
    numbers, pairs = p.arange(length), (length, length)
    queries, keys = p.expand_dims(numbers, 1), p.expand_dims(numbers, 0)
    mask = p.compared("GreaterEqual", queries, keys)
    if window is None:
        return mask
    near = p.compared("Less", queries, p.add(keys, p.scalar(FLOAT32, "window")))
    return p.op("BitwiseBinary", [mask, near], pairs, 1)


def gelu_tanh(p: Program, x: Value) -> Value:
    """``nn.gelu_approx``: half of ``x`` times one more than a tangent of ``x`` and its cube."""
    cube = p.scaled(p.binary("Power", x, p.scalar(x.width)))
    inner = p.unary("Tanh", p.scaled(p.add(x, cube)))
    return p.multiply(p.scaled(x), p.add(inner, p.scalar(x.width)))


def whole_attention(
    p: Program, q: Value, k: Value, v: Value, mask: Value | None, *, causal: bool = False
) -> Value:
    """``mlx/fast.cpp``, the fallback of ``scaled_dot_product_attention``."""
    heads, groups, q_shape = q.shape[1], k.shape[1], q.shape
    q = p.scaled(q)
    repeats = heads // groups
    if repeats > 1:
        q = p.unflatten(q, 1, (groups, repeats))
        k, v = p.expand_dims(k, 2), p.expand_dims(v, 2)
    scores = p.matmul(q, p.swapped(k))
    if causal:
        queries, keys = (p.arange(n) for n in scores.shape[-2:])
        mask = p.compared("GreaterEqual", p.expand_dims(queries, 1), p.expand_dims(keys, 0))
    elif mask is not None:
        mask = p.broadcast_to(mask, (*q_shape[:3], k.shape[-2]))
        mask = p.unflatten(mask, 1, (groups, repeats)) if repeats > 1 else mask
    if mask is not None:
        scores = p.where(mask, scores) if mask.width == 1 else p.add(scores, mask)
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
