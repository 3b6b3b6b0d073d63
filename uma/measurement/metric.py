"""A figure with its unit, where it was read, and, where it could not be, why."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Unit = Literal["bytes", "percent", "GB/s", "W", "count", "cores", "level"]


@dataclass(frozen=True, slots=True)
class Metric:
    """``value`` in ``unit``, as ``source`` tells it; ``None`` has a ``reason`` and is never 0.

    ``estimated`` marks what was rounded, ruled from a table, counts something twice, or is the
    highest or lowest of samples.
    """

    value: int | float | str | None
    unit: Unit = "bytes"
    source: str = ""
    estimated: bool = False
    reason: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def size(self) -> int | None:
        """The value of a metric in bytes."""
        return self.value if isinstance(self.value, int) and self.unit == "bytes" else None

    @property
    def number(self) -> float | None:
        return float(self.value) if isinstance(self.value, int | float) else None


def measured(
    value: int | float | str | None,
    source: str,
    missing: str,
    unit: Unit = "bytes",
    *,
    estimated: bool = False,
) -> Metric:
    """A metric of ``value``, or, where it is ``None``, one that says what is ``missing``.

    >>> measured(None, "vm_stat", "vm_stat has no such line").reason
    'vm_stat has no such line'
    """
    if value is None:
        return Metric(None, unit, source, reason=missing)
    return Metric(value, unit, source, estimated)


def unavailable(reason: str, unit: Unit = "bytes") -> Metric:
    return Metric(None, unit, reason=reason)


def total(metrics: Iterable[Metric], *, counts_shared: bool = False) -> Metric:
    """The sum of metrics in bytes, of those that are known.

    It is estimated if one of them is, or is missing, or if ``counts_shared`` says that memory
    they share counts in each of several.
    """
    rows = list(metrics)
    known = [row for row in rows if row.size is not None]
    if not known:
        return rows[0] if rows else unavailable("there is no such process")
    lacking = len(known) < len(rows) or any(row.estimated for row in known)
    shared = counts_shared and len(known) > 1
    return Metric(
        sum(row.size or 0 for row in known), "bytes", known[0].source, estimated=lacking or shared
    )
