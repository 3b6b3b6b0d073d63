"""macOS: hardware as ``system_profiler -json`` describes it.

It takes seconds to answer: only what nothing else tells is asked of it. Pure; what an answer lacks
is ``None``.
"""

import json
import re
from typing import Any

from uma.units import GIB, TIB


def parse_hardware(text: str) -> dict[str, Any]:
    """Chip, model, processors and memory of ``system_profiler -json SPHardwareDataType``.

    Of ``number_processors`` only the first number means the same in all versions of macOS.
    """
    entry = _first(text, "SPHardwareDataType")
    cpus = re.match(r"proc ([0-9]{1,4})(?![0-9])", _text(entry.get("number_processors")) or "")
    memory = re.match(r"([0-9]{1,6}) (GB|TB)$", _text(entry.get("physical_memory")) or "")
    unit = {"GB": GIB, "TB": TIB}
    return {
        "chip": _text(entry.get("chip_type")),
        "model": _text(entry.get("machine_model")),
        "cpus": int(cpus[1]) if cpus else None,
        "memory_bytes": int(memory[1]) * unit[memory[2]] if memory else None,
    }


def parse_displays(text: str) -> dict[str, Any]:
    """Chip, GPU cores and Metal support of ``system_profiler -json SPDisplaysDataType``."""
    for entry in _entries(text, "SPDisplaysDataType"):
        cores = re.fullmatch(r"[0-9]{1,4}", str(entry.get("sppci_cores")))
        if cores:
            metal = entry.get("spdisplays_mtlgpufamilysupport") or entry.get("spdisplays_metal")
            return {
                "chip": _text(entry.get("sppci_model")),
                "gpu_cores": int(cores[0]),
                "metal": _text(metal),
            }
    return {"chip": None, "gpu_cores": None, "metal": None}


def _entries(text: str, section: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = document.get(section) if isinstance(document, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _first(text: str, section: str) -> dict[str, Any]:
    return next(iter(_entries(text, section)), {})


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
