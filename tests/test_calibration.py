"""What ``uma doctor`` keeps, and what an estimate makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from uma.ledger import Ledger
from uma.machine import Machine, mac_of
from uma.machine.calibration import (
    Calibration,
    calibrated,
    calibration_of,
    calibration_record,
    forget,
    notes,
)
from uma.measurement.bandwidth import Bandwidth, KernelResult
from uma.measurement.calibrate import calibration_from
from uma.measurement.trial import TermRow, Trial, rows_of
from uma.memory.term import MemoryTerm
from uma.records import read_records, write_record
from uma.system.darwin import Readings
from uma.units import GB, GIB, MIB


def mac(memory_gib: int = 64, chip: str = "Apple M4 Max") -> Machine:
    lines = {"hw.memsize": memory_gib * GIB, "hw.optional.arm64": 1, "iogpu.wired_limit_mb": 0}
    text = "".join(f"{k}: {v}\n" for k, v in lines.items())
    return mac_of(Readings(f"{text}machdep.cpu.brand_string: {chip}\n", "", ""))


FOUND = Calibration("2026-11-30", "gpu", "triad", 486 * GB, 300 * MIB, 412 * GB, 5 * GB)


def test_a_calibration_is_read_back_on_the_machine_that_it_was_taken_on(tmp_path: Path) -> None:
    write_record(calibration_record(FOUND, mac(), {"mlx": "0.32.4"}), tmp_path)
    assert calibration_of(read_records(tmp_path), mac()) == FOUND


@pytest.mark.parametrize(
    "other", [mac(128), mac(64, "Apple M3 Max"), replace(mac(), gpu_cores=32)], ids=lambda m: m.name
)
def test_another_machine_does_not_take_it_over(other: Machine, tmp_path: Path) -> None:
    """State folders are copied with a disk, or shared."""
    write_record(calibration_record(FOUND, mac(), {}), tmp_path)
    assert calibration_of(read_records(tmp_path), other) is None


def test_an_updated_system_keeps_the_calibration(tmp_path: Path) -> None:
    write_record(calibration_record(FOUND, mac(), {}), tmp_path)
    updated = replace(mac(), os_version="26.9", limit_bytes=1, available_bytes=2)
    assert calibration_of(read_records(tmp_path), updated) == FOUND


def test_the_newest_counts_and_forgetting_removes_all(tmp_path: Path) -> None:
    for date in ("2026-11-29", "2026-11-30"):
        record = calibration_record(replace(FOUND, date=date), mac(), {})
        path = write_record(record, tmp_path).path
        assert path is not None
        path.rename(tmp_path / f"{date}.json")
    found = calibration_of(read_records(tmp_path), mac())
    assert found is not None
    assert found.date == "2026-11-30"
    assert forget(tmp_path) == 2
    assert calibration_of(read_records(tmp_path), mac()) is None
    assert forget(tmp_path) == 0


def test_it_adds_a_fitted_term_and_says_so() -> None:
    machine = calibrated(mac(), FOUND)
    assert machine.overhead == (
        MemoryTerm(
            "runtime_context", 300 * MIB, "fitted", "calibrated on this machine, 2026-11-30"
        ),
    )
    (note,) = machine.notes
    assert "calibrated on this machine, 2026-11-30: 486.0 GB/s" in note
    assert "uma doctor --forget" in note
    assert replace(machine, calibration=None, notes=(), bandwidth_bytes_per_s=None) == mac()


def test_the_bandwidth_that_was_reached_stands_where_none_is_specified() -> None:
    assert calibrated(mac(), FOUND).bandwidth_bytes_per_s == 486 * GB
    known = replace(mac(), bandwidth_bytes_per_s=546 * GB)
    assert calibrated(known, FOUND).bandwidth_bytes_per_s == 546 * GB


def test_a_calibration_of_a_busy_machine_says_so() -> None:
    assert "run uma doctor again" in notes(replace(FOUND, busy=True))[1]


def test_what_was_not_measured_adds_no_term() -> None:
    assert calibrated(mac(), Calibration("2026-11-30", "host", "none")).overhead == ()
    assert mac().overhead == ()


# --- from trials --------------------------------------------------------------------------------

TERMS = (
    MemoryTerm("weights", 100 * MIB, "exact", "headers"),
    MemoryTerm("kv_cache", 10 * MIB, "exact", "shapes", "decode"),
    MemoryTerm("activations", 4 * MIB, "bound", "order", "decode"),
    MemoryTerm("logits", MIB, "bound", "two steps", "decode"),
    MemoryTerm("buffer_pool", 8 * MIB, "bound", "limit"),
)
LEDGER = Ledger(
    TERMS,
    GIB,
    GIB,
    "fits",
    {("weights", "always"): 100 * MIB, ("kv_cache", "decode"): 10 * MIB},
    120 * MIB,
)


def trial(peak_bytes: int = 113 * MIB, read_bytes: int = 110 * MIB) -> Trial:
    return Trial(
        "m", "float32", LEDGER, 115 * MIB, {"decode": peak_bytes}, 20.0, 90 * MIB, read_bytes
    )


def test_the_temporaries_of_a_phase_are_what_its_peak_held_beside_the_rest() -> None:
    rows = {row.name: row for row in rows_of(trial())}
    assert rows["activations + logits"].predicted_bytes == 5 * MIB
    assert rows["activations + logits"].measured_bytes == 3 * MIB
    assert rows["peak"].measured_bytes == 113 * MIB
    assert set(rows) == {"weights", "kv_cache", "activations + logits", "peak"}
    assert all(row.holds for row in rows.values())


def test_a_bound_that_is_passed_does_not_hold() -> None:
    rows = {row.name: row for row in rows_of(trial(peak_bytes=119 * MIB))}
    assert rows["activations + logits"].holds is False
    assert rows["peak"].holds is False


def test_an_exact_term_holds_to_the_byte_only() -> None:
    row = TermRow("m", "weights", "always", 100, 100, "exact")
    assert row.holds
    assert replace(row, measured_bytes=99).holds is False
    assert replace(row, measured_bytes=None).holds is None


def bandwidth(device: str = "host") -> Bandwidth:
    kernels = (KernelResult("triad", 3 * GB, (0.1,)), KernelResult("read", GB, (0.05,)))
    return Bandwidth(device, MIB, kernels)  # type: ignore[arg-type]


def test_the_calibration_has_the_best_rate_and_the_last_models_overhead() -> None:
    found = calibration_from(bandwidth(), [trial(), trial()], "2026-11-30")
    assert found.bandwidth_bytes_per_s == 30 * GB
    assert found.kernel == "triad"
    assert found.overhead_bytes == 90 * MIB
    assert found.decode_bytes_per_s == 20 * 110 * MIB


def test_a_model_that_caches_hold_says_nothing_about_decode() -> None:
    found = calibration_from(bandwidth(), [trial(read_bytes=3 * MIB)], "2026-11-30")
    assert found.decode_bytes_per_s is None


def test_mlx_on_a_processor_calibrates_no_bandwidth() -> None:
    assert calibration_from(bandwidth("cpu"), [], "2026-11-30").bandwidth_bytes_per_s is None
