"""The options of ``uma lora train``, and the command line that asks for the same."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uma.cli import main
from uma.cli.lora import supervise as lora_supervise
from uma.cli.lora import train as lora_train
from uma.cli.lora.asked import Asked, arguments, written
from uma.runtime.lora.supervise import DETACHED


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from arguments to what would be trained."""
    found: list[Asked] = []
    monkeypatch.setattr(lora_train, "_dispatch", lambda asked: found.append(asked) or 0)

    def parsed(given: list[str]) -> Asked:
        assert main(given) == 0
        return found[-1]

    return parsed


@pytest.mark.parametrize("full", [False, True])
def test_the_command_of_a_run_asks_for_the_same_from_any_folder(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "my data").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--data", "my data", "--num-layers", "-1", "--keys", "a", "--keys", "b"]
    options += ["--learning-rate", "3e-4", "--packing", "--patience", "3", "--budget", "8GiB"]
    asked = parse(["lora", "train", "model", *options])
    given = arguments(asked, {} if full else lora_train.defaults())
    monkeypatch.chdir("/")
    assert shlex.split(written(given)) == ["uma", *given]
    again = parse(given)
    here = {"model": str(tmp_path / "model"), "data": tmp_path / "my data"}
    assert again == replace(asked, **here, adapter_path=tmp_path / "adapters")


def test_no_variable_speaks_for_an_option_of_the_child(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = parse(["lora", "train", "--data", str(tmp_path), "--iters", "1000"])
    monkeypatch.setenv("UMA_ITERS", "50")
    assert parse(["lora", "train", "--data", str(tmp_path)]).iters == 50
    assert parse(arguments(asked)).iters == 1000


def test_what_is_asked_to_be_0_is_said_to_the_child(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--learning-rate", "0", "--scale", "0", "--warmup", "0", "--seed", "0"]
    asked = parse(["lora", "train", "--data", str(tmp_path), *options, "--max-grad-norm", "0"])
    assert asked.learning_rate == asked.scale == asked.max_grad_norm == 0
    for given in (arguments(asked, lora_train.defaults()), arguments(asked)):
        again = parse(given)
        assert replace(again, adapter_path=asked.adapter_path) == asked
    monkeypatch.setenv("UMA_WARMUP", "50")
    monkeypatch.setenv("UMA_DROPOUT", "0.5")
    assert replace(parse(arguments(asked)), adapter_path=asked.adapter_path) == asked


def test_detach_in_the_settings_does_not_speak_for_the_detached_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin another one, without an end."""
    begun = []
    for name in ("detach", "supervise"):
        monkeypatch.setattr(lora_supervise, name, lambda _, name=name: begun.append(name) or 0)
    monkeypatch.setenv("UMA_DETACH", "1")
    assert main(["lora", "train", "--data", str(tmp_path)]) == 0
    monkeypatch.setenv(DETACHED, "1")
    assert main(["lora", "train", "--data", str(tmp_path)]) == 0
    assert begun == ["detach", "supervise"]


def test_sizes_are_read_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx_lm's own sizes fail on "8GiB" with a ``KeyError``, and take "26G" (case V30)."""
    for size in ("26", "26G", "much"):
        assert main(["lora", "train", "--data", str(tmp_path), "--budget", size]) == 2
        assert "--budget" in capsys.readouterr().err
