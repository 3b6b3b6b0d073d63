"""How many threads OpenBLAS should take: all cores or one, whichever is faster now.

Its threads wait for each other in a loop. On 2 cores that other programs use as well, a prompt of
200 tokens ran at 8 tokens/s with two threads and at 134 with one (SmolLM2-135M in float32); on
idle cores two are faster. So it is measured: before each prompt, and with its first tokens.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator

from uma.runtime.blas import physical_cores

TRIES = 4
TOKENS = 3
WORTH = 0.9  # more threads take the cores from others: they must be worth it

SetThreads = Callable[[int], object]


def thread_setter() -> SetThreads | None:
    """OpenBLAS's own; ``None`` where it is not loaded, or the user chose OPENBLAS_NUM_THREADS."""
    if sys.platform != "linux" or "OPENBLAS_NUM_THREADS" in os.environ:
        return None
    setter: SetThreads | None = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    return setter


def faster_threads(set_threads: SetThreads, cores: int, product: Callable[[], object]) -> int:
    """``cores`` or one, by timing ``product``, a matrix product of about a millisecond.

    The slowest of a few tries counts, since waiting for a busy core comes and goes.
    """
    slowest = {}
    for threads in {cores, 1}:
        set_threads(threads)
        product()
        slowest[threads] = max(_seconds(product) for _ in range(TRIES))
    return min(slowest, key=slowest.__getitem__)


def prefill_threads(set_threads: SetThreads | None, product: Callable[[], object]) -> int:
    """The number that is faster for ``product``, a product like those of prefill, now set."""
    if set_threads is None:
        return 1
    chosen = faster_threads(set_threads, physical_cores(), product)
    set_threads(chosen)
    return chosen


def decode_threads(
    set_threads: SetThreads | None, most: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Advance it with every token: after the first few it has set the faster number for the rest.

    Nothing but decode itself tells: its matrices come from memory, and one core alone may use up
    what that gives.
    """
    if set_threads is not None and most > 1:
        seconds = {}
        for threads in (most, 1):
            set_threads(threads)
            yield  # the next token is already on its way
            start = clock()
            for _ in range(TOKENS):
                yield
            seconds[threads] = clock() - start
        set_threads(most if seconds[most] < WORTH * seconds[1] else 1)
    while True:
        yield


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
