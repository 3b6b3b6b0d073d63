"""The batches of an epoch as the model sees them: how many rows of which length at once."""

from collections import Counter
from collections.abc import Sequence

from uma.dataset.batches import batch_plan, padded_length

Shape = tuple[int, int]
"""Rows and their padded length."""


def passes(rows: int, length: int, pass_tokens: int | None) -> list[int]:
    """Rows of each pass in which a batch goes through the model, as even as they can be.

    No pass has more than ``pass_tokens`` positions, but one row always goes.

    >>> passes(4, 1024, None), passes(4, 1024, 3072), passes(4, 1024, 100)
    ([4], [2, 2], [1, 1, 1, 1])
    """
    most = rows if pass_tokens is None else max(1, pass_tokens // length)
    count = -(-rows // most)
    return [rows // count + (n < rows % count) for n in range(count)]


def shapes(lengths: Sequence[int], batch_size: int, pass_tokens: int | None) -> Counter[Shape]:
    """How often each shape passes in an epoch; the same in every epoch.

    ``lengths`` are the inputs of each row. The order of batches differs by epoch, and which of
    equally long rows goes into which, but not the lengths that stand together.
    """
    found: Counter[Shape] = Counter()
    for batch in batch_plan(lengths, batch_size, seed=0, epoch=0):
        longest = padded_length(max(lengths[n] for n in batch))
        at = 0
        for rows in passes(len(batch), longest, pass_tokens):
            part = batch[at : at + rows]
            found[rows, padded_length(max(lengths[n] for n in part))] += 1
            at += rows
    return found
