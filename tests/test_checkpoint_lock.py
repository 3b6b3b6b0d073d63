"""The lock file of a download or conversion: one holder at a time, and no file left behind."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from uma.checkpoint.lock import locked

COUNT = """
import sys
from pathlib import Path
from uma.checkpoint.lock import locked
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(40):
    with locked(lock):
        value = int(counter.read_text())
        counter.write_text(str(value + 1))
"""

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps files that are open")


@posix
def test_no_lock_file_is_left_behind(tmp_path: Path) -> None:
    with locked(tmp_path / "cache" / "a.lock"):
        assert (tmp_path / "cache" / "a.lock").exists()
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "cache" / "a.lock"):
        _ = 1 / 0
    assert list((tmp_path / "cache").iterdir()) == []


def test_processes_that_remove_and_make_the_file_never_hold_it_together(
    tmp_path: Path,
) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    root = Path(__file__).parent.parent
    program = f"import uma.checkpoint.lock as l; l.POLL_S = 0.0005\n{COUNT}"
    command = [sys.executable, "-c", program, str(tmp_path / "a.lock"), str(counter)]
    processes = [subprocess.Popen(command, cwd=root) for _ in range(3)]
    assert [p.wait(60) for p in processes] == [0, 0, 0]
    assert counter.read_text() == "120"


@posix
def test_a_waiter_starts_over_when_the_file_it_waited_for_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    hold = f"""
import sys
from pathlib import Path
from uma.checkpoint.lock import locked
with locked(Path({str(path)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", hold],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    told = []

    def let_go() -> None:
        told.append(time.monotonic())
        assert holder.stdin is not None
        holder.stdin.close()

    with locked(path, let_go):
        assert path.exists()  # not the one that the holder removed
    assert len(told) == 1
    assert holder.wait(30) == 0
    holder.stdout.close()
