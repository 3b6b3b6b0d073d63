"""``uma measure`` and ``uma.measurement``, run on this machine."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import uma
from uma.cli import main
from uma.units import GIB, MIB

ROOT = Path(__file__).parent.parent
UMA = [sys.executable, "-m", "uma", "measure"]
TOUCH = "import sys; b = bytearray(int(sys.argv[1])); b[::4096] = b'1' * len(b[::4096])"
posix = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def measured(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*UMA, *arguments], cwd=ROOT, capture_output=True, text=True, **more)


def document(*arguments: str) -> dict[str, Any]:
    done = measured(*arguments, "--json", check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the page -------------------------------------------------------------------------------


def metrics(value: object) -> Iterator[dict[str, Any]]:
    """Every METRIC of a document."""
    if isinstance(value, dict):
        if "unit" in value:
            yield value
        for item in value.values():
            yield from metrics(item)
    elif isinstance(value, list):
        for item in value:
            yield from metrics(item)


def test_the_document_keeps_its_contract() -> None:
    found = document("--top", "3")
    assert {"schema_version", "machine", "memory", "gpu", "processes", "mlx", "findings"} <= set(
        found
    )
    rows = list(metrics(found))
    assert len(rows) > 30
    for row in rows:
        assert set(row) == {"value", "unit", "source", "estimated", "reason"}
        assert (row["value"] is None) == (row["reason"] is not None), row
        assert row["source"] or row["reason"]
        if row["unit"] == "bytes" and row["value"] is not None:
            assert isinstance(row["value"], int)
    assert len(found["processes"]) == 3
    assert found["machine"]["budget_source"]


def test_the_page_has_every_section_and_a_source_or_a_reason_for_each_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["measure", "--top", "2"]) == 0
    page = capsys.readouterr().out
    for title in ("memory", "GPU", "processes that hold most", "MLX in this process", "findings"):
        assert f"\n{title}\n" in page
    for line in page.splitlines():
        if line.rstrip().endswith("?") and "; ? is unknown: " not in page:
            pytest.fail(f"unknown without a reason: {line}")
    assert " GiB" in page
    assert " GB " not in page.replace("GB/s", "")


def test_a_process_is_shown_with_all_that_it_started() -> None:
    script = f'{sys.executable} -c "{TOUCH}; print(1, flush=True); sys.stdin.read()" {96 * MIB}'
    with subprocess.Popen(
        ["sh", "-c", script + "; true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        try:
            (tree,) = document("--pid", str(shell.pid))["processes"]
        finally:
            shell.communicate()
    assert tree["processes"] == 2
    assert tree["pid"] == shell.pid
    assert tree["resident"]["value"] > 96 * MIB
    assert not any(str(96 * MIB) in str(text) for text in (tree["name"],))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pid", "999999999"], "there is no process 999999999"),
        (["--name", "no such program"], "no process has 'no such program'"),
        (["--during"], "--during -- python a.py"),
        (["--during", "sleep", "1"], "--during -- python a.py"),
        (["--", "sleep", "1"], "--during -- python a.py"),
        (["--watch", "--during", "--", "true"], "choose one"),
        (["--count", "2"], "of --watch"),
        (["--watch", "--log", "a.txt"], ".csv or .jsonl"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_look_more_often_than_once_a_second_is_refused() -> None:
    assert measured("--watch", "--interval", "0.5").returncode == 2


# --- during ---------------------------------------------------------------------------------


@on_linux
def test_the_peak_of_a_child_that_touches_one_gib_is_right_within_one_percent(
    tmp_path: Path,
) -> None:
    """Against the child's own account of itself, at its end, and against the size it asked for."""
    told = tmp_path / "peak"
    program = (
        f"{TOUCH}; del b; s = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]; "
        "open(sys.argv[2], 'w').write(s)"
    )
    child = [sys.executable, "-S", "-E", "-c", program, str(GIB), str(told)]
    found = json.loads(measured("--during", "--json", "--", *child, check=True).stdout)
    peak = found["tree"]["resident_peak"]["value"]
    assert peak == pytest.approx(int(told.read_text()) * 1024, rel=0.01)
    assert peak == pytest.approx(GIB + 10 * MIB, rel=0.01)  # Python itself takes about 10 MiB


@on_linux
def test_a_peak_between_two_samples_is_not_lost() -> None:
    """The child frees its memory at once and ends: only the kernel's mark still shows it."""
    program = f"{TOUCH}; del b"
    child = [sys.executable, "-S", "-E", "-c", program, str(256 * MIB)]
    found = json.loads(measured("--during", "--json", "--", *child, check=True).stdout)
    assert found["tree"]["resident_peak"]["value"] > 256 * MIB


def test_a_small_command_is_not_charged_with_what_measures_it() -> None:
    found = json.loads(measured("--during", "--json", "--", "sleep", "0.3", check=True).stdout)
    assert found["tree"]["resident_peak"]["value"] < 8 * MIB
    assert found["elapsed_s"] == pytest.approx(0.3, abs=0.2)


@posix
@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("sleep 0.2; exit 3", 3), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
)
def test_the_exit_status_is_the_commands_own(script: str, status: int) -> None:
    done = measured("--during", "--", "sh", "-c", script)
    assert done.returncode == status
    assert ("peaks of its processes together" in done.stderr) or "it ended before" in done.stderr


@posix
def test_a_command_that_cannot_be_started_has_the_status_that_shells_give(tmp_path: Path) -> None:
    assert measured("--during", "--", "no-such-command").returncode == 127
    (tmp_path / "plain").write_text("")
    done = measured("--during", "--", str(tmp_path / "plain"))
    assert done.returncode == 126
    assert "may not be run" in done.stderr


@posix
def test_the_commands_streams_and_options_stay_its_own() -> None:
    script = 'read line; echo "out $line $1"; echo err >&2'
    done = measured("--during", "--", "sh", "-c", script, "sh", "--json", input="in\n")
    assert done.stdout == "out in --json\n"
    assert done.stderr.startswith("err\n")


@posix
def test_with_json_stdout_is_one_document_and_the_commands_output_goes_to_stderr() -> None:
    done = measured("--json", "--during", "--", "sh", "-c", "echo words; exit 4")
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"], found["command"]) == (4, 4, "sh")
    assert done.stderr == "words\n"
    assert all(row["reason"] or row["value"] is not None for row in metrics(found))


COUNT_INTERRUPTS = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *a: seen.append(1))
print("ready", flush=True)
end = time.monotonic() + 1.0
while time.monotonic() < end:
    time.sleep(0.05)
print("seen", len(seen), flush=True)
sys.exit(5)
"""


@posix
def test_an_interrupt_sent_to_uma_alone_reaches_the_command_once() -> None:
    with subprocess.Popen(
        [*UMA, "--during", "--", sys.executable, "-c", COUNT_INTERRUPTS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
    assert (rest, running.returncode) == ("seen 1\n", 5)


@posix
def test_a_key_on_the_terminal_reaches_the_command_once() -> None:
    program = (
        "import os, sys, uma.measurement.command as command; passed = []; "
        "os.kill = lambda *signal: passed.append(signal); "
        "found = command.measure_command(sys.argv[1:]); "
        "print('passed on', len(passed), 'status', found.status)"
    )
    command = [sys.executable, "-c", program, sys.executable, "-c", COUNT_INTERRUPTS]
    with on_terminal(command) as terminal:
        terminal.wait_for("ready")
        os.write(terminal.master, b"\x03")
        output = terminal.rest()
    assert "seen 1" in output
    assert "passed on 0 status 5" in output


@posix
def test_a_request_to_end_reaches_the_command() -> None:
    with subprocess.Popen(
        [
            *UMA,
            "--during",
            "--",
            "sh",
            "-c",
            "trap 'echo ended; exit 9' TERM; echo up; sleep 30 & wait",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.terminate()
        first = running.stdout.readline()
    assert (first, running.returncode) == ("ended\n", 9)


# --- watch ----------------------------------------------------------------------------------


class Terminal:
    """A program on a terminal of its own: what it wrote, and its status after the end."""

    def __init__(self, child: int, master: int) -> None:
        self.child, self.master, self.seen = child, master, b""
        self.status: int | None = None

    def wait_for(self, word: str) -> None:
        while word.encode() not in self.seen:
            self.seen += os.read(self.master, 65536)

    def rest(self) -> str:
        try:
            while block := os.read(self.master, 65536):
                self.seen += block
        except OSError:  # the other end is closed
            pass
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        return self.seen.decode()


@contextmanager
def on_terminal(command: list[str]) -> Iterator[Terminal]:
    import pty

    child, master = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "PYTHONUTF8": "1"}
        os.execv(command[0], command)
    terminal = Terminal(child, master)
    try:
        yield terminal
    finally:
        terminal.rest()
        os.close(master)


def test_in_a_pipe_each_look_is_a_line() -> None:
    began = time.monotonic()
    done = measured("--watch", "--count", "2", "--pid", str(os.getpid()), check=True)
    assert time.monotonic() - began >= 1.0
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "reclaimable " in line
        assert f"({os.getpid()})" in line


def test_a_log_has_a_row_for_each_look_and_the_same_columns(tmp_path: Path) -> None:
    file = tmp_path / "memory.csv"
    measured("--watch", "--count", "2", "--log", str(file), check=True)
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 2
    assert None not in rows[0]
    assert int(rows[0]["total_bytes"]) > GIB
    assert float(rows[1]["elapsed_s"]) - float(rows[0]["elapsed_s"]) == pytest.approx(1, abs=0.5)
    assert measured("--watch", "--count", "1", "--log", str(file)).returncode == 2


def test_a_log_and_stdout_of_json_lines_have_numbers_and_null(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    own = ["--pid", str(os.getpid())]
    done = measured("--watch", "--count", "1", "--log", str(file), "--json", *own, check=True)
    (found,) = map(json.loads, done.stdout.splitlines())
    assert found["schema_version"] == 1
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row[f"process_{os.getpid()}_resident_bytes"] > MIB
    assert row["pressure"] in ("normal", "warning", "critical", None)


@posix
def test_a_watch_ends_with_the_process_that_it_watches() -> None:
    with subprocess.Popen(["sleep", "1.5"]) as sleeping:
        done = measured("--watch", "--pid", str(sleeping.pid), timeout=30)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) in (1, 2, 3)


@posix
def test_on_a_terminal_there_is_a_screen_with_sparklines_that_is_left_again() -> None:
    with on_terminal([*UMA, "--watch", "--count", "2"]) as terminal:
        screen = terminal.rest()
    assert screen.startswith("\x1b[?1049h")
    assert screen.rstrip().endswith("\x1b[?1049l")
    assert any(mark in screen for mark in "▁▂▃▄▅▆▇█")
    assert terminal.status == 0


@posix
def test_ctrl_c_ends_a_watch_and_leaves_the_screen() -> None:
    with on_terminal([*UMA, "--watch"]) as terminal:
        terminal.wait_for("pressure")
        os.write(terminal.master, b"\x03")
        screen = terminal.rest()
    assert screen.rstrip().endswith("\x1b[?1049l")
    assert terminal.status == 130


# --- explain --------------------------------------------------------------------------------

FAILED = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPU...)"


def test_a_pasted_error_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--explain", FAILED]) == 0
    page = capsys.readouterr().out
    assert page.startswith("cause: interactivity\n")
    assert "\ndo: " in page


def test_an_error_from_a_file_is_explained_as_json() -> None:
    done = measured("--explain", "-", "--json", input=f"line\n{FAILED}\n")
    assert json.loads(done.stdout)["explanation"]["cause"] == "interactivity"


def test_what_is_not_known_is_not_guessed_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--explain", "KeyError: 'a'"]) == 1
    assert capsys.readouterr().out == ""


def test_an_error_of_metal_in_any_command_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import uma.cli.app

    def fail(**arguments: object) -> None:
        raise RuntimeError(FAILED)

    monkeypatch.setattr(uma.cli.app, "app", fail)
    assert main(["run"]) == 1
    assert "\n  do: Let the display sleep" in capsys.readouterr().err
    monkeypatch.setattr(uma.cli.app, "app", lambda **arguments: {}["bug"])
    with pytest.raises(KeyError):
        main(["run"])


# --- the library ----------------------------------------------------------------------------


@on_linux
def test_any_code_is_measured_by_a_with_block() -> None:
    with uma.measurement.measure(interval_s=0.01) as run:
        block = bytearray(128 * MIB)
        block[::4096] = b"1" * len(block[::4096])
        time.sleep(0.1)
        del block
    record = run.record
    assert record.seconds >= 0.1
    assert record.samples >= 3
    assert record.tree["footprint_peak"].size > 128 * MIB
    assert abs(record.tree["footprint_change"].size) < 64 * MIB
    assert record.machine["reclaimable_low"].size > 0
    with pytest.raises(FrozenInstanceError):
        record.seconds = 0.0


def test_an_error_in_the_block_is_raised_and_measured() -> None:
    with pytest.raises(ZeroDivisionError), uma.measurement.measure() as run:
        raise ZeroDivisionError
    assert run.record.samples >= 1


def test_mlxs_counters_are_taken_where_it_is_loaded() -> None:
    mx = pytest.importorskip("mlx.core")
    with uma.measurement.measure() as run:
        array = mx.ones((4 * MIB,))
        mx.eval(array)
    assert run.record.mlx["active"].size >= 16 * MIB
    assert run.record.mlx["peak"].size >= run.record.mlx["active"].size


def test_without_mlx_its_counters_are_unknown() -> None:
    program = (
        "from uma.measurement import measure\n"
        "with measure() as run: pass\n"
        "import sys\n"
        "print(run.record.mlx['active'].reason); print('mlx' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("MLX is not loaded")
    assert done.stdout.endswith("False\n")


def test_the_package_brings_its_parts_only_when_they_are_used() -> None:
    program = "import sys, uma; print(len([m for m in sys.modules if m.startswith('uma')]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    with pytest.raises(AttributeError, match="nothing"):
        uma.nothing  # noqa: B018
