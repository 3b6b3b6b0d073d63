"""What the folder of a run says of it, to a person and to a program."""

import errno
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.cli import main
from uma.errors import Busy, StorageError, UsageError
from uma.measurement import run_folder
from uma.measurement.run_folder import (
    Progress,
    State,
    append,
    events,
    held,
    is_held,
    read_state,
    state_text,
    write_json,
)
from uma.measurement.run_status import known_runs, read_status, remember
from uma.report.run_status import span, status_json, status_text
from uma.runtime.lora import supervise


def run(folder: Path, *more: dict[str, Any]) -> Path:
    """A run that has come to iteration 20 of 100, saved at 10, and then ``more``."""
    folder.mkdir()
    write_json(folder / "run.json", {"pid": 7, "iters": 100, "command": "uma lora train --resume"})
    for event in (
        {"event": "begin", "iteration": 0, "iters": 100},
        {"event": "train", "iteration": 10, "train_loss": 3.0, "memory_bytes": 1 << 30},
        {"event": "validation", "iteration": 10, "val_loss": 4.0, "best_val_loss": 3.5},
        {"event": "checkpoint", "iteration": 10, "best_iteration": 5},
        {"event": "train", "iteration": 20, "train_loss": 2.5, "left_s": 160.0},
        *more,
    ):
        append(folder, event)
    checkpoint = folder / "checkpoints" / "0000010"
    checkpoint.mkdir(parents=True)
    state = State(Progress(10, 999, 3.0, 4.0, 3.5, 5, 1), 5, {"a": 1}, {"b": 2})
    (checkpoint / "state.json").write_text(state_text(state))
    assert read_state(checkpoint) == state
    return folder


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    with held(folder):
        assert is_held(folder)
        status = read_status(folder)
        with pytest.raises(Busy, match="another process trains in"), held(folder):
            pass
    assert (status.how, status.iteration, status.iters, status.pid) == ("running", 20, 100, 7)
    assert (status.train_loss, status.val_loss, status.left_s) == (2.5, 4.0, 160.0)
    assert not status.can_continue
    text = status_text(status)
    assert "running (process 7), iteration 20 of 100" in text
    assert "3 min left" in text
    assert "continue:" not in text


def test_a_run_that_left_no_word_is_lost_and_says_what_is_left(tmp_path: Path) -> None:
    status = read_status(run(tmp_path / "run"))
    assert status.how == "lost"
    assert status.left_s is None
    text = status_text(status)
    assert "kept: the checkpoint of iteration 10" in text
    assert "continue: uma lora train --resume" in text
    document = json.loads(json.dumps(status_json(status)))
    assert document["state"] == "lost"
    assert document["checkpoint_iteration"] == 10
    assert document["best_val_loss"] == 3.5


def test_a_run_without_a_checkpoint_goes_on_from_the_beginning(tmp_path: Path) -> None:
    """``--resume`` would be refused."""
    folder = run(tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    status = read_status(folder)
    assert status.command == "uma lora train"
    assert "continue: uma lora train" in status_text(status)


@pytest.mark.parametrize(
    ("end", "line"),
    [
        ({"how": "done"}, "done, iteration 20"),
        ({"how": "failed", "text": "the loss is not finite"}, "the loss is not finite"),
        ({"how": "killed", "text": "The GPU ran out", "remedy": "less"}, "do: less"),
        ({"how": "patience"}, "no longer falls"),
        ({"how": "abandoned"}, "the process that started it was gone"),
        ({"how": "stopped", "best_iteration": 0}, "lowest 3.500 before training"),
    ],
)
def test_how_a_run_ended_is_told(tmp_path: Path, end: dict[str, str], line: str) -> None:
    status = read_status(run(tmp_path / "run", {"event": "end"} | end))
    assert status.how == end["how"]
    assert line in status_text(status)
    assert status.can_continue == (end["how"] != "done")


def test_a_line_that_was_cut_short_swallows_none_of_those_after_it(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"event": "train", "iter')
    append(folder, {"event": "train", "iteration": 30})
    assert [event["iteration"] for event in events(folder)][-2:] == [20, 30]


READ = ["iteration", "iters", "train_loss", "best_val_loss", "best_iteration", "left_s", "time"]
READ += ["memory_bytes", "peak_memory_bytes", "how", "text", "remedy", "plan"]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(READ),
            st.none() | st.text() | st.integers() | st.floats() | st.lists(st.none(), max_size=1),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["begin", "train", "end"]),
)
@settings(max_examples=60, deadline=None)
def test_a_damaged_log_still_says_how_the_run_stands(
    lines: list[dict[str, Any]], name: str
) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = run(Path(home, "run"))
        with (folder / "log.jsonl").open("a") as file:
            file.writelines(json.dumps({"event": name} | line) + "\n" for line in lines)
        status = read_status(folder)
        assert "kept: the checkpoint of iteration 10" in status_text(status)
        assert json.dumps(status_json(status))


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"command": 5}', '{"command": "\'"}', '{"iters": "many"}']
)
def test_a_damaged_run_json_says_no_command(tmp_path: Path, content: str) -> None:
    folder = run(tmp_path / "run")
    (folder / "run.json").write_text(content)
    shutil.rmtree(folder / "checkpoints")
    status = read_status(folder)
    assert (status.command, status.iteration) == (None, 20)
    assert status_text(status)


def test_a_disk_without_locks_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder, "try_lock", none)
    assert not is_held(run(tmp_path / "run"))
    with (
        pytest.raises(StorageError, match="cannot be locked: No locks available; give an --adapt"),
        held(tmp_path / "run"),
    ):
        pass


def test_what_a_resumed_run_says_is_of_its_last_begin(tmp_path: Path) -> None:
    end = {"event": "end", "how": "killed", "text": "gone"}
    begin = {"event": "begin", "iteration": 10, "iters": 100}
    status = read_status(run(tmp_path / "run", end, begin))
    assert (status.how, status.iteration, status.text) == ("lost", 10, "")
    assert status.train_loss == 3.0  # of the checkpoint


def test_a_damaged_checkpoint_is_not_said_to_be_kept(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    newer = folder / "checkpoints" / "0000020"
    newer.mkdir()
    (newer / "state.json").write_text("{")
    assert read_status(folder).checkpoint == 10


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run was begun in"):
        read_status(tmp_path)


def test_runs_are_found_from_any_folder_the_last_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UMA_STATE_DIR", str(tmp_path / "state"))
    assert main(["lora", "status"]) == 2
    assert "no run was begun on this machine" in capsys.readouterr().err
    known = tmp_path / "state" / "runs"
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    for folder in (first, second):
        remember(folder, known)
    append(first, {"event": "train", "iteration": 40})
    assert known_runs(known) == [first, second]
    assert main(["lora", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 40
    assert main(["lora", "status", "--all", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["run"] for one in runs] == [str(first), str(second)]
    assert main(["lora", "status", str(second)]) == 0
    assert "ended without a word" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"file/run cannot be written: Not a directory"),
        held(tmp_path / "file" / "run"),
    ):
        pass


def test_swap_that_grows_is_told_once_as_the_cause_of_slowness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx_lm.lora slows down and is stopped in the end, without a word of it (case E21)."""
    swap = iter(range(0, 1 << 40, 600 << 20))
    monkeypatch.setattr(supervise, "_swap_bytes", lambda: next(swap))
    monkeypatch.setattr(supervise, "SAMPLE_S", 0.05)
    code = "import time; time.sleep(0.4)"
    ended = supervise.run_child([sys.executable, "-c", code], allow_sleep=True)
    assert ended.samples.swap_growth_bytes > 2 << 30
    told = capsys.readouterr().err
    assert told.count("swap grew by 1.17 GiB") == told.count("swap grew") == 1


def test_times_are_in_the_unit_that_suits_them() -> None:
    assert [span(s) for s in (5, 600, 7200, 86400 * 3)] == ["5 s", "10 min", "2.0 h", "3.0 days"]
