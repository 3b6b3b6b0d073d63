"""A run that is killed again and again ends where one that was left alone does.

``scripts/kill_lora.py`` does the same at twenty moments.
"""

from pathlib import Path
from typing import Any

import killed_run
import mlx.core as mx
import pytest
from models import saved_model

from uma.measurement.run_folder import checkpoints, events, read_state

ITERS = 40
POINTS = [
    "after the rename",
    "inside the adapter's write",
    "between adapter and optimizer",
    "in validation",
    killed_run.AT_RANDOM,
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("full", tmp_path_factory.mktemp("base") / "model", num_hidden_layers=2)


def tensors(folder: Path) -> dict[str, list[Any]]:
    return {k: v.tolist() for k, v in mx.load(str(folder / "adapters.safetensors")).items()}


def test_a_run_that_is_killed_five_times_ends_bit_for_bit_like_one_that_was_not(
    base: Path, tmp_path: Path
) -> None:
    """mlx_lm.lora writes numbered adapters without optimizer, random state or place in the data:
    after a crash it begins at iteration 1 and writes over them (case E12)."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    killed_run.train(base, whole, ITERS)
    done = []
    for point in POINTS:
        assert killed_run.killed(base, parts, ITERS, point, seconds=0.3) == -9, point
        kept = checkpoints(parts)
        done.append(read_state(kept[-1]).progress.iteration if kept else 0)
    assert done == sorted(done)
    assert 0 < done[-1] < ITERS
    result = killed_run.train(base, parts, ITERS)
    assert result.progress.iteration == ITERS
    assert tensors(parts) == tensors(whole)
    assert tensors(parts / "best") == tensors(whole / "best")
    one, other = (read_state(checkpoints(folder)[-1]).progress for folder in (whole, parts))
    assert (one.best_val_loss, one.best_iteration, one.worse) == (
        other.best_val_loss,
        other.best_iteration,
        other.worse,
    )
    assert events(parts)[-1]["event"] == "end"
