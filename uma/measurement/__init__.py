"""What a run or a machine showed.

``measure`` measures any code::

    from uma.measurement import measure

    with measure() as run:
        ...
    print(run.record.tree["footprint_peak"])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uma.measurement.record import Record, measure
    from uma.measurement.snapshot import MlxCounters, Snapshot, read_snapshot

__all__ = ["MlxCounters", "Record", "Snapshot", "measure", "read_snapshot"]


def __getattr__(name: str) -> Any:
    """Import on first use: most commands need one part of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uma.measurement import record, snapshot

    return getattr(record, name, None) or getattr(snapshot, name)
