"""How many threads OpenBLAS should take: all cores or one, whichever is faster now.

Its threads wait for each other in a loop. On 2 cores that other programs use as well, a prompt of
200 tokens ran at 8 tokens/s with two threads and at 134 with one (SmolLM2-135M in float32); on
idle cores two are faster. So it is measured before each prompt.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable

from uma.runtime.blas import physical_cores

TRIES = 4


def choose_threads(product: Callable[[], object]) -> None:
    """Set the faster number by timing ``product``, a small matrix product of a millisecond.

    The slowest of a few tries counts, since waiting for a busy core comes and goes. Nothing is
    done where OpenBLAS is not loaded, or the user has set ``OPENBLAS_NUM_THREADS``.
    """
    if sys.platform != "linux" or "OPENBLAS_NUM_THREADS" in os.environ:
        return
    set_threads = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    if set_threads is not None:
        set_faster(set_threads, physical_cores(), product)


def set_faster(
    set_threads: Callable[[int], object], cores: int, product: Callable[[], object]
) -> None:
    """Leave the faster of ``cores`` threads and one in force."""
    slowest = {}
    for threads in {cores, 1}:
        set_threads(threads)
        product()
        slowest[threads] = max(_seconds(product) for _ in range(TRIES))
    set_threads(min(slowest, key=slowest.__getitem__))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
