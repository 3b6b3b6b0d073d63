"""A rate with what is known of its error, or why there is none."""

from dataclasses import dataclass
from typing import Literal

from uma.memory.term import Basis
from uma.speed import fitted
from uma.speed.fitted import Coefficients, Quantity
from uma.speed.processor import Processor

Split = Literal["layer", "row"]
"""Whole layers on each device, one after another; or a part of every matrix on each, at once."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second, all sequences together: eight in ten measurements are within low and high.

    ``notes`` say what the figure leaves out.
    """

    low: float
    best: float
    high: float
    basis: Basis
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotKnown:
    """No figure, and the reason in words."""

    reason: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this machine showed: measured rate over the class's, lowest, middle and highest.

    Of one engine, and of decode or of prompts. It takes the place of the class's interval.
    """

    low: float
    best: float
    high: float
    source: str


def fit_of(quantity: Quantity, engine: str, processor: Processor) -> Coefficients | NotKnown:
    """The coefficients for a processor, or why it has none."""
    fit = fitted.coefficients().get((quantity, engine, processor.device))
    if processor.bandwidth_bytes_per_s is None:
        return NotKnown(f"the memory bandwidth of {processor.name} is not known")
    if fit is None:
        return NotKnown(f"no public measurements of {engine} on {CLASSES[processor.device]}")
    if _flops(quantity, processor) is None:
        return NotKnown(f"the FLOPs per second of {processor.name} are not known")
    return fit


def _flops(quantity: Quantity, processor: Processor) -> int | None:
    """The rate that a quantity needs; decode does without."""
    if quantity == "decode":
        return 0
    if quantity == "prefill":
        return processor.matrix_flops_per_s
    return processor.training_flops_per_s


CLASSES = {
    "apple": "Apple's GPUs",
    "card": "graphics cards",
    "unified": "GPUs of other machines with one memory",
    "cpu": "the cores of a CPU",
}


def rate(
    tokens: float,
    time_s: float,
    fit: Coefficients | NotKnown,
    calibration: Calibration | None,
    notes: tuple[str, ...] = (),
) -> Rate | NotKnown:
    """``tokens`` in ``time_s`` seconds, with the interval of the fit or of this machine."""
    if isinstance(fit, NotKnown):
        return fit
    best = tokens / time_s
    if calibration is not None:
        factors = (calibration.low, calibration.best, calibration.high)
        low, middle, high = (best * factor for factor in factors)
        return Rate(low, middle, high, "fitted", calibration.source)
    source = f"fitted to {fit.rows} public measurements of {fit.engine} on {CLASSES[fit.device]}"
    return Rate(best * fit.low, best, best * fit.high, "fitted", source, notes)
