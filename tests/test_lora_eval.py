"""Losses of a model and of its adapter on sets of examples, against mlx-lm's own evaluation."""

import json
import math
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


@pytest.mark.parametrize("command", ["eval", "fuse", "import", "export"])
def test_a_folder_without_an_adapter_is_refused_before_anything_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [] if command == "eval" else ["-o", str(tmp_path / "new")]
    asked = ["lora", command, str(tmp_path / "none"), "--adapter-path", str(tmp_path), *more]
    assert main(asked) == 1
    assert "holds no adapter: it has no adapter_config.json" in capsys.readouterr().err
