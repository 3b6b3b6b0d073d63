"""How many threads OpenBLAS should take: all cores or one, whichever is faster now.

Its threads wait for each other in a loop. On 2 cores that other programs use as well, a prompt of
200 tokens ran at 8 tokens/s with two threads and at 134 with one (SmolLM2-135M in float32); on
idle cores two are faster. So it is measured before each prompt. Decode is indifferent: its small
products (``uma.runtime.forms``) run on one thread whatever the number.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable

from uma.runtime.blas import physical_cores

TRIES = 4

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


def set_faster_threads(product: Callable[[], object]) -> None:
    """Let OpenBLAS, if it is there, take the number that is faster for ``product``."""
    if (set_threads := thread_setter()) is not None:
        set_threads(faster_threads(set_threads, physical_cores(), product))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
