"""What this machine was measured to reach, for the estimates that follow on it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uma.frozen import dataclass
from uma.machine.facts import Machine
from uma.memory.term import MemoryTerm
from uma.units import GB, format_gib

_SAME = ("memory_bytes", "backend", "chip", "cpu", "gpu_cores")


@dataclass(frozen=True, slots=True)
class Calibration:
    """One ``uma doctor``: bandwidth that memory gave to ``device``, and what it took besides.

    ``overhead_bytes`` is what the process holds beyond MLX's own counters: Python, the libraries,
    the tokenizer. ``decode_bytes_per_s`` is what decode reached, with ``decode_read_bytes`` a
    token. ``None`` is not measured. ``busy`` says that other programs kept the cores from it.
    """

    date: str
    device: str
    kernel: str
    bandwidth_bytes_per_s: int | None = None
    overhead_bytes: int | None = None
    decode_bytes_per_s: int | None = None
    decode_read_bytes: int | None = None
    busy: bool = False

    @property
    def label(self) -> str:
        return f"calibrated on this machine, {self.date}"

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """The overhead as a term; none if it was not measured."""
        if not self.overhead_bytes:
            return ()
        return (MemoryTerm("runtime_context", self.overhead_bytes, "fitted", self.label),)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def calibration_of(records: Sequence[Mapping[str, Any]], machine: Machine) -> Calibration | None:
    """The newest of ``records``, oldest first, that was taken on this machine as it is."""
    for record in reversed(records):
        values, taken = record.get("calibration"), record.get("machine")
        if not isinstance(values, Mapping) or not isinstance(taken, Mapping):
            continue
        if all(taken.get(name) == getattr(machine, name) for name in _SAME):
            known = {name: values.get(name) for name in Calibration.__slots__}
            return Calibration(**known)  # type: ignore[arg-type]
    return None


def calibration_record(
    calibration: Calibration, machine: Machine, versions: Mapping[str, Any]
) -> dict[str, Any]:
    """What is kept of a calibration: it holds on this machine alone."""
    taken = {name: getattr(machine, name) for name in ("name", "os", "os_version", *_SAME)}
    return {
        "command": "uma doctor",
        "machine": taken,
        "versions": dict(versions),
        "calibration": calibration.to_json(),
    }


def calibrated(machine: Machine, calibration: Calibration) -> Machine:
    """``machine`` with what was measured on it, and notes that name it.

    The bandwidth that was reached stands where no vendor's figure is known; where one is, speeds
    are fitted to that.
    """
    return replace(
        machine,
        calibration=calibration,
        notes=(*machine.notes, *notes(calibration)),
        bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s or calibration.bandwidth_bytes_per_s,
    )


def notes(calibration: Calibration) -> tuple[str, ...]:
    """What an estimate says of the calibration that it used, and how to undo it."""
    parts = []
    if calibration.bandwidth_bytes_per_s is not None:
        rate = calibration.bandwidth_bytes_per_s / GB
        parts.append(f"{rate:.1f} GB/s of memory bandwidth ({calibration.kernel})")
    if calibration.overhead_bytes:
        parts.append(f"{format_gib(calibration.overhead_bytes)} of the process beside MLX")
    found = [f"{calibration.label}: {', '.join(parts)}; `uma doctor --forget` undoes it"]
    if calibration.busy:
        found.append("other programs were busy during the calibration: run uma doctor again later")
    return tuple(found)


def forget(folder: Path) -> int:
    """Remove every calibration of ``folder``; how many there were."""
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
