"""MLX's global random state as one integer, read and set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def random_state() -> int:
    """The key of the calling thread: what ``mx.random.seed`` takes to come back to it.

    A key is two words, the high and the low half of the seed (mlx 0.32.4, ``random.cpp``, ``key``).
    """
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


@contextmanager
def at_random_state(state: int) -> Iterator[None]:
    """A block that draws the numbers that follow ``state``; afterwards all is as before."""
    former = random_state()
    mx.random.seed(state)
    try:
        yield
    finally:
        mx.random.seed(former)
