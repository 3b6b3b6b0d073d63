"""Attention in slices of queries, forward and backward, so that no score matrix is ever whole.

MLX's own backward (0.32.4, ``fast.cpp``: the fallback wherever the backend has no kernel for it)
keeps scores and probabilities of all queries, quadratic in the length. Here no slice can begin
before the one before it is done; with a causal mask, the keys after a slice are not touched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

SLICE_BYTES = 32 << 20
"""Of the scores of one slice."""

MASKED_QUERIES = 64
"""Queries of a slice at most where a mask says what they see: few, so that they skip most keys."""

Mask = str | mx.array | None
Place = tuple[int, int, int, int]
"""First query of a slice, the one after its last, and the same of the keys that it sees."""


Part = Callable[..., mx.array]
"""The attention of one place: ``(place, queries, keys, values, ...)``."""


@contextmanager
def sliced_attention(slice_bytes: int, join: "Join | None" = None) -> Iterator[None]:
    """Within, ``mx.fast.scaled_dot_product_attention`` works slice by slice.

    ``join`` makes one array of the slices, ``by_slices`` unless it is given.
    """
    join = join or by_slices
    whole = mx.fast.scaled_dot_product_attention

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask = None, **options: Any
    ) -> mx.array:
        queries = max(16, slice_bytes // (q.shape[0] * q.shape[1] * k.shape[2] * q.dtype.size))
        if isinstance(mask, mx.array):
            queries = min(queries, MASKED_QUERIES)
        length = q.shape[2]
        sinks = options.get("sinks")
        if length <= queries or (isinstance(mask, mx.array) and mask.dtype != mx.bool_):
            return whole(q, k, v, scale=scale, mask=mask, **options)
        places = _slices(length, k.shape[2], queries, mask)

        def part(place: Place, q: mx.array, *kv: mx.array) -> mx.array:
            start, stop, first, end = place
            more: dict[str, Any] = {"sinks": kv[2]} if len(kv) > 2 else {}
            rows = mask[..., start:stop, first:end] if isinstance(mask, mx.array) else mask
            keys, values = kv[0][:, :, first:end], kv[1][:, :, first:end]
            return whole(q[:, :, start:stop], keys, values, scale=scale, mask=rows, **more)

        return join(part, places, (q, k, v) if sinks is None else (q, k, v, sinks))

    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = whole


Join = Callable[[Part, list[Place], Sequence[mx.array]], mx.array]


def _slices(length: int, keys: int, queries: int, mask: Mask) -> list[Place]:
    """The slices of ``queries``, each with the keys that its queries may see."""
    starts = range(0, length, queries)
    stops = [min(start + queries, length) for start in starts]
    if isinstance(mask, str):
        seen = [(0, keys - length + stop) for stop in stops]
    elif mask is None:
        seen = [(0, keys)] * len(stops)
    else:
        seen = [_seen(mask[..., a:b, :], keys) for a, b in zip(starts, stops, strict=True)]
    return [(a, b, *ends) for a, b, ends in zip(starts, stops, seen, strict=True)]


def _seen(rows: mx.array, keys: int) -> tuple[int, int]:
    """First key that a row of a mask shows, and the one after the last.

    A row that shows none attends to all keys alike, which needs them all.
    """
    shown = np.array(rows).reshape(-1, rows.shape[-1])
    columns = np.flatnonzero(shown.any(axis=0))
    if rows.shape[-1] != keys or not shown.any(axis=1).all():
        return 0, keys
    return int(columns[0]), int(columns[-1]) + 1


def by_slices(part: Part, places: list[Place], inputs: Sequence[mx.array]) -> mx.array:
    """``part`` over all places, joined, with a backward that recomputes one slice at a time."""

    @mx.custom_function
    def attention(*inputs: mx.array) -> Any:
        return forward(part, places, inputs)

    @attention.vjp
    def _(inputs: tuple[mx.array, ...], cotangent: mx.array, _output: mx.array) -> Any:
        return tuple(backward(part, places, inputs, cotangent))

    made: Any = attention(*inputs)
    result: mx.array = made
    return result


def forward(part: Part, places: list[Place], inputs: Sequence[mx.array]) -> mx.array:
    """Slice after slice, joined."""
    outputs: list[mx.array] = []
    for place in places:
        outputs.append(part(place, *_after(outputs[-1:], inputs)))
    return mx.concatenate(outputs, axis=2)


def backward(
    part: Part, places: list[Place], inputs: Sequence[mx.array], cotangent: mx.array
) -> list[mx.array]:
    """The gradients of ``inputs``, of one slice after the other."""
    total: list[mx.array] = []
    for place in places:
        piece = cotangent[:, :, place[0] : place[1]]
        primals = _after(total, inputs)
        _, slices = mx.vjp(lambda *x, at=place: part(at, *x), primals, [piece])
        total = [a + b for a, b in zip(total, slices, strict=True)] if total else [*slices]
    return total


def _after(done: list[mx.array], inputs: Sequence[mx.array]) -> list[mx.array]:
    """``inputs``, the first of which cannot be read before ``done`` is evaluated.

    Evaluating here would not do: inside a transformation MLX keeps what it has evaluated.
    """
    first = mx.depends([inputs[0]], done)[0] if done else inputs[0]
    return [first, *inputs[1:]]
