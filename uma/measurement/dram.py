"""Live traffic of a Mac's memory, and the power of its GPU: two samples of IOReport."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from uma.measurement.metric import Metric, measured, unavailable
from uma.system.dram_traffic import (
    CANDIDATES,
    Traffic,
    counter,
    power_w,
    traffic_of_bytes,
    traffic_of_steps,
)

if TYPE_CHECKING:
    from uma.system.darwin_ioreport import Channel

Metrics = dict[str, Metric]


def read_traffic(seconds: float = 0.5) -> Metrics:
    """``read``, ``write`` and ``total`` in GB/s, of all programs, the GPU and the display.

    The sources are tried in turn; where none counts, the reason says which were tried.
    """
    if sys.platform != "darwin":
        return _unknown("not told here: it needs root, or the vendor's own tool")
    tried = []
    for group, subgroup in CANDIDATES:
        try:
            found = _sampled(group, subgroup, seconds)
        except OSError as error:
            tried.append(f"{group}/{subgroup}: {error.strerror}")
            continue
        if found is not None:
            return traffic_metrics(found, f"IOReport {group}/{subgroup}")
        tried.append(f"{group}/{subgroup}: nothing counted")
    return _unknown("; ".join(tried))


def _sampled(group: str, subgroup: str, seconds: float) -> Traffic | None:
    from uma.system.darwin_ioreport import difference

    channels, elapsed = difference(group, subgroup, seconds)
    return traffic_of(channels, subgroup, elapsed)


def traffic_of(channels: Iterable["Channel"], subgroup: str, seconds: float) -> Traffic | None:
    """The memory's traffic in what these channels counted, or ``None``."""
    rows = {channel.name: channel for channel in channels}
    if subgroup == "DCS BW":
        total = rows.get("AMCC RD+WR")
        return None if total is None else traffic_of_steps(total.states)
    counts = {name: counter(channel.value) for name, channel in rows.items()}
    return traffic_of_bytes(subgroup, counts, seconds)


def traffic_metrics(found: Traffic, source: str) -> Metrics:
    """The rates as metrics; a histogram near its lowest step only says "at most"."""
    rates = {"total": found.total, "read": found.read, "write": found.write}
    metrics = {
        name: measured(
            None if rate is None else round(rate, 2),
            source,
            "this chip counts the total only",
            "GB/s",
            estimated=found.estimated,
        )
        for name, rate in rates.items()
    }
    if found.floor and found.total < 2 * found.floor:
        source += f": at most {2 * found.floor:.0f}, the histogram begins at {found.floor:.0f}"
        metrics["total"] = Metric(2 * found.floor, "GB/s", source, estimated=True)
    return metrics


def read_gpu_power(seconds: float = 0.5) -> Metric:
    """The GPU's power in watts; on a Mac from the energy that IOReport counts."""
    if sys.platform != "darwin":
        return unavailable("macOS only", "W")
    from uma.system.darwin_ioreport import difference

    try:
        channels, elapsed = difference("Energy Model", None, seconds)
    except OSError as error:
        return unavailable(f"IOReport Energy Model: {error.strerror}", "W")
    energy = next((c for c in channels if c.name == "GPU Energy"), None)
    watts = None if energy is None else power_w(energy.value, energy.unit, elapsed)
    return measured(watts, "IOReport GPU Energy", "this chip counts no GPU energy", "W")


def _unknown(reason: str) -> Metrics:
    return {name: unavailable(reason, "GB/s") for name in ("total", "read", "write")}
