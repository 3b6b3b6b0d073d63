"""macOS: traffic of the memory itself, as IOReport counts it; no root needed.

Chips count in different groups: bytes ("AMC Stats"), or the time spent in steps of a rate
("PMP"), from which only a weighted mean can be told. Pure; ``darwin_ioreport`` does the sampling.
Sources: kennss/SiliconScope a1644e5 (docs/ioreport-channels.md), metaspartan/mactop pull request
91, op06072/NeoAsitop issue 2.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

UNPOPULATED = -(1 << 63)  # the value of a counter that this chip or this macOS does not fill

# Group, subgroup, in the order to try.
CANDIDATES = (
    ("AMC Stats", "Perf Counters"),
    ("PMP", "DRAM BW"),
    ("PMP", "DCS BW"),
    ("PMP0", "DCS BW"),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rates in GB/s (10^9 bytes). A histogram's are estimates, and not below ``floor``.

    ``top_share`` is the part of the time in the highest step: near 1 the true rate may be higher.
    """

    total: float
    read: float | None = None
    write: float | None = None
    estimated: bool = False
    floor: float = 0.0
    top_share: float = 0.0


def counter(value: int | None) -> int | None:
    """``value`` unless it stands for "not counted here".

    >>> counter(UNPOPULATED) is None
    True
    """
    return None if value is None or value < 0 else value


def traffic_of_bytes(
    subgroup: str, difference: Mapping[str, int | None], seconds: float
) -> Traffic | None:
    """Traffic from bytes counted in ``seconds``, or ``None`` where the totals are not counted.

    ``DCS RD`` and ``DCS WR`` are the totals at the memory; channels with a unit's name in front
    are parts of them, and those without ``DCS`` count what the last cache answers too.
    """
    if seconds <= 0:
        return None
    if subgroup == "DRAM BW":
        counts = [difference[name] for name in difference if re.fullmatch(r"F\d (RD|WR)", name)]
        known = [count for count in counts if count is not None]
        return Traffic(sum(known) / seconds / 1e9) if known else None
    read, write = (
        difference.get(name, difference.get(f"DIE0 {name}")) for name in ("DCS RD", "DCS WR")
    )
    if read is None or write is None:
        return None
    read_rate, write_rate = read / seconds / 1e9, write / seconds / 1e9
    return Traffic(read_rate + write_rate, read_rate, write_rate)


def step_gb_per_s(label: str) -> int | None:
    """The rate that a step's label names.

    >>> step_gb_per_s("  16GB/s"), step_gb_per_s("VMIN")
    (16, None)
    """
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*GB/s\s*", label)
    return int(match[1]) if match else None


def traffic_of_steps(states: Mapping[str, int]) -> Traffic | None:
    """Mean rate, weighted by the time in each step; ``None`` where no time was counted.

    Only of ``AMCC RD+WR``, the memory's own: the steps of a single unit end at 32 GB/s.
    """
    steps: dict[int, int] = {}
    for label, residency in states.items():
        rate = step_gb_per_s(label)
        if rate is not None and residency > 0:
            steps[rate] = steps.get(rate, 0) + residency
    rates = [rate for label in states if (rate := step_gb_per_s(label)) is not None]
    total = sum(steps.values())
    if total <= 0:
        return None
    mean = sum(rate * residency for rate, residency in steps.items()) / total
    top = steps.get(max(rates), 0) / total
    return Traffic(mean, estimated=True, floor=float(min(rates)), top_share=top)


def power_w(energy: int | None, unit: str, seconds: float) -> float | None:
    """Watts from a counter of energy such as "GPU Energy", whose unit is nJ, uJ or mJ.

    >>> power_w(3_200_000_000, "nJ", 1.0)
    3.2
    """
    scale = {"nJ": 1e9, "uJ": 1e6, "mJ": 1e3, "J": 1.0}.get(unit.strip())
    if energy is None or energy < 0 or scale is None or seconds <= 0:
        return None
    return energy / scale / seconds
