"""Losses of a model and of its adapter on sets of examples, against mlx-lm's own evaluation."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.trainer import evaluate
from models import VOCAB_SIZE, saved_model
from test_lora_fuse import adapter

from uma.cli import main, session
from uma.dataset.examples import Example
from uma.errors import CheckpointError
from uma.measurement.run_folder import Progress, State, state_text
from uma.runtime.load import load
from uma.runtime.lora.evaluate import base_and_adapter, score, some

LENGTH = 40


def examples(count: int, length: int = LENGTH) -> list[Example]:
    rng = np.random.default_rng(0)
    rows = rng.integers(3, VOCAB_SIZE, (count, length)).tolist()
    return [Example(n, tuple(row), (True,) * length, {}) for n, row in enumerate(rows, start=1)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(base, tmp_path_factory.mktemp("adapter"), size=0.3)


def theirs(model: Any, rows: list[Example], batch_size: int) -> float:
    """mlx_lm's loss; without padding, the first of which it takes for a target."""
    data = [(list(e.tokens), 0) for e in rows]
    return float(evaluate(model, data, batch_size, -1, max_seq_length=LENGTH))


def test_losses_of_model_and_adapter_are_those_of_mlx_lm(base: Path, tuned: Path) -> None:
    rows = examples(8)
    before, after = base_and_adapter(load(base).model, {"test": rows}, tuned, 4)
    assert before["test"].loss == pytest.approx(theirs(load(base).model, rows, 4), rel=1e-5)
    adapted = theirs(load(base, adapter_path=tuned).model, rows, 4)
    assert after["test"].loss == pytest.approx(adapted, rel=1e-5)
    assert abs(before["test"].loss - adapted) > 0.01
    assert before["test"].perplexity == math.exp(before["test"].loss)
    assert before["test"].tokens == 8 * (LENGTH - 1)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_the_loss_does_not_depend_on_the_batch(base: Path, batch_size: int) -> None:
    """G2, V29: mlx_lm 0.32.2 stops at fewer rows than a batch, and leaves out the last batch."""
    rows = [*examples(4), *examples(3, 9)]
    model = load(base).model
    apart = [score(model, [row], 1) for row in rows]
    whole = score(model, rows, batch_size)
    mean = sum(s.loss * s.tokens for s in apart) / sum(s.tokens for s in apart)
    assert whole.loss == pytest.approx(mean, rel=1e-5)
    assert (whole.rows, whole.tokens) == (7, 4 * 39 + 3 * 8)
    with pytest.raises(ValueError, match="at least batch_size=16"):
        theirs(model, rows, 16)


def test_more_batches_take_no_more_memory(base: Path) -> None:
    """E10, V23: sums that are evaluated at the end hold every batch until then."""
    model = load(base).model
    peaks = []
    for count in (4, 64):
        mx.clear_cache()
        mx.reset_peak_memory()
        score(model, examples(count), 2)
        peaks.append(mx.get_peak_memory())
    assert peaks[1] < 1.02 * peaks[0]


def test_some_rows_are_drawn_from_all_and_always_the_same() -> None:
    rows = examples(50)
    chosen = some(rows, 10)
    assert len({e.line for e in chosen}) == 10
    assert max(e.line for e in chosen) > 25
    assert some(rows, 10) == chosen
    assert some(rows, None) is rows


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    other = saved_model("full", tmp_path / "other", hidden_size=32)
    with pytest.raises(CheckpointError, match="cannot be used"):
        base_and_adapter(load(base).model, {}, adapter(other, tmp_path / "adapter"), 1)


def test_an_adapter_that_is_not_finite_is_refused_wherever_it_is_loaded(
    base: Path, tmp_path: Path
) -> None:
    bad = adapter(base, tmp_path / "adapter", size=math.nan)
    with pytest.raises(CheckpointError, match="lora_b holds numbers that are not finite"):
        base_and_adapter(load(base).model, {}, bad, 1)
    with pytest.raises(CheckpointError, match="lora_b holds numbers that are not finite"):
        load(base, adapter_path=bad)


def test_the_command_prints_both_and_as_json(
    base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        row = json.dumps({"text": f"the quick {name} fox"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(row * 3)
    command = ["lora", "eval", str(base), "--data", str(tmp_path), "--adapter-path", str(tuned)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["splits"]) == ["test"]
    test = found["splits"]["test"]
    assert test["rows"] == 3
    assert test["loss_change"] == test["adapter"]["loss"] - test["base"]["loss"]
    assert main([*command, "--split", "train", "--rows", "2"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "rows tokens loss perplexity with adapter perplexity change"
    assert row.split()[:2] == ["train", "2"]
    assert main([*command, "--split", "valid"]) == 1
    assert "has no valid.jsonl" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = session.live_machine()
    monkeypatch.setattr(session, "live_machine", lambda: replace(here, limit_bytes=1 << 20))
    (tmp_path / "test.jsonl").write_text('{"text": "the quick fox"}\n')
    command = ["lora", "eval", str(base), "--data", str(tmp_path)]
    assert main(command) == 3
    assert "and the limit is 1.0 MiB" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_the_numbers_of_other_tokens_than_those_that_were_trained_are_told_as_such(
    base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tuned, run / "best")
    checkpoint = run / "checkpoints" / "0000010"
    checkpoint.mkdir(parents=True)
    settings = {"mask_prompt": True, "max_seq_length": 2048, "overlong": "truncate"}
    (checkpoint / "state.json").write_text(state_text(State(Progress(10), 5, settings, {})))
    (tmp_path / "test.jsonl").write_text('{"prompt": "the quick", "completion": "fox"}\n')
    command = ["lora", "eval", str(base), "--data", str(tmp_path)]
    command += ["--adapter-path", str(run / "best")]
    assert main(command) == 0
    told = "note: in training mask_prompt: was True, is False here"
    assert told in capsys.readouterr().err.splitlines()
    assert main([*command, "--mask-prompt"]) == 0
    assert "in training" not in capsys.readouterr().err


def test_the_file_of_a_training_run_says_what_to_check_and_what_to_evaluate(
    base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = '{"prompt": "the quick", "completion": "fox"}\n'
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(row)
    asked = {"model": str(base), "data": str(tmp_path), "adapter_path": str(tuned), "train": True}
    asked |= {"mask_prompt": True, "iters": 50, "lora_parameters": {"rank": 4}, "seed": 7}
    file = tmp_path / "lora.yaml"
    file.write_text(json.dumps(asked))
    assert main(["lora", "check", "-c", str(file), "--json"]) == 0
    split = json.loads(capsys.readouterr().out)["splits"]["test"]
    assert split["supervised_tokens"] < split["tokens"] - 1
    assert main(["lora", "eval", "-c", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapter_path"] == str(tuned)
    assert found["splits"]["test"]["tokens"] == split["supervised_tokens"]
    file.write_text(json.dumps(asked | {"mask_promt": True}))
    assert main(["lora", "check", "-c", str(file)]) == 2
    assert "did you mean mask_prompt?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["lora eval", "run"])
def test_what_is_wrong_with_an_adapter_is_told_alike_before_anything_is_loaded(
    command: str, base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test.jsonl").write_text('{"text": "the quick fox"}\n')
    folder = tmp_path / "adapter"
    shutil.copytree(tuned, folder)
    more = ["--data", str(tmp_path)] if command == "lora eval" else ["hello"]

    def refused(path: Path) -> str:
        assert main([*command.split(), str(base), *more, "--adapter-path", str(path)]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    config, weights = folder / "adapter_config.json", folder / "adapters.safetensors"
    assert f"is a file; give the folder that holds it: {folder}" in refused(weights)
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert "copy the adapter again, or train it again" in refused(folder)
    weights.unlink()
    assert "holds no adapter: it has no adapters.safetensors" in refused(folder)
    weights.write_bytes(content)
    config.write_text("{")
    assert f"{config} cannot be read" in refused(folder)


@pytest.mark.parametrize("command", ["eval", "fuse", "import", "export"])
def test_a_folder_without_an_adapter_is_refused_before_anything_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if command == "eval" else ["-o", str(tmp_path / "new")]
    asked = ["lora", command, str(tmp_path / "none"), "--adapter-path", str(tmp_path), *more]
    assert main(asked) == 1
    assert "holds no adapter: it has no adapter_config.json" in capsys.readouterr().err
