"""From what a doctor measured to the calibration that later estimates use."""

from collections.abc import Sequence

from uma.machine.calibration import Calibration
from uma.measurement.bandwidth import Bandwidth
from uma.measurement.trial import Trial
from uma.units import MIB

LEAST_READ_BYTES = 64 * MIB  # a token of a smaller model is served from caches


def calibration_from(
    bandwidth: Bandwidth | None, trials: Sequence[Trial], date: str, *, busy: bool = False
) -> Calibration:
    """The bandwidth that memory gave, and what the last of ``trials``, a real model, showed."""
    best = None if bandwidth is None else bandwidth.achieved
    last = trials[-1] if trials else None
    decode = last if last is not None and last.read_bytes >= LEAST_READ_BYTES else None
    return Calibration(
        date=date,
        device="unknown" if bandwidth is None else bandwidth.device,
        kernel="none" if best is None else best.name,
        bandwidth_bytes_per_s=None if best is None else round(best.best_bytes_per_s),
        overhead_bytes=None if last is None else last.overhead_bytes,
        decode_bytes_per_s=None if decode is None else decode.decode_bytes_per_s,
        decode_read_bytes=None if decode is None else decode.read_bytes,
        busy=busy,
    )
