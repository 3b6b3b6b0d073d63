"""How many threads OpenBLAS should take now: all cores or one, whichever is faster as we go.

Its threads wait for each other in a loop. On 2 cores that other programs use as well, a prompt of
200 tokens ran at 8 tokens/s with two threads and at 134 with one (SmolLM2-135M in float32), the
answer at 0.8 and 5; on idle cores two are faster. So it is measured, before a prompt and again
between tokens.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable

from uma.runtime.blas import physical_cores

_PERIOD = 32  # tokens from one comparison to the next: 10 ms beside more than a second
_SLOW = 2.5  # times the fastest token: other programs have come


class Threads:
    """Compares one thread with ``cores`` and sets the faster; one core leaves nothing to choose."""

    def __init__(self, cores: int, set_threads: Callable[[int], object]) -> None:
        self.cores = cores
        self.set_threads = set_threads
        self.current = cores
        self._tokens = 0
        self._last = time.perf_counter()
        self._fastest = float("inf")

    def choose(self, product: Callable[[], object]) -> None:
        """Choose by timing ``product``, a small matrix product: by the slowest of four tries."""
        if self.cores == 1:
            return
        slowest = {}
        for threads in (self.cores, 1):
            self.set_threads(threads)
            product()
            slowest[threads] = max(_seconds(product) for _ in range(4))
        self.current = min(slowest, key=slowest.__getitem__)
        self.set_threads(self.current)
        self._last = time.perf_counter()

    def after_token(self, product: Callable[[], object]) -> None:
        """Note that a token is there; choose again now and then, and when it took long."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._tokens += 1
        slow = self.current > 1 and took > _SLOW * self._fastest
        self._fastest = min(self._fastest, took)
        if slow or self._tokens % _PERIOD == 0:
            self.choose(product)


def openblas_threads() -> Threads:
    """The choice for this process: none where OpenBLAS is not loaded or the user has chosen."""
    setter = None
    if sys.platform == "linux" and "OPENBLAS_NUM_THREADS" not in os.environ:
        setter = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    return Threads(1 if setter is None else physical_cores(), setter or (lambda _: None))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
