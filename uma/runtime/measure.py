"""The measured side of the ledger: what MLX held, by phase, and what the caches hold."""

import threading
from dataclasses import dataclass, field

import mlx.core as mx

from uma.measurement.process import read_process_memory


def overhead_bytes() -> int:
    """What this process holds beyond the arrays and the pool that MLX counts.

    Raises:
        UmaError: If the system does not tell.
    """
    counted = mx.get_active_memory() + mx.get_cache_memory()
    return max(0, read_process_memory().current_bytes - counted)


@dataclass(slots=True)
class PhaseMeter:
    """Peaks of active memory by phase; the highest pool, and active + pool, of the whole time.

    Call ``enter`` with the name of the phase that begins; ``finish`` ends the last one. MLX keeps
    an exact peak of active memory, which is read and reset at each border; it keeps none of the
    pool, which a thread samples every ``interval_s`` seconds.
    """

    interval_s: float = 0.005
    peaks: dict[str, int] = field(default_factory=dict)
    active_and_pool_bytes: int = 0
    pool_bytes: int = 0
    _phase: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def enter(self, phase: str) -> None:
        self._close()
        self._phase = phase
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        self._close()
        self._phase = None
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def peak_bytes(self) -> int:
        """The highest active memory of all phases."""
        return max(self.peaks.values(), default=0)

    def _close(self) -> None:
        self._note()
        if self._phase is not None:
            peak = max(self.peaks.get(self._phase, 0), mx.get_peak_memory())
            self.peaks[self._phase] = peak
        mx.reset_peak_memory()

    def _note(self) -> None:
        active, pool = mx.get_active_memory(), mx.get_cache_memory()
        if active == mx.get_active_memory():  # else a buffer may have moved and count twice
            self.active_and_pool_bytes = max(self.active_and_pool_bytes, active + pool)
            self.pool_bytes = max(self.pool_bytes, pool)

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._note()
