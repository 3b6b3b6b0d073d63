"""A disk that fills up in the middle of a run: one clear line, nothing lost, and on it goes."""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import killed_run
import mlx.core as mx
import pytest
from models import saved_model

from uma.errors import StorageError
from uma.measurement.run_folder import checkpoints
from uma.runtime.lora.adapter import save_adapter
from uma.runtime.lora.trackers import reporting

ITERS = 30
POINTS = {
    # what cannot be written: module, function, its call, what is said of it
    "the adapter of a checkpoint": ("checkpoint", "_write", 3, "0000020"),
    "the state of a checkpoint": ("checkpoint", "state_text", 2, "0000020"),
    "the adapter of the run": ("run", "save_adapter", 2, "adapter cannot be written"),
    "the best adapter": ("run", "save_adapter", 1, "best: "),
    "a line of the log": ("run", "append", 5, "log.jsonl cannot be written"),
    "run.json": ("run", "write_json", 1, "run.json cannot be written"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    killed_run.train(base, folder, ITERS)
    return folder


@contextlib.contextmanager
def limited() -> Iterator[Callable[[int], None]]:
    """No file grows beyond so many bytes, as on a full disk: Python ignores SIGXFSZ.

    Lifted before a test ends, for pytest's own output may be a file.
    """
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_limit_of_a_file_s_size_is_told_as_what_it_is(tmp_path: Path) -> None:
    """As a quota is: MLX says how many bytes it could not write, and not why."""
    with limited() as limit:
        limit(60 << 10)
        with pytest.raises(StorageError, match=r"cannot be written to \S+: File too large"):
            save_adapter(tmp_path, {"a": mx.zeros((64, 1024))}, {})
    assert list(tmp_path.iterdir()) == []


def at(monkeypatch: pytest.MonkeyPatch, point: str, do: Callable[[], None]) -> None:
    name, function, which, _ = POINTS[point]
    module: Any = importlib.import_module(f"uma.runtime.lora.{name}")
    before, calls = getattr(module, function), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == which:
            do()
        return before(*args, **kwargs)

    monkeypatch.setattr(module, function, call)


def equal(one: Path, other: Path) -> bool:
    files = ("adapters.safetensors", "best/adapters.safetensors")
    pairs = [(mx.load(str(one / f)), mx.load(str(other / f))) for f in files]
    return all(mx.array_equal(a[name], b[name]) for a, b in pairs for name in b)


@pytest.mark.parametrize("point", POINTS)
def test_what_cannot_be_written_is_named_and_what_was_saved_goes_on_to_the_same_end(
    base: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """mlx_lm.lora ends in a traceback, its newest file cut short under its final name."""
    run = tmp_path / "run"
    with limited() as limit:
        at(monkeypatch, point, lambda: limit(10))
        with pytest.raises(StorageError, match=POINTS[point][3]) as error:
            killed_run.train(base, run, ITERS)
    assert "\n" not in str(error.value)
    assert [c.name for c in checkpoints(run)] == (["0000010"] if POINTS[point][2] > 1 else [])
    assert not [path for path in run.rglob("*") if "partial" in path.name]
    monkeypatch.undo()
    assert killed_run.train(base, run, ITERS).progress.iteration == ITERS
    assert equal(run, whole)


def test_a_best_adapter_that_cannot_be_written_costs_no_training(
    base: Path, whole: Path, tmp_path: Path
) -> None:
    """A file stands for a folder that cannot be written: root may write into any."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "best").touch()
    with pytest.raises(StorageError, match="best: "):
        killed_run.train(base, run, ITERS)
    assert [c.name for c in checkpoints(run)] == ["0000010"]
    (run / "best").unlink()
    assert killed_run.train(base, run, ITERS).progress.iteration == ITERS
    assert equal(run, whole)


def test_a_disk_without_room_is_called_that(
    base: Path, whole: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX says "[write] Unable to write 8 bytes to file.", and not why."""
    filler = small_disk / "filler"

    def fill() -> None:
        file = os.open(filler, os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(file, b"x" * 4096):
                pass
        os.close(file)

    at(monkeypatch, "the adapter of a checkpoint", fill)
    with pytest.raises(StorageError, match="0000020: No space left on device; earlier ones are"):
        killed_run.train(base, small_disk / "run", ITERS)
    filler.unlink()
    killed_run.train(base, small_disk / "run", ITERS)
    assert equal(small_disk / "run", whole)


def test_an_event_file_without_room_is_left_out_and_ends_no_run(tmp_path: Path) -> None:
    told: list[str] = []
    event = {"event": "train", "iteration": 1, "train_loss": 1.0}
    reported = reporting(("tensorboard",), tmp_path, None, {}, told.append)
    with limited() as limit, reported as report:
        report(event)
        limit(100)
        for _ in range(3):
            report(event)
    assert len(told) == 2
    assert told[0].startswith("tensorboard takes no more reports: ")
    assert told[1].startswith("tensorboard did not end well: ")
