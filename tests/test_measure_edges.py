"""``uma measure`` where things go wrong: full disks, hostile names, endless input, signals."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_measure import ROOT, UMA, document, measured, on_linux, on_terminal, posix

from uma.cli import main
from uma.cli.measure import bounded_text
from uma.measurement.gpu import no_gpu
from uma.measurement.process import linux_process_metrics
from uma.measurement.snapshot import read_snapshot
from uma.measurement.tree import ProcessTree, label
from uma.report.live import log_row
from uma.report.measure import processes_text
from uma.units import MIB, printable

HOSTILE = "a\x1b[31m\u202eb\nc"
SHOWN = r"a\x1b[31m\u202eb\nc"


def escaped(text: str) -> bool:
    """Whether nothing in ``text`` moves the cursor or turns the writing's direction."""
    return all(c.isprintable() or c == "\n" for c in text) and HOSTILE not in text


# --- names ----------------------------------------------------------------------------------


def test_a_name_of_a_process_cannot_write_to_the_terminal() -> None:
    assert label(HOSTILE, []) == SHOWN
    assert label("python3", ["python3", f"/tmp/{HOSTILE}"]) == f"python3 {SHOWN}"


@pytest.mark.parametrize("mark", ["\u202a", "\u202e", "\u2066", "\u2069", "\u200f", "\x9b", "\x07"])
def test_controls_of_direction_and_of_terminals_are_written_out(mark: str) -> None:
    assert printable(f"x{mark}y") == f"x{ascii(mark)[1:-1]}y"


def test_lines_of_a_text_stay_and_those_within_a_name_are_written_out() -> None:
    assert printable("a\n\tb") == "a\n\tb"
    assert printable("a\n\tb", kept="") == r"a\n\tb"


@on_linux
def test_a_hostile_program_is_shown_escaped_wherever_it_is_named(tmp_path: Path) -> None:
    program = tmp_path / HOSTILE
    program.symlink_to("/bin/sleep")
    during = measured("--during", "--", str(program), "0.1")
    assert during.stderr.startswith(f"{SHOWN}: 0.")
    assert escaped(during.stderr)
    missing = measured("--during", "--", f"{program}x")
    assert missing.returncode == 127
    assert f"{SHOWN}x: no such command" in missing.stderr
    assert escaped(missing.stderr)
    with subprocess.Popen([program, "30"]) as running:
        try:
            own = ["--pid", str(running.pid)]
            page, line = measured(*own), measured(*own, "--watch", "--count", "1")
        finally:
            running.kill()
    for done in (page, line):
        assert r"a\x1b[31m\u202eb\nc" in done.stdout
        assert escaped(done.stdout)


def test_the_line_that_shows_a_failure_cannot_write_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["measure", "--explain", "\x1b[31m\u202eGPU Hang"]) == 0
    assert r"shown by: \x1b[31m\u202eGPU Hang" in capsys.readouterr().out


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["nan", "-inf", "inf"])
def test_an_interval_that_is_no_number_is_refused(interval: str) -> None:
    done = measured("--watch", "--count", "2", "--interval", interval)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--interval" in done.stderr


def test_no_processes_are_shown_where_none_were_wanted() -> None:
    page = measured("--top", "0").stdout
    assert "could be read" not in page
    assert "\nprocesses" not in page
    assert "\nmemory\n" in page
    assert document("--top", "0")["processes"] == []


def test_a_figure_that_only_some_processes_lack_has_its_reason_below() -> None:
    whole = linux_process_metrics({"Rss": 4096, "Pss": 4096}, {"VmHWM": 4096})
    refused = linux_process_metrics({}, {"VmRSS": 4096, "VmHWM": 4096})
    trees = tuple(ProcessTree(pid, "a", (pid,), m) for pid, m in ((1, whole), (2, refused)))
    page = processes_text(replace(read_snapshot(largest=0), processes=trees, listed=True))
    reason = refused["footprint"].reason
    assert f"  footprint: smaps_rollup Pss; ? is unknown: {reason}\n" in page
    assert "  resident: smaps_rollup Rss\n" in page
    assert f"  swapped: unknown: {reason}\n" in page


# --- the log --------------------------------------------------------------------------------


def test_the_time_of_a_log_begins_with_the_watch(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    measured("--watch", "--count", "2", "--log", str(file), check=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["elapsed_s"] == 0
    assert rows[1]["elapsed_s"] == pytest.approx(1, abs=0.5)


def test_a_column_has_the_unit_of_its_figure_also_where_that_is_unknown() -> None:
    snapshot = replace(read_snapshot(largest=0), gpu=no_gpu())
    columns = {name for name in log_row(snapshot, snapshot.seconds) if name.startswith("gpu_")}
    assert columns == {
        "gpu_allocated_bytes",
        "gpu_in_use_bytes",
        "gpu_limit_bytes",
        "gpu_utilization_percent",
        "gpu_power_w",
        "gpu_cores",
        "gpu_recoveries",
    }


def test_a_log_that_is_there_stays_and_a_free_name_is_offered(tmp_path: Path) -> None:
    for name in ("memory.csv", "memory-2.csv"):
        (tmp_path / name).write_text("kept")
    done = measured("--watch", "--count", "1", "--log", str(tmp_path / "memory.csv"))
    assert done.returncode == 2
    assert f"--log {tmp_path / 'memory-3.csv'} is free" in done.stderr
    assert (tmp_path / "memory.csv").read_text() == "kept"
    free = tmp_path / "memory-3.csv"
    assert measured("--watch", "--count", "1", "--log", str(free)).returncode == 0


@posix
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_log_that_cannot_grow_ends_the_watch_with_its_name(tmp_path: Path, suffix: str) -> None:
    import resource

    file = tmp_path / f"memory.{suffix}"
    done = measured(
        *("--watch", "--count", "9", "--log", str(file)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
    )
    assert done.returncode == 1
    assert done.stderr == f"uma: --log {file}: File too large\n"


@on_linux
def test_a_full_disk_is_the_logs_or_the_outputs(tmp_path: Path) -> None:
    log = tmp_path / "memory.csv"
    log.symlink_to("/dev/full")  # open(..., "x") refuses it, so the file is swapped below
    program = (
        "import builtins, sys; from uma.cli import main; plain = open; "
        "builtins.open = lambda f, m='r', *a, **k: plain(f, m.replace('x', 'w'), *a, **k); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "measure", "--watch", "--count", "2", "--log", str(log)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, f"uma: --log {log}: No space left on device\n")
    with open("/dev/full", "w") as full:
        out = subprocess.run([*UMA], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (out.returncode, out.stderr) == (1, "uma: the output's disk is full\n")


@posix
def test_only_for_its_own_folders_other_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import uma.cli.app
    from uma.checkpoint.lock import locked

    assert main(["measure", "--watch", "--log", "/nonexistent/x.csv"]) == 1
    assert "UMA_CACHE_DIR" not in capsys.readouterr().err

    def fail(**arguments: object) -> None:
        with locked(tmp_path / "file" / "model.lock"):
            pass

    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setattr(uma.cli.app, "app", fail)
    for variable in ("UMA_CACHE_DIR", "UMA_STATE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "file"))
        assert main(["run"]) == 1
        assert f"  {variable} names another folder\n" in capsys.readouterr().err
        monkeypatch.delenv(variable)


# --- during ---------------------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize("status", [0, 3])
def test_a_report_that_cannot_be_written_leaves_the_commands_status(status: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*UMA, "--during", "--", "sh", "-c", f"exit {status}"], cwd=ROOT, stderr=full
        )
    assert done.returncode == status


@on_linux
def test_a_peak_that_was_sampled_is_an_estimate_and_one_that_the_kernel_kept_is_none() -> None:
    done = measured("--during", "--json", "--", "sleep", "0.3", check=True)
    tree = json.loads(done.stdout)["tree"]
    assert tree["footprint_peak"]["estimated"]
    assert "sampled" in tree["footprint_peak"]["source"]
    assert not tree["resident_peak"]["estimated"]
    machine = json.loads(done.stdout)["machine"]
    assert machine["wired_peak"]["estimated"]
    text = measured("--during", "--", "sleep", "0.3").stderr
    (line,) = [line for line in text.splitlines() if line.startswith("  footprint peak")]
    assert "  ~" in line


# --- watch ----------------------------------------------------------------------------------


@posix
def test_a_request_to_end_leaves_the_screen() -> None:
    with on_terminal([*UMA, "--watch"]) as terminal:
        terminal.wait_for("pressure")
        os.kill(terminal.child, signal.SIGTERM)
        screen = terminal.rest()
    assert screen.rstrip().endswith("\x1b[?25h\x1b[?1049l")
    assert terminal.status == 128 + signal.SIGTERM


# --- explain --------------------------------------------------------------------------------


def test_of_a_long_text_the_beginning_and_the_end_are_read() -> None:
    text = "begin" + "-" * (3 * MIB) + "end"
    found = bounded_text(io.StringIO(text))
    assert found.startswith("begin-")
    assert found.endswith("-end")
    assert len(found) == 2 * MIB + 1
    for length in (0, 5, MIB, MIB + 1, 2 * MIB):
        whole = "x" * length
        assert bounded_text(io.StringIO(whole)) == whole


def test_a_failure_at_the_end_of_a_large_file_is_explained_at_once(tmp_path: Path) -> None:
    file = tmp_path / "crash.log"
    with open(file, "wb") as written:
        written.seek(192 * MIB)  # zeros before, which take no room on most disks
        written.write(b"\nCaused GPU Hang Error\n")
    began = time.monotonic()
    with open(file, "rb") as given:
        done = measured("--explain", "-", stdin=given)
    assert done.returncode == 0
    assert done.stdout.startswith("cause: gpu hang\n")
    assert time.monotonic() - began < 10


@posix
def test_without_a_stdin_nothing_is_explained() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *UMA, "--explain", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
