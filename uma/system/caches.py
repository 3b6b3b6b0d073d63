"""The last cache before memory, which a benchmark of memory must not be served from."""

import re
from pathlib import Path

from uma.units import KIB, MIB

# System level caches of Apple's chips in MiB (Apple Silicon CPU Optimization Guide, as quoted in
# public; M5 not known). macOS does not tell them.
_APPLE_MIB = {"Ultra": 96, "Max": 48, "Pro": 24}
_UNKNOWN_MIB = 96


def last_level_cache_bytes(chip: str | None = None, root: Path = Path("/")) -> int:
    """Of an Apple ``chip`` by its name, else as Linux tells it, else the largest of a Mac.

    >>> last_level_cache_bytes("Apple M2 Ultra") // MIB, last_level_cache_bytes("Apple M4") // MIB
    (96, 8)
    """
    if chip is not None and (match := re.match(r"Apple M\d+(?: (\w+))?$", chip)):
        return _APPLE_MIB.get(match[1] or "", 8) * MIB
    folder = root / "sys/devices/system/cpu/cpu0/cache"
    sizes = [_size(path) for path in folder.glob("index*/size")]
    return max(sizes, default=0) or _UNKNOWN_MIB * MIB


def _size(path: Path) -> int:
    try:
        match = re.match(r"(\d+)([KM])", path.read_text())
    except OSError:
        match = None
    return int(match[1]) * (KIB if match[2] == "K" else MIB) if match else 0
