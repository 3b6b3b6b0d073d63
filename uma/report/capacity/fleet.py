"""The machines of a fleet: a folder of bundles of ``uma doctor``, or a list of names in a file."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from uma.errors import DataError, UmaError, UsageError
from uma.machine import Machine
from uma.machine.calibration import Calibration, calibrated
from uma.machine.here import machine_of, with_speed
from uma.measurement.bundle import KIND, machine_of_readings
from uma.plan.capacity.report import Named

MOST_BYTES = 16 << 20  # of one bundle: those of uma have a few hundred kilobytes
MOST_MACHINES = 200


def fleet(path: Path, macos: int | None = None) -> list[Named]:
    """The machines that ``path`` tells, by name.

    A folder holds bundles (``*.json``) and may hold lists of names (``*.txt``), a name a line.

    Raises:
        UsageError: If there are none, or too many.
        UnknownName: If a name means no machine.
        DataError: If a file is no bundle.
    """
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".txt"))
    elif path.is_file():
        files = [path]
    else:
        raise UsageError(f"--fleet {path}: no such folder or file")
    found: list[Named] = []
    for file in files:
        if file.suffix == ".json":
            found.append(Named(file.stem, bundle_machine(file)))
        else:
            found += [Named(name, machine_of(name, macos=macos)) for name in _names(file)]
    if not found:
        raise UsageError(
            f"--fleet {path}: holds neither bundles (uma doctor --bundle FILE.json) nor .txt files "
            "with a machine's name on each line"
        )
    if len(found) > MOST_MACHINES:
        raise UsageError(f"--fleet {path}: {len(found)} machines; at most {MOST_MACHINES}")
    return list({one.name: one for one in found}.values())


def _names(file: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in _text(file).splitlines())
    return [line for line in lines if line]


def bundle_machine(file: Path) -> Machine:
    """The machine of a bundle, with its calibration; what other programs held then is left out.

    Raises:
        DataError: If it is no bundle, or its readings do not decode.
    """
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise DataError(f"{file}: is no bundle of uma doctor; make one with uma doctor --bundle")
    try:
        machine = machine_of_readings(found["readings"], found.get("device_info") or None)
        machine = with_speed(machine) if machine.backend == "metal" else machine
        taken = found.get("calibration")
        if isinstance(taken, Mapping):
            machine = calibrated(machine, _calibration(taken))
    except UmaError as error:
        raise DataError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{file}: its readings do not decode: {error!r}") from None
    return replace(machine, available_bytes=None)


def _calibration(taken: Mapping[str, Any]) -> Calibration:
    """
    Raises:
        ValueError: If a number is none.
    """
    values = {name: taken.get(name) for name in Calibration.__slots__}
    for name, value in values.items():
        if name.endswith(("_bytes", "_per_s")) and not isinstance(value, int | None):
            raise ValueError(f"{name} is {value!r}")
    return Calibration(**values)  # type: ignore[arg-type]


def _text(file: Path) -> str:
    """
    Raises:
        DataError: If it cannot be read, or is too large.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(f"{file}: is larger than any bundle")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
