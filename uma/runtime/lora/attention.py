"""Attention in slices of queries, forward and backward, so that no score matrix is ever whole.

MLX's own backward (0.32.4, ``fast.cpp``: the fallback wherever the backend has no kernel for it)
keeps scores and probabilities of all queries, quadratic in the length. Here each slice is evaluated
before the next begins; with a causal mask, the keys after a slice are not touched at all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

SLICE_BYTES = 32 << 20
"""Of the scores of one slice."""

Mask = str | mx.array | None


@contextmanager
def sliced_attention(slice_bytes: int) -> Iterator[None]:
    """Within, ``mx.fast.scaled_dot_product_attention`` works slice by slice, and is differentiable.

    Not for use inside ``mx.compile`` or a transformation other than one ``mx.vjp``: it evaluates.
    """
    whole = mx.fast.scaled_dot_product_attention

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Mask = None, **options: Any
    ) -> mx.array:
        queries = max(16, slice_bytes // (q.shape[0] * q.shape[1] * k.shape[2] * q.dtype.size))
        length = q.shape[2]
        sinks = options.get("sinks")
        if length <= queries or (isinstance(mask, mx.array) and mask.dtype != mx.bool_):
            return whole(q, k, v, scale=scale, mask=mask, **options)
        places = _slices(length, k.shape[2], queries, mask)

        def part(place: tuple[int, int, int], q: mx.array, *kv: mx.array) -> mx.array:
            start, stop, end = place
            more = {"sinks": kv[2]} if len(kv) > 2 else {}
            rows = mask[..., start:stop, :end] if isinstance(mask, mx.array) else mask
            return whole(
                q[:, :, start:stop],
                kv[0][:, :, :end],
                kv[1][:, :, :end],
                scale=scale,
                mask=rows,
                **more,
            )

        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        return _by_slices(part, places)(*inputs)

    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = whole


def _slices(length: int, keys: int, queries: int, mask: Mask) -> list[tuple[int, int, int]]:
    """First query, the one after the last, and the number of keys that any of them may see."""
    starts = range(0, length, queries)
    stops = [min(start + queries, length) for start in starts]
    causal = isinstance(mask, str)
    ends = [keys - length + stop if causal else keys for stop in stops]
    return list(zip(starts, stops, ends, strict=True))


def _by_slices(
    part: Callable[..., mx.array], places: list[tuple[int, int, int]]
) -> Callable[..., mx.array]:
    """``part`` over all places, joined, with a backward that recomputes one slice at a time."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def attention(*inputs: mx.array) -> mx.array:
        mx.eval(inputs)
        outputs = []
        for place in places:
            outputs.append(part(place, *inputs))
            mx.eval(outputs[-1])
        return mx.concatenate(outputs, axis=2)

    @attention.vjp  # type: ignore[untyped-decorator]
    def backward(
        inputs: tuple[mx.array, ...], cotangent: mx.array, _: mx.array
    ) -> tuple[mx.array, ...]:
        mx.eval(inputs, cotangent)
        total = [mx.zeros_like(x) for x in inputs]
        for place in places:
            piece = cotangent[:, :, place[0] : place[1]]
            _, gradients = mx.vjp(lambda *x, at=place: part(at, *x), list(inputs), [piece])
            total = [a + b for a, b in zip(total, gradients, strict=True)]
            mx.eval(total)
        return tuple(total)

    return attention  # type: ignore[no-any-return]
