"""What was observed of machines and programs: memory, bandwidth, known faults, failures."""

from functools import cache
from typing import Literal, NamedTuple

from uma.catalog import read_rows


class WorkingSet(NamedTuple):
    """A GPU working set that a Mac reported.

    ``macos`` is ``15`` (or older), ``26``, ``any`` or not known; ``exact`` if it was printed to
    the byte; ``default`` unless the user had overridden it.
    """

    memory_gib: int
    chip: str
    macos: str
    reported: str
    working_set_bytes: int
    exact: bool
    default: bool
    source: str
    note: str


class BandwidthFigure(NamedTuple):
    """Memory bandwidth that somebody reached; the peak is the bus's transfer rate times its width.

    ``grade`` is ``reported`` for a benchmark, ``derived`` from another rate, or ``live counter``.
    """

    chip: str
    gpu_cores: int | None
    peak_gb_per_s: float | None
    engine: str
    kernel: str
    achieved_gb_per_s: float | None
    grade: str
    source: str
    note: str


class KnownBad(NamedTuple):
    """Versions with a known fault: from one up to, and without, another; empty is no bound.

    ``beside`` names another package's versions that are needed for it, ``chip`` the beginning of
    a chip's name.
    """

    package: str
    from_version: str
    before_version: str
    beside: str
    os: str
    chip: str
    severity: Literal["failure", "warning", "note"]
    effect: str
    remedy: str
    source: str


class Failure(NamedTuple):
    """One cause of a failure, and a regular expression that its texts match."""

    cause: str
    pattern: str
    text: str
    remedy: str
    source: str


@cache
def working_sets() -> tuple[WorkingSet, ...]:
    return read_rows("working_set.csv", WorkingSet)


@cache
def bandwidth_figures() -> tuple[BandwidthFigure, ...]:
    return read_rows("bandwidth.csv", BandwidthFigure)


@cache
def known_bad() -> tuple[KnownBad, ...]:
    return read_rows("known_bad.csv", KnownBad)


@cache
def failures() -> tuple[Failure, ...]:
    return read_rows("failures.csv", Failure)
