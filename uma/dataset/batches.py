"""Examples in batches of like length, the same for the same seed."""

from collections.abc import Sequence

SMALLEST = 32
"""Tokens that lengths are rounded up to at least, as in mlx-lm."""


def padded_length(tokens: int) -> int:
    """``tokens`` rounded up so that batches come in few lengths: four between powers of two.

    MLX keeps freed buffers by size, so that many lengths fill its pool.

    >>> [padded_length(n) for n in (1, 33, 250, 257, 1000, 1025)]
    [32, 64, 256, 320, 1024, 1280]
    """
    step = max(SMALLEST, (1 << (tokens - 1).bit_length()) >> 3)
    return -(-tokens // step) * step


def batch_plan(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of the examples of each batch of an epoch, every example once.

    Examples of like length go together, in an order of batches that ``seed`` and ``epoch`` decide;
    equal lengths are shuffled too. The last group may be smaller than ``batch_size``.
    """
    import random

    order = random.Random(f"{seed}/{epoch}")
    indices = list(range(len(lengths)))
    order.shuffle(indices)
    indices.sort(key=lambda n: lengths[n])  # stable: ties stay shuffled
    batches = [indices[at : at + batch_size] for at in range(0, len(indices), batch_size)]
    order.shuffle(batches)
    return batches


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Of the positions in padded batches, those that hold no token."""
    real = sum(lengths[n] for batch in batches for n in batch)
    padded = sum(len(b) * padded_length(max(lengths[n] for n in b)) for b in batches)
    return 1 - real / padded if padded else 0.0
