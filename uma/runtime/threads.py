"""How many threads OpenBLAS should take now: all cores or one, whichever is faster as we go.

Its threads wait for each other in a loop. On 2 cores that other programs use as well, a prompt of
200 tokens ran at 8 tokens/s with two threads and at 134 with one (SmolLM2-135M in float32), the
answer at 0.8 and 5; on idle cores two are faster. So it is measured, before a prompt and again
every few tokens.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Generator

from uma.runtime.blas import physical_cores

_TRIAL = 3  # tokens that each choice is timed for
_PERIOD = 64  # tokens until the choices are compared again; then twice as many, and so on


class Threads:
    """Compares one thread with ``cores`` and sets the faster; one core leaves nothing to choose."""

    def __init__(self, cores: int, set_threads: Callable[[int], object]) -> None:
        self.cores = cores
        self.set_threads = set_threads
        self._last = 0.0
        self._trials = self._compare()
        next(self._trials)

    def before_prompt(self, product: Callable[[], object]) -> None:
        """Choose by timing ``product``, a small matrix product: by the slowest of four tries."""
        if self.cores == 1:
            return
        slowest = {}
        for threads in (self.cores, 1):
            self.set_threads(threads)
            product()
            slowest[threads] = max(_seconds(product) for _ in range(4))
        self.set_threads(min(slowest, key=slowest.__getitem__))

    def after_token(self) -> None:
        """Note that a token is there; now and then the next few try the other choice."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        if self.cores > 1:
            self._trials.send(took)

    def _compare(self) -> Generator[None, float, None]:
        """Takes the seconds of each token."""
        period = _PERIOD
        yield
        while True:
            seconds = {1: 0.0, self.cores: 0.0}
            for threads in seconds:
                self.set_threads(threads)
                yield  # this token was begun before the change
                for _ in range(_TRIAL):
                    seconds[threads] += yield
                    if seconds[threads] > seconds[1]:
                        break
            self.set_threads(min(seconds, key=seconds.__getitem__))
            for _ in range(period):
                yield
            period *= 2


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
