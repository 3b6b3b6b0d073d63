"""Cross-entropy in slices of positions: the full logits, tokens times vocabulary, never exist."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

SLICE_BYTES = 64 << 20
"""Of the float32 logits of one slice."""

Logits = Callable[..., mx.array]
"""Of some positions: ``(hidden, positions, *parameters) -> (len(positions), vocabulary)``."""


def slice_rows(vocabulary: int) -> int:
    """Positions whose float32 logits take ``SLICE_BYTES``, at least 16."""
    return max(16, SLICE_BYTES // (4 * vocabulary))


def sliced_loss(
    logits: Logits,
    hidden: mx.array,
    parameters: Sequence[mx.array],
    targets: np.ndarray,
    weights: np.ndarray,
    rows: int,
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """The weighted sum of cross-entropies, its gradient by ``hidden`` and by ``parameters``.

    ``hidden`` is ``(positions, width)``, ``targets`` and ``weights`` are ``(positions,)``.
    Positions of weight 0 are left out. Each slice of ``rows`` positions is evaluated, forward and
    backward, before the next begins: as one graph MLX would hold some twenty slices at once.
    """
    loss = mx.array(0.0)
    total = [mx.zeros_like(p) for p in parameters]
    gradients = []
    for at, part in _parts(logits, targets, weights, rows):
        primals = [hidden[at], *parameters]
        (value,), (by_hidden, *by_own) = mx.vjp(part, primals, [mx.array(1.0)])
        loss = loss + value
        total = [a + b for a, b in zip(total, by_own, strict=True)]
        mx.eval(loss, by_hidden, total)
        gradients.append(by_hidden)
    by_hidden = _scattered(gradients, np.flatnonzero(weights), hidden)
    mx.eval(by_hidden)  # else the parts of it would live on into the next phase
    return loss, by_hidden, total


def sliced_loss_alone(
    logits: Logits,
    hidden: mx.array,
    parameters: Sequence[mx.array],
    targets: np.ndarray,
    weights: np.ndarray,
    rows: int,
) -> mx.array:
    """The loss of ``sliced_loss`` without gradients."""
    loss = mx.array(0.0)
    for at, part in _parts(logits, targets, weights, rows):
        loss = loss + part(hidden[at], *parameters)
        mx.eval(loss)
    return loss


def _parts(
    logits: Logits, targets: np.ndarray, weights: np.ndarray, rows: int
) -> Iterator[tuple[mx.array, Logits]]:
    """The positions of each slice that weigh anything, and the loss of their hidden vectors."""
    chosen = np.flatnonzero(weights)
    for start in range(0, len(chosen), rows):
        here = chosen[start : start + rows]
        at, label = mx.array(here), mx.array(targets[here])
        yield at, _part(logits, at, label, mx.array(weights[here].astype(np.float32)))


def _part(logits: Logits, at: mx.array, targets: mx.array, weights: mx.array) -> Logits:
    def loss(hidden: mx.array, *parameters: mx.array) -> mx.array:
        return cross_entropy(logits(hidden, at, *parameters), targets, weights)

    return loss


def _scattered(parts: list[mx.array], chosen: np.ndarray, hidden: mx.array) -> mx.array:
    if not parts:
        return mx.zeros_like(hidden)
    joined = mx.concatenate(parts)
    if len(chosen) == len(hidden):
        return joined
    result = mx.zeros_like(hidden)
    result[mx.array(chosen)] = joined
    return result


def cross_entropy(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """The weighted sum of cross-entropies of ``(positions, vocabulary)`` logits, in float32."""
    outputs: Any = _DIFFERENTIABLE(logits, targets, weights)
    loss: mx.array = outputs[0]
    return loss


def loss_and_slope(
    logits: mx.array, targets: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array]:
    """The loss and its gradient by the logits, softmax minus one at the target, from one ``exp``.

    On the CPU ``exp`` costs more than the product that gives the logits, and automatic
    differentiation takes it twice.
    """
    scores, labels = logits.astype(mx.float32), targets[:, None]
    highest = scores.max(axis=-1, keepdims=True)
    picked = mx.take_along_axis(scores, labels, axis=-1)
    powers = mx.exp(scores - highest)
    total = powers.sum(axis=-1, keepdims=True)
    loss = (weights[:, None] * (highest + mx.log(total) - picked)).sum()
    at_target = mx.take_along_axis(powers, labels, axis=-1) - total
    slope = mx.put_along_axis(powers, labels, at_target, axis=-1) * (weights[:, None] / total)
    return loss, slope.astype(logits.dtype)


_DIFFERENTIABLE = mx.custom_function(loss_and_slope)


@_DIFFERENTIABLE.vjp
def _backward(
    inputs: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    _, targets, weights = inputs
    slope = outputs[1]
    by_logits = slope * cotangents[0].astype(slope.dtype)
    return by_logits, mx.zeros_like(targets), mx.zeros_like(weights)
