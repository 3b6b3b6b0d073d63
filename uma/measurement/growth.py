"""Whether memory grows: a straight line through samples, and how sure its slope is."""

from collections.abc import Sequence
from dataclasses import dataclass

from uma.units import MIB

# Below these nothing is said: our judgment. A model's own noise is a few MiB.
MIN_SAMPLES = 8
MIN_SECONDS = 20.0
MIN_GROWTH_BYTES = 16 * MIB
_SURE = 4.0  # slope over its standard error
_LEVELLED = 0.25  # slope of the second half over that of the first


@dataclass(frozen=True, slots=True)
class Growth:
    """Least-squares slope. ``sure`` if it is far above its error and above our least growth;
    ``levels_off`` if the second half of the time shows little of the first half's slope."""

    bytes_per_s: float
    error_bytes_per_s: float
    seconds: float
    sure: bool
    levels_off: bool

    @property
    def bytes_per_minute(self) -> int:
        return round(self.bytes_per_s * 60)


def growth(samples: Sequence[tuple[float, int]]) -> Growth | None:
    """The growth of a size sampled at times in seconds; ``None`` where that is too little to tell.

    >>> growth([(2.0 * i, 10 * MIB * i) for i in range(15)]).bytes_per_minute == 300 * MIB
    True
    """
    if len(samples) < MIN_SAMPLES or samples[-1][0] - samples[0][0] < MIN_SECONDS:
        return None
    slope, error = _line(samples)
    seconds = samples[-1][0] - samples[0][0]
    half = len(samples) // 2
    first, second = _line(samples[:half])[0], _line(samples[half:])[0]
    return Growth(
        bytes_per_s=slope,
        error_bytes_per_s=error,
        seconds=seconds,
        sure=slope > _SURE * error and slope * seconds >= MIN_GROWTH_BYTES,
        levels_off=first > 0 and second < _LEVELLED * first,
    )


def _line(samples: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The slope of the least-squares line, and its standard error."""
    count = len(samples)
    mean_time = sum(time for time, _ in samples) / count
    mean_size = sum(size for _, size in samples) / count
    spread = sum((time - mean_time) ** 2 for time, _ in samples)
    if spread == 0:
        return 0.0, float("inf")
    together = sum((time - mean_time) * (size - mean_size) for time, size in samples)
    slope = together / spread
    left = sum((size - mean_size - slope * (time - mean_time)) ** 2 for time, size in samples)
    return slope, (left / max(1, count - 2) / spread) ** 0.5
