"""This machine with what ``uma doctor`` has kept of it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uma.machine import Machine


def calibration_folder() -> Path:
    from uma.paths import state_folder

    return state_folder() / "calibration"


def calibrated(machine: "Machine") -> "Machine":
    """``machine``, which is this one, with its calibration if there is one."""
    folder = calibration_folder()
    if not folder.is_dir():
        return machine
    from uma.machine.calibration import calibrated, calibration_of
    from uma.records import read_records

    found = calibration_of(read_records(folder), machine)
    return machine if found is None else calibrated(machine, found)
