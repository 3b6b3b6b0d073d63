"""What a Mac's owner can attach to a report: numbers and versions, no names, no paths.

The system's answers are kept line by line, and only lines of a known shape: fixtures of tests are
made of them (``scripts/add_machine.py``).
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from uma.machine import Machine, linux_of, mac_of
from uma.system import darwin, linux

KIND = "uma doctor bundle"
_SIZE_LINE = r"\w[\w()]*:\s+\d+ kB"
_LINES = {
    "sysctl": r"[\w.]+: [\w. ]+",
    "vm_stat": r'Mach Virtual .*\(page size of \d+ bytes\)|"?[A-Z][\w -]*"?:\s+\d+\.?',
    "ioreg": r'[| ]*"gpu-core-count"\s*=\s*\d+',
    "meminfo": _SIZE_LINE,
    "cpuinfo": r"model name\s*:.*",
}


def read_system() -> dict[str, Any]:
    """The readings that ``read_machine`` starts from, those lines of them that are known."""
    if sys.platform == "darwin":
        answers = darwin.read()
        names = ("sysctl", "vm_stat", "ioreg")
        return {"system": "darwin"} | {n: kept_lines(n, getattr(answers, n)) for n in names}
    if sys.platform == "linux":
        told = linux.read()
        return {
            "system": "linux",
            "meminfo": kept_lines("meminfo", told.meminfo),
            "cpuinfo": kept_lines("cpuinfo", told.cpuinfo)[:1],
            "release": [plain_version(told.release)],
            "groups": [asdict(group) for group in told.groups],
        }
    return {"system": sys.platform}


def plain_version(text: str | None) -> str:
    """The numbers that a version begins with: what follows may name who built it.

    >>> plain_version("6.18.44-anns-kernel")
    '6.18.44'
    """
    match = re.match(r"\d+(\.\d+)*", text or "")
    return match[0] if match else ""


def kept_lines(name: str, text: str) -> list[str]:
    """The lines of an answer that have its known shape, tabs as spaces.

    >>> kept_lines("meminfo", "MemTotal:  5 kB\\nAnn's line\\n")
    ['MemTotal:  5 kB']
    """
    shape = re.compile(_LINES[name])
    lines = (line.expandtabs(1).strip() for line in text.splitlines())
    return [line for line in lines if shape.fullmatch(line)]


def machine_of_readings(
    readings: Mapping[str, Any], device_info: Mapping[str, object] | None = None
) -> Machine:
    """The machine that a bundle's readings describe, decoded as those of this one are."""

    def text(name: str) -> str:
        return "".join(f"{line}\n" for line in readings[name] if line is not None)

    if readings["system"] == "darwin":
        told = {name: text(name) for name in ("sysctl", "vm_stat", "ioreg")}
        return mac_of(darwin.Readings(**told), device_info)
    groups = tuple(linux.Group(**group) for group in readings["groups"])
    release = text("release").strip()
    return linux_of(linux.Readings(text("meminfo"), text("cpuinfo"), release, groups))


def bundle(
    document: Mapping[str, Any],
    readings: Mapping[str, Any],
    device_info: Mapping[str, object] | None,
    date: str,
) -> dict[str, Any]:
    """The document of a doctor without texts of this machine, its readings, the date.

    Of the checks their names and states remain: their texts name folders and programs.
    """
    from uma.records import scrubbed

    machine = dict(document["machine"])
    machine["os_version"] = plain_version(machine["os_version"])
    checks = [{"name": c["name"], "state": c["state"]} for c in document["checks"]]
    numbers = {k: v for k, v in (device_info or {}).items() if isinstance(v, int)}
    told = {"machine": machine, "checks": checks, "readings": readings, "device_info": numbers}
    found: dict[str, Any] = scrubbed({**document, **told})
    return {"kind": KIND, "date": date, **found}
