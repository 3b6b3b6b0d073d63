"""``uma doctor``: its predictions against measurements, its bundle, its calibration."""

import csv
import getpass
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="runs models")

from models import saved_model
from test_cli_run import environment

from uma.machine import read_machine
from uma.measurement import checks
from uma.runtime.doctor import tiny_models

ROOT = Path(__file__).parent.parent
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a Mac's figures differ")


def uma(home: Path, *arguments: object, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "uma", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(home, **more),
        timeout=300,
    )


class Examined:
    """One doctor with a model of our own, its documents, and estimates before and after."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bundle_file = folder / "home", folder / "bundle.json"
        self.model = saved_model("full", folder / "my-secret-model", hidden_size=128)
        self.before = self.estimate()
        self.done = uma(self.home, "doctor", self.model, "--json", "--bundle", self.bundle_file)
        assert self.done.returncode == 0, self.done.stderr + self.done.stdout
        self.document = json.loads(self.done.stdout)
        self.bundle = json.loads(self.bundle_file.read_text(encoding="utf-8"))
        self.after = self.estimate()
        self.text = uma(self.home, "estimate", self.model).stdout
        self.run = uma(self.home, "run", self.model, "--prompt", "Hello", "--json", "--no-record")
        self.forgotten = uma(self.home, "doctor", "--forget")
        self.reversed = self.estimate()

    def estimate(self) -> dict[str, Any]:
        done = uma(self.home, "estimate", self.model, "--engine", "mlx", "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    return Examined(tmp_path_factory.mktemp("doctor"))


def test_a_tiny_model_of_each_kind_of_cache_is_run_and_then_the_one_asked_for(
    examined: Examined,
) -> None:
    models = list(dict.fromkeys(row["model"] for row in examined.document["terms"]))
    assert models == [*tiny_models(), "local model"]
    assert len(models) >= 10


def test_every_term_that_is_exact_was_measured_and_is_equal_to_the_byte(
    examined: Examined,
) -> None:
    exact = [row for row in examined.document["terms"] if row["basis"] == "exact"]
    assert len(exact) >= 30
    for row in exact:
        assert row["measured_bytes"] == row["predicted_bytes"], row
    kinds = {row["name"] for row in exact}
    assert kinds == {"weights", "kv_cache", "recurrent_state"}


@on_linux
def test_bounds_hold_and_peaks_are_near(examined: Examined) -> None:
    """On the processor evaluation waits at the memory limit; a busy machine lets it overrun."""
    rows = [row for row in examined.document["terms"] if row["basis"] != "exact"]
    assert all(row["measured_bytes"] is not None for row in rows)
    late = [row for row in rows if not row["holds"]]
    assert len(late) <= 2, late
    for row in rows:
        if row["name"] == "peak":
            assert 0.9 < row["predicted_bytes"] / row["measured_bytes"] < 1.7, row


def test_the_calibration_has_bandwidth_and_overhead(examined: Examined) -> None:
    found = examined.document["calibration"]
    assert found["bandwidth_bytes_per_s"] > 10**9
    # Python with MLX, mlx-lm and transformers, and no model of any size.
    assert 30 << 20 < found["overhead_bytes"] < 2 << 30
    assert found["decode_bytes_per_s"] is None  # the model lies in the caches


def test_a_later_estimate_uses_the_calibration_and_names_it(examined: Examined) -> None:
    found = examined.document["calibration"]
    label = f"calibrated on this machine, {found['date']}"
    terms = {t["name"]: t for t in examined.after["terms"]}
    assert terms["runtime_context"]["size_bytes"] == found["overhead_bytes"]
    assert terms["runtime_context"]["source"] == label
    assert terms["runtime_context"]["basis"] == "fitted"
    machine = examined.after["machine"]
    assert any(label in note for note in machine["notes"])
    assert f"note: {label}" in examined.text
    assert machine["bandwidth_bytes_per_s"] == found["bandwidth_bytes_per_s"]
    assert examined.after["total_bytes"] == (
        examined.before["total_bytes"] + found["overhead_bytes"]
    )


def test_a_later_run_names_the_calibration_and_measures_what_it_added(examined: Examined) -> None:
    assert examined.run.returncode == 0, examined.run.stderr
    assert "note: calibrated on this machine" in examined.run.stderr
    ledger = json.loads(examined.run.stdout)["ledger"]
    terms = {t["name"]: t for t in ledger["terms"]}
    predicted, measured = (
        terms["runtime_context"][f"{k}_bytes"] for k in ("predicted", "measured")
    )
    assert predicted == examined.document["calibration"]["overhead_bytes"]
    assert predicted / 3 < measured < 3 * predicted
    rest = ledger["predicted_peak_bytes"] - predicted
    assert ledger["measured_peak_bytes"] - measured < rest + (1 << 20)
    assert terms["weights"]["predicted_bytes"] == terms["weights"]["measured_bytes"]


def test_the_calibration_leaves_every_other_term_as_it_was(examined: Examined) -> None:
    rest = [t for t in examined.after["terms"] if t["name"] != "runtime_context"]
    assert rest == examined.before["terms"]


def test_forgetting_the_calibration_gives_the_estimate_of_before(examined: Examined) -> None:
    assert examined.forgotten.returncode == 0
    assert "1 calibration" in examined.forgotten.stdout

    def told(document: dict[str, Any]) -> dict[str, Any]:
        """What does not change with the memory that other programs hold."""
        machine = {k: v for k, v in document["machine"].items() if k != "available_bytes"}
        changing = ("budget", "headroom", "machine", "max_batch")
        kept = {k: v for k, v in document.items() if not k.startswith(changing)}
        return kept | {"machine": machine}

    assert told(examined.reversed) == told(examined.before)


def test_the_bundle_has_no_name_and_no_path_of_this_machine(examined: Examined) -> None:
    text = examined.bundle_file.read_text(encoding="utf-8")
    words = set(re.findall(r"[\w.-]+", text.lower()))
    node = platform.node().lower()
    own = {getpass.getuser().lower(), node, node.partition(".")[0], Path.home().name.lower()}
    assert not words & (own - {""})
    assert "secret" not in text
    assert not re.search(r"[\s\"'(=:][/~]\w", text)
    assert not {"pid", "serial"} & words


def test_a_bundle_becomes_a_fixture_that_decodes_to_the_same_machine_and_a_row(
    examined: Examined, tmp_path: Path
) -> None:
    truth = tmp_path / "truth.csv"
    header = (ROOT / "uma/data/truth/inference.csv").read_text("utf-8").partition("\n")[0]
    truth.write_text(f"{header}\n", encoding="utf-8")
    script = [sys.executable, ROOT / "scripts" / "add_machine.py", examined.bundle_file]
    options = ["--folder", tmp_path, "--truth", truth, "--name", "made-here"]
    for added in ("1 rows", "0 rows"):
        done = subprocess.run([*script, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert added in done.stdout
    made = json.loads((tmp_path / "made-here.json").read_text(encoding="utf-8"))
    here = read_machine()
    for name, value in made["machine"].items():
        assert value == getattr(here, name), name
    (row,) = csv.DictReader(truth.read_text(encoding="utf-8").splitlines())
    assert row["rec_id"].startswith("doctor-made-here-")
    assert row["model"] == "local model"
    assert float(row["tg_tok_s"]) > 0
    weights = [t for t in examined.document["terms"] if t["name"] == "weights"]
    assert int(row["mem_weights"]) == weights[-1]["measured_bytes"]


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"kind": "?"}')):
        (tmp_path / name).write_text(text)
        script = [sys.executable, str(ROOT / "scripts" / "add_machine.py"), str(tmp_path / name)]
        done = subprocess.run(script, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


def test_quick_checks_alone_end_with_a_line_for_each(tmp_path: Path) -> None:
    done = uma(tmp_path, "doctor", "--quick")
    assert done.returncode == 0, done.stderr
    names = [line.split()[1] for line in done.stdout.splitlines() if line[:2] in ("ok", "no", "wa")]
    assert {"python", "packages", "versions", "memory", "disk", "hub", "device"} <= set(names)
    assert not list(tmp_path.rglob("*.json"))


def test_the_default_model_is_never_fetched_unasked(tmp_path: Path) -> None:
    """No model is here, and no index to fetch one from is asked."""
    from uma.cli.doctor import _with_model
    from uma.cli.options import RunOptions
    from uma.report.doctor import DoctorReport

    before = dict(os.environ)
    os.environ.update(environment(tmp_path))
    try:
        report = _with_model(RunOptions(), DoctorReport(read_machine(), {}, ()))
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert "--yes fetches it" in report.notes[0]
    assert report.trials == ()
    assert not list((tmp_path).rglob("*.gguf"))


def test_a_failed_check_is_an_exit_code(tmp_path: Path) -> None:
    from uma.report.doctor import DoctorReport

    report = DoctorReport(read_machine(), {}, (checks.Check("a", "warning", "b"),))
    assert not report.failed
    assert replace(report, checks=(checks.Check("a", "failure", "b"),)).failed
