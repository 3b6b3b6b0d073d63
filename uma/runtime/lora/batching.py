"""Examples as batches: rows, padding, packing, and the passes that a batch takes."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from uma.dataset.batches import batch_plan, padded_length
from uma.dataset.examples import Example
from uma.dataset.packing import packs
from uma.dataset.passes import passes
from uma.errors import UnsupportedModel
from uma.runtime.lora.step import Batch, hidden_of

PACKING_TOLERANCE = {True: 1e-4, False: 0.03}
"""Of the last layer's output, in float32 or not; bfloat16 rounds each number to 4e-3."""

Unit = Sequence[Example]
"""What fills a row of a batch: one example, or several that are packed."""


def units_of(examples: Sequence[Example], pack_tokens: int | None = None) -> list[Unit]:
    """Each example by itself, or packed into rows of up to ``pack_tokens`` inputs."""
    if pack_tokens is None:
        return [[example] for example in examples]
    inputs = [len(e.tokens) - 1 for e in examples]
    return [[examples[n] for n in row] for row in packs(inputs, pack_tokens)]


def inputs_of(unit: Unit) -> int:
    """Positions that it fills: the last token of an example is only a target."""
    return sum(len(e.tokens) - 1 for e in unit)


def targets_of(units: Sequence[Unit]) -> int:
    """Supervised targets of a batch."""
    return sum(e.targets for unit in units for e in unit)


def batch_of(units: Sequence[Unit]) -> Batch:
    """Padded inputs and targets; each supervised target weighs 1."""
    shape = len(units), padded_length(max(map(inputs_of, units)))
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights, segments = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
    for row, unit in enumerate(units):
        at = 0
        for number, example in enumerate(unit):
            to = at + len(example.tokens) - 1
            tokens[row, at:to], targets[row, at:to] = example.tokens[:-1], example.tokens[1:]
            weights[row, at:to] = example.supervised[1:]
            segments[row, at:to] = number
            at = to
    packed = any(len(unit) > 1 for unit in units)
    return Batch(tokens, targets, weights, segments if packed else None)


def passes_of(
    units: Sequence[Unit], pass_tokens: int | None, row_tokens: int | None = None
) -> Iterator[Sequence[Unit]]:
    """The rows of a batch that go through the model together.

    With ``row_tokens`` the examples of each row pass by themselves, in rows of at most so many.
    """
    if row_tokens is not None:
        for unit in units:
            yield from ([row] for row in units_of(unit, row_tokens))
        return
    longest = padded_length(max(map(inputs_of, units)))
    at = 0
    for rows in passes(len(units), longest, pass_tokens):
        yield units[at : at + rows]
        at += rows


class Batches:
    """The batches of all epochs by number, from 0."""

    def __init__(self, units: Sequence[Unit], batch_size: int, seed: int) -> None:
        self.units, self.batch_size, self.seed = units, batch_size, seed
        self.lengths = [inputs_of(unit) for unit in units]
        self.per_epoch = -(-len(units) // batch_size)
        self._epoch, self._plan = -1, [[0]]

    def __getitem__(self, number: int) -> list[Unit]:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._plan = batch_plan(self.lengths, self.batch_size, seed=self.seed, epoch=epoch)
            self._epoch = epoch
        return [self.units[n] for n in self._plan[place]]


def require_packable(model: nn.Module) -> None:
    """Compare what the layers give for two short examples in one row with the same apart.

    Raises:
        UnsupportedModel: If it differs: a layer sees past its own example.
    """
    model.eval()
    examples = [
        Example(n, tuple(range(3 + n, 3 + n + length)), (True,) * length, {})
        for n, length in enumerate((21, 13))
    ]
    apart = mx.concatenate(
        [hidden_of(model, batch_of([[e]]))[:, : len(e.tokens) - 1] for e in examples], axis=1
    )
    together = hidden_of(model, batch_of([examples]))[:, : apart.shape[1]]
    tolerance = PACKING_TOLERANCE[apart.dtype == mx.float32]
    apart, together = apart.astype(mx.float32), together.astype(mx.float32)
    found: Any = (mx.linalg.norm(together - apart) / mx.linalg.norm(apart)).item()
    if found > tolerance:
        raise UnsupportedModel(
            "examples cannot be packed for this model: in one row its layers give something else "
            f"than apart (by {found:.2%}); leave out --packing"
        )
