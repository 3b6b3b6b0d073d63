"""What ``uma doctor`` found: checks, predictions beside measurements, the calibration."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from uma.machine import Machine
from uma.machine.calibration import Calibration, notes
from uma.measurement.bandwidth import Bandwidth
from uma.measurement.checks import Check
from uma.measurement.trial import TermRow, Trial, rows_of
from uma.report import SCHEMA_VERSION
from uma.report.text import percent, table
from uma.units import GB, format_gib


@dataclass(frozen=True, slots=True)
class DoctorReport:
    machine: Machine
    versions: Mapping[str, str | None]
    checks: Sequence[Check]
    trials: Sequence[Trial] = ()
    bandwidth: Bandwidth | None = None
    calibration: Calibration | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    busy: bool = False

    @property
    def failed(self) -> bool:
        return any(check.state == "failure" for check in self.checks)


def doctor_text(report: DoctorReport) -> str:
    """The checks, then a row for each term that was measured, then what it comes to."""
    lines = [report.machine.name, ""]
    for check in report.checks:
        lines.append(f"{check.state:7}  {check.name:9} {check.text}")
        if check.remedy is not None and check.state != "ok":
            lines.append(f"{'':18} {check.remedy}")
    best = None if report.bandwidth is None else report.bandwidth.achieved
    if best is not None:
        rate = best.best_bytes_per_s / GB
        lines += ["", f"memory bandwidth: {rate:.1f} GB/s ({best.name})"]
    lines += [f"note: {note}" for note in report.notes]
    rows = [row for trial in report.trials for row in rows_of(trial)]
    if rows:
        lines += ["", "predicted against measured:", terms_text(rows), summary(rows)]
    if report.calibration is not None:
        lines += [f"kept for later estimates: {note}" for note in notes(report.calibration)]
    return "\n".join(lines)


def terms_text(rows: Iterable[TermRow]) -> str:
    head = ["model", "term", "phase", "predicted", "measured", "error", "basis"]
    return table([head, *map(_cells, rows)], "<<<>>><")


def _cells(row: TermRow) -> list[str]:
    got = row.measured_bytes
    cells = [row.model, row.name, row.phase, format_gib(row.predicted_bytes)]
    cells += ["", ""] if got is None else [format_gib(got), _error(row, got)]
    return [*cells, row.basis]


def _error(row: TermRow, got: int) -> str:
    if row.basis != "exact" and row.name != "peak" and got <= row.predicted_bytes:
        return "within"
    return percent((row.predicted_bytes - got) / got) if got else ""


def summary(rows: Sequence[TermRow]) -> str:
    """How many terms held, and how far the peaks were off."""
    measured = [row for row in rows if row.holds is not None]
    exact = [row.holds for row in measured if row.basis == "exact"]
    bounds = [row.holds for row in measured if row.basis != "exact" and row.name != "peak"]
    line = (
        f"{sum(map(bool, exact))} of {len(exact)} exact terms equal to the byte, "
        f"{sum(map(bool, bounds))} of {len(bounds)} bounds hold"
    )
    peaks = [
        row.predicted_bytes / row.measured_bytes - 1
        for row in measured
        if row.name == "peak" and row.measured_bytes
    ]
    if not peaks:
        return line
    return f"{line}, peaks predicted {percent(min(peaks))} to {percent(max(peaks))}"


def doctor_json(report: DoctorReport) -> dict[str, Any]:
    """The document of ``uma doctor --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": asdict(report.machine),
        "versions": dict(report.versions),
        "checks": [asdict(check) for check in report.checks],
        "terms": [
            asdict(row) | {"holds": row.holds} for trial in report.trials for row in rows_of(trial)
        ],
        "bandwidth": _bandwidth_json(report.bandwidth),
        "calibration": None if report.calibration is None else report.calibration.to_json(),
        "rows": [dict(row) for row in report.rows],
        "notes": list(report.notes),
    }


def _bandwidth_json(bandwidth: Bandwidth | None) -> dict[str, Any] | None:
    if bandwidth is None:
        return None
    from uma.report.bandwidth import device_json

    return device_json(bandwidth)
