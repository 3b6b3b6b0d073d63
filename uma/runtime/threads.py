"""How many threads OpenBLAS should take now: all cores or one, whichever is faster as we go.

Its threads wait for each other in a loop. On cores that other programs use, two threads took 22 ms
for a product that one did in 1.5 (64x576x1536 in float32, 2 cores under load), and decoded at 6
tokens/s where one decoded at 10; on idle cores two are faster. So it is measured, before a prompt
and again every few tokens.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from uma.runtime.blas import physical_cores

_TRIAL = 3  # tokens that each choice is timed for, after one that does not count
_PERIOD = 64  # tokens from one comparison to the next


@dataclass(slots=True)
class Threads:
    """Compares one thread with ``cores`` of them, and sets the faster. ``cores`` of 1 does nothing."""

    cores: int
    set_threads: Callable[[int], object] = field(default=lambda _: None)
    seconds: dict[int, float] = field(default_factory=dict)
    _count: int = 0
    _last: float = 0.0

    def before_prompt(self, product: Callable[[], object]) -> None:
        """Choose by timing ``product``, a small matrix product; the slowest of a few tries counts."""
        if self.cores == 1:
            return
        for threads in (self.cores, 1):
            self.set_threads(threads)
            product()
            self.seconds[threads] = max(_seconds(product) for _ in range(4))
        self._choose()

    def after_token(self) -> None:
        """Note that a token is there; now and then run a few with each choice."""
        if self.cores == 1:
            return
        now, step = time.perf_counter(), self._count % _PERIOD
        turn, within = divmod(step, _TRIAL + 1)
        if turn < 2:
            threads = (self.cores, 1)[turn]
            if within == 0:
                self.set_threads(threads)
                self.seconds[threads] = 0.0
            else:
                self.seconds[threads] += now - self._last
        elif step == 2 * (_TRIAL + 1):
            self._choose()
        self._last = now
        self._count += 1

    def _choose(self) -> None:
        self.set_threads(min(self.seconds, key=self.seconds.__getitem__))


def openblas_threads() -> Threads:
    """The choice for this process: none where OpenBLAS is not loaded or the user has chosen."""
    if sys.platform != "linux" or "OPENBLAS_NUM_THREADS" in os.environ:
        return Threads(1)
    setter = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    return Threads(1) if setter is None else Threads(physical_cores(), setter)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
