"""The lock of the heavy commands, held by real processes and released by killing them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from uma.errors import Busy
from uma.system.lock import heavy_command

HOLD = """
import sys, time
from pathlib import Path
from uma.system.lock import heavy_command
with heavy_command("uma run", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Another process that holds the lock of ``tmp_path``."""
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_command_is_told_who_holds_the_lock(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    with (
        pytest.raises(Busy, match=rf"uma run \(process {holder.pid}, since 2"),
        heavy_command("uma bench", tmp_path),
    ):
        pytest.fail("two commands held the lock")
    # The refused one has not blanked the holder's name.
    with pytest.raises(Busy, match=str(holder.pid)), heavy_command("uma bench", tmp_path):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killing_the_holder_releases_the_lock(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with heavy_command("uma bench", tmp_path) as note:
        assert note is None
        assert json.loads((tmp_path / "heavy.lock").read_text())["pid"] == os.getpid()


def test_a_file_that_names_a_living_process_without_a_lock_is_stale(tmp_path: Path) -> None:
    text = json.dumps({"pid": os.getppid(), "command": "uma run", "since": "2020-01-01 00:00:00"})
    (tmp_path / "heavy.lock").write_text(text)  # its number was reused by another program
    with heavy_command("uma bench", tmp_path) as note:
        assert note is None


def test_the_lock_can_be_had_again_after_the_block_and_after_an_error(tmp_path: Path) -> None:
    with heavy_command("uma run", tmp_path):
        pass
    with pytest.raises(ZeroDivisionError), heavy_command("uma run", tmp_path):
        _ = 1 / 0
    with heavy_command("uma run", tmp_path) as note:
        assert note is None


def test_waiting_queues_until_the_holder_ends(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    told: list[str] = []
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    started = time.monotonic()
    with heavy_command("uma bench", tmp_path, wait=True, on_wait=told.append) as note:
        assert time.monotonic() - started >= 0.5
        assert note is None
    timer.join()
    assert len(told) == 1
    assert str(holder.pid) in told[0]


def test_a_concurrent_run_can_be_allowed_and_is_noted(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    with heavy_command("uma bench", tmp_path, allow_concurrent=True) as note:
        assert note is not None
        assert str(holder.pid) in note
    with pytest.raises(Busy, match=str(holder.pid)), heavy_command("uma bench", tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_a_note_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with heavy_command("uma run", tmp_path / "file" / "state") as note:
        assert note is not None
        assert "no lock" in note


def test_a_cut_holder_text_still_refuses(tmp_path: Path, holder) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "heavy.lock").write_text('{"pid": 1')
    with pytest.raises(Busy, match="another uma command"), heavy_command("uma bench", tmp_path):
        pass
