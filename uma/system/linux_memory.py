"""Linux: what the machine's memory holds, from ``/proc`` and ``/sys``.

Functions that read take the root of the file tree; the others are pure, and leave out what a text
lacks.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from uma.system.linux import read_text

_ROOT = Path("/")
_NUMBER = r"[0-9]{1,18}"


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """Text of ``/proc/meminfo``, ``/proc/vmstat``, PSI, and ``mm_stat`` of each zram device."""

    meminfo: str
    vmstat: str
    pressure: str
    zram: tuple[str, ...] = ()


def read_memory(root: Path = _ROOT) -> MemoryReadings:
    """Ask this machine; under 1 ms. Empty where the kernel has no such file."""
    devices = sorted((root / "sys/block").glob("zram*/mm_stat"))
    return MemoryReadings(
        meminfo=read_text(root / "proc/meminfo") or "",
        vmstat=read_text(root / "proc/vmstat") or "",
        pressure=read_text(root / "proc/pressure/memory") or "",
        zram=tuple(read_text(path) or "" for path in devices),
    )


def parse_pressure(text: str) -> dict[str, dict[str, float]]:
    """PSI: percent of the time that some, or all, tasks waited for memory.

    >>> parse_pressure("some avg10=1.50 avg60=0.20 avg300=0.00 total=12")["some"]["avg10"]
    1.5
    """
    kinds = {}
    for kind, rest in re.findall(r"^(some|full)((?: [a-z0-9]+=[0-9.]{1,18})*)", text, re.MULTILINE):
        pairs = re.findall(r"([a-z0-9]+)=([0-9]+(?:\.[0-9]+)?)(?![0-9.])", rest)
        kinds[kind] = {name: float(value) for name, value in pairs}
    return kinds


def parse_zram(text: str) -> tuple[int, int] | None:
    """Bytes stored and bytes they take, of a ``mm_stat`` (kernel docs, admin-guide/blockdev/zram).

    >>> parse_zram("  4096   74    12288        0    12288        0        0        0        0")
    (4096, 12288)
    """
    columns = re.findall(rf"(?<!\S){_NUMBER}(?!\S)", text)
    return (int(columns[0]), int(columns[2])) if len(columns) >= 3 else None


def parse_counts(text: str) -> dict[str, int]:
    """Counters by name, of ``/proc/vmstat``.

    >>> parse_counts("pswpin 3\\npswpout 5\\n")
    {'pswpin': 3, 'pswpout': 5}
    """
    found = re.findall(rf"^([a-z0-9_]+) ({_NUMBER})$", text, re.MULTILINE)
    return {name: int(value) for name, value in found}
