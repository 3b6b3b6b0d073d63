"""The options of ``uma lora train``, and the command line that asks for the same."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uma.cli import main
from uma.cli.lora import supervise as lora_supervise
from uma.cli.lora import train as lora_train
from uma.cli.lora import work
from uma.cli.lora.asked import HANDED, Asked, arguments, handed, written
from uma.runtime.lora.supervise import PARENT


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from arguments to what would be trained."""
    found: list[Asked] = []
    monkeypatch.setattr(lora_train, "_dispatch", lambda asked: found.append(asked) or 0)

    def parsed(given: list[str]) -> Asked:
        assert main(given) == 0
        return found[-1]

    return parsed


def test_the_command_of_a_run_asks_for_the_same_from_any_folder(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "my data").mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--data", "my data", "--num-layers", "-1", "--keys", "a", "--keys", "b"]
    options += ["--learning-rate", "3e-4", "--packing", "--patience", "3", "--budget", "8GiB"]
    asked = parse(["lora", "train", "model", *options])
    given = arguments(asked, lora_train.defaults())
    monkeypatch.chdir("/")
    assert shlex.split(written(given)) == ["uma", *given]
    again = parse(given)
    here = {"model": str(tmp_path / "model"), "data": tmp_path / "my data"}
    assert again == replace(asked, **here, adapter_path=tmp_path / "adapters")


def test_the_command_of_a_run_says_what_a_variable_would_say_otherwise(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMA_BATCH_SIZE", "2")
    monkeypatch.setenv("UMA_EPOCHS", "3")
    asked = parse(["lora", "train", "--data", str(tmp_path), "--batch-size", "4", "--iters", "9"])
    again = parse(arguments(asked, lora_train.defaults()))
    assert (again.batch_size, again.iters, again.epochs) == (4, 9, None)


def test_what_is_asked_to_be_0_is_said_in_the_command(parse: Any, tmp_path: Path) -> None:
    options = ["--learning-rate", "0", "--scale", "0", "--warmup", "0", "--seed", "0"]
    asked = parse(["lora", "train", "--data", str(tmp_path), *options, "--max-grad-norm", "0"])
    assert asked.learning_rate == asked.scale == asked.max_grad_norm == 0
    again = parse(arguments(asked, lora_train.defaults()))
    assert replace(again, adapter_path=asked.adapter_path) == asked


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What a child is asked to train."""
    found: list[Asked] = []
    monkeypatch.setattr(work, "work", lambda asked, _: found.append(asked) or 0)
    return found


def test_a_child_gets_exactly_what_its_parent_made_of_all_settings(
    parse: Any, child: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option says false: what a file turns off, a variable would turn on again in the child."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("cosine = true\nno-wire = true\n")
    monkeypatch.setenv("UMA_CONFIG_DIR", str(tmp_path / "config"))
    file = tmp_path / "own.yaml"
    file.write_text("packing: false\ncosine: false\nauto_resume: false\nkeys: [a, b]\niters: 7\n")
    for name in ("PACKING", "AUTO_RESUME", "MASK_PROMPT"):
        monkeypatch.setenv(f"UMA_{name}", "1")
    monkeypatch.setenv("UMA_WARMUP", "50")
    options = ["-c", str(file), "--warmup", "0", "--adapter-path", str(tmp_path / "run")]
    asked = parse(["lora", "train", "--data", str(tmp_path), *options])
    assert not asked.packing
    assert not asked.cosine
    assert not asked.auto_resume
    assert asked.mask_prompt
    assert asked.no_wire
    monkeypatch.setenv(HANDED, handed(asked))
    monkeypatch.setenv(PARENT, "1")
    monkeypatch.setenv("UMA_ITERS", "3")
    assert main(["lora", "train"]) == 0
    assert child == [asked]


def test_detach_in_the_settings_does_not_speak_for_the_detached_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin another one, without an end."""
    begun: list[Asked] = []
    for name in ("detach", "supervise"):
        monkeypatch.setattr(lora_supervise, name, lambda asked: begun.append(asked) or 0)
    monkeypatch.setenv("UMA_DETACH", "1")
    supervise = lora_supervise.supervise
    monkeypatch.setattr(lora_supervise, "supervise", None)
    assert main(["lora", "train", "--data", str(tmp_path)]) == 0
    monkeypatch.setattr(lora_supervise, "supervise", supervise)
    monkeypatch.setattr(lora_supervise, "detach", None)
    monkeypatch.setenv(HANDED, handed(begun[0]))
    assert main(["lora", "train"]) == 0
    assert [one.detach for one in begun] == [True, True]


def test_sizes_are_read_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx_lm's own sizes fail on "8GiB" with a ``KeyError``, and take "26G" (case V30)."""
    for size in ("26", "26G", "much"):
        assert main(["lora", "train", "--data", str(tmp_path), "--budget", size]) == 2
        assert "--budget" in capsys.readouterr().err
