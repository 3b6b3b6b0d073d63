"""Options of ``uma lora train`` that contradict each other, and places where no run can be."""

from pathlib import Path
from typing import Any

import pytest

from uma.cli import main
from uma.cli.lora import train as lora_train
from uma.cli.lora.asked import Asked
from uma.cli.lora.doubts import doubts
from uma.cli.lora.work import _line
from uma.cli.progress import SHOWN, progress


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function from options to what would be trained."""
    found: list[Asked] = []
    monkeypatch.setattr(lora_train, "_dispatch", lambda asked: found.append(asked) or 0)
    monkeypatch.chdir(tmp_path)

    def parsed(*given: str) -> Asked:
        assert main(["lora", "train", "--data", "data", *given]) == 0
        return found[-1]

    return parsed


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(["lora", "train", "--data", "data", *given]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ("--epochs", "2", "--iters", "5"),
        ("--lr-schedule", '{"name": "cosine_decay", "arguments": [1, 2]}', "--warmup", "5"),
        ("--lr-schedule", '{"name": "cosine_decay", "arguments": [1, 2]}', "--learning-rate", "1"),
        ("--fine-tune-type", "full", "--rank", "4"),
        ("--fine-tune-type", "full", "--keys", "self_attn.q_proj"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, *given)
    assert given[0] in told
    assert given[2] in told


def test_a_seed_that_mlx_does_not_take_is_refused(
    parse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse("--seed", str(2**64 - 1)).seed == 2**64 - 1
    assert "--seed" in refused(capsys, "--seed", str(2**64))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), None),
        (("--warmup", "4", "--iters", "10"), None),
        (("--warmup", "5", "--iters", "10"), "--warmup 5 is not over after the 5 updates"),
        (("--learning-rate", "0"), "with --learning-rate 0 nothing is trained"),
        (("--max-grad-norm", "0"), "with --max-grad-norm 0 nothing is trained"),
        (("--scale", "0"), "with --scale 0 the adapter does nothing"),
        (("--scale", "1e30"), "--scale 1e+30 is far from usual"),
    ],
)
def test_settings_of_which_nothing_is_learned_are_told(
    parse: Any, given: tuple[str, ...], told: str | None
) -> None:
    asked = parse("--grad-accumulation-steps", "2", *given)
    found = list(doubts(asked, (asked.iters or 0) // 2))
    assert [line[: len(told or "")] for line in found] == ([told] if told else [])


def test_a_validation_is_compared_with_the_untouched_model() -> None:
    event = {"event": "validation", "iteration": 10, "val_loss": 2.86, "best_val_loss": 2.439}
    line = "iteration 10: validation loss 2.860"
    assert _line(event | {"best_iteration": 0}) == f"{line}, above the 2.439 of the untouched model"
    assert _line(event | {"best_iteration": 10}) == f"{line}, the lowest"
    assert _line(event | {"best_iteration": 5}) == line
    first = event | {"iteration": 0, "best_iteration": 0}
    assert _line(first) == "iteration 0: validation loss 2.860 of the untouched model"


def test_of_epochs_and_iters_the_one_that_is_set_nearer_counts(
    parse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def length(*given: str) -> tuple[int | None, int | None]:
        asked = parse(*given)
        return asked.iters, asked.epochs

    file = tmp_path / "own.yaml"
    assert length() == (1000, None)
    assert length("--epochs", "2") == (None, 2)
    file.write_text("iters: 50\n")  # as every file for mlx_lm.lora has
    assert length("-c", str(file), "--epochs", "2") == (None, 2)
    monkeypatch.setenv("UMA_EPOCHS", "9")
    assert length() == (None, 9)
    assert length("-c", str(file)) == (50, None)
    assert length("-c", str(file), "--iters", "7") == (7, None)
    file.write_text("epochs: 3\n")
    assert length("-c", str(file), "--iters", "7") == (7, None)
    monkeypatch.setenv("UMA_ITERS", "8")
    assert length("-c", str(file)) == (None, 3)
    assert "--epochs takes the place of --iters" in refused(capsys)
    file.write_text("epochs: 3\niters: 4\n")
    assert "--epochs takes the place of --iters" in refused(capsys, "-c", str(file))


def test_a_flag_counts_beside_the_schedule_of_a_file(parse: Any, tmp_path: Path) -> None:
    """In mlx_lm.lora's own files learning rate and schedule stand beside each other."""
    file = tmp_path / "own.yaml"
    file.write_text("learning_rate: 2.0\nlr_schedule: {name: cosine_decay, arguments: [1, 2]}\n")
    assert parse("-c", str(file)).lr_schedule
    asked = parse("-c", str(file), "--learning-rate", "3")
    assert (asked.learning_rate, asked.lr_schedule) == (3, None)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--detach"]])
def test_a_place_where_no_run_can_be_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("dead").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    for name, content in (("model", "config.json"), ("data", "train.jsonl")):
        Path(name).mkdir()
        Path(name, content).write_text("{}")
    for place, text, code in [
        ("file", "file is a file or a dead link; give a folder as --adapter-path", 2),
        ("dead", "dead is a file or a dead link", 2),
        ("file/below", "file/below cannot be written: Not a directory", 1),
        ("loop", "loop cannot be written: Too many levels of symbolic links", 1),
        ("x" * 300, "cannot be written: File name too long", 1),
        ("model", "model is the folder of a model", 2),
        ("data", "data is the folder of a data set", 2),
    ]:
        command = ["lora", "train", "no-such-model", "--data", "data", "--adapter-path", place]
        assert main([*command, *more]) == code
        assert text in capsys.readouterr().err
    assert sorted(p.name for p in Path("model").iterdir()) == ["config.json"]


@pytest.mark.parametrize("shown", ["1", ""])
def test_a_child_shows_its_progress_where_its_parent_has_a_terminal(
    shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SHOWN, shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress("loading layers") as show:
        show(3, 30)
    assert ("loading layers: 3 of 30" in capsys.readouterr().err) is bool(shown)
