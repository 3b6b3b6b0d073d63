"""The machines of the catalog as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from uma.machine.facts import Machine
from uma.machine.listed import Listed
from uma.report import SCHEMA_VERSION
from uma.report.text import table
from uma.units import GB, format_gib

_NOTES_UP_TO = 3  # more machines than that, and their notes would hide them


def machines_text(found: Sequence[Listed]) -> str:
    """A line a machine: memory, what the GPU may use of it, bandwidth, price at launch."""
    if not found:
        return "no machine of the catalog is like that"
    head = ["name", "memory", "for the GPU", "GB/s", "US$"]
    lines = [table([head, *map(_row, found)], "<>>>>")]
    if len(found) <= _NOTES_UP_TO:
        for one in found:
            lines += _details(one)
    return "\n".join(lines)


def _row(one: Listed) -> list[str]:
    machine = one.machine
    if machine is None:
        return [one.name, "?", "?", "?", "?"]
    return [
        one.name,
        f"{one.memory_gib} GB",
        _usable(machine),
        _unknown(machine.bandwidth_bytes_per_s, GB),
        _unknown(machine.price_usd, 1),
    ]


def _usable(machine: Machine) -> str:
    """The limit, a range where only that is known."""
    low, high = machine.limit_bytes, machine.limit_high_bytes
    return format_gib(low) if high is None else f"{_gib(low)} to {format_gib(high)}"


def _gib(size: int) -> str:
    return format_gib(size).removesuffix(" GiB")


def _unknown(value: int | None, unit: int) -> str:
    return "?" if value is None else f"{value / unit:,.0f}"


def _details(one: Listed) -> list[str]:
    """Where the limit comes from, the second pool, and notes."""
    machine = one.machine
    if machine is None:
        return [f"{one.name}: {one.title} is sold with different memory; the sizes are not known"]
    said = [f"limit: {machine.limit_source}"]
    if machine.gpu_cores is not None:
        said.append(f"GPU cores: {machine.gpu_cores}")
    if machine.host_memory_bytes is not None:
        said.append(f"second tier: {format_gib(machine.host_memory_bytes)}")
    if machine.link_bytes_per_s is not None:
        said.append(f"link: {machine.link_bytes_per_s / GB:,.1f} GB/s in one direction")
    return ["", f"{one.name}: {machine.name}", *(f"  {line}" for line in (*said, *machine.notes))]


def machines_json(found: Sequence[Listed]) -> dict[str, Any]:
    """Every machine with all that is known of it; ``machine`` is null where the memory is not."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machines": [
            {
                "name": one.name,
                "kind": one.kind,
                "title": one.title,
                "machine": None if one.machine is None else asdict(one.machine),
                "reason": None if one.machine else "sold with different memory, sizes not known",
            }
            for one in found
        ],
    }
