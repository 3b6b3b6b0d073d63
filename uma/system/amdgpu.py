"""AMD's GPUs under Linux, from ``/sys/class/drm``.

On an APU such as Strix Halo both pools are carved out of the same DRAM: ``vram`` is what the
firmware set aside, ``gtt`` what the driver may map besides, and neither adds to MemTotal.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from uma.system.linux import read_text

_ROOT = Path("/sys")
_AMD = "0x1002"


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A card, its PCI device, and its pools in bytes; ``None`` where the driver tells nothing."""

    card: str
    device: str | None
    vram_total: int | None
    vram_used: int | None
    gtt_total: int | None
    gtt_used: int | None
    busy_percent: int | None


def read_cards(root: Path = _ROOT) -> tuple[AmdGpu, ...]:
    """The AMD cards; connectors such as ``card1-DP-1`` are none."""
    folders = sorted((root / "class/drm").glob("card*/device"))
    return tuple(
        _card(folder)
        for folder in folders
        if re.fullmatch(r"card[0-9]+", folder.parent.name) and _line(folder / "vendor") == _AMD
    )


def _card(folder: Path) -> AmdGpu:
    def pool(name: str) -> int | None:
        return _number(folder / f"mem_info_{name}")

    return AmdGpu(
        card=folder.parent.name,
        device=_line(folder / "device"),
        vram_total=pool("vram_total"),
        vram_used=pool("vram_used"),
        gtt_total=pool("gtt_total"),
        gtt_used=pool("gtt_used"),
        busy_percent=_number(folder / "gpu_busy_percent"),
    )


def _line(path: Path) -> str | None:
    text = read_text(path)
    return None if text is None else text.strip()


def _number(path: Path) -> int | None:
    text = _line(path) or ""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
