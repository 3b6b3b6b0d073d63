"""Checkpoints that are whole or absent: adapter, optimizer, random state and place in the data."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.errors import CheckpointError, StorageError
from uma.runtime.lora.adapter import WEIGHTS, load_adapter, sync

FOLDER, OPTIMIZER, STATE = "checkpoints", "optimizer.safetensors", "state.json"
KEPT = 2


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands after ``iteration``; ``settings`` is what a resumed run must equal.

    ``environment`` is what the numbers depend on beside it: bit for bit only where it is the same.
    """

    iteration: int
    random_state: int
    trained_tokens: int
    settings: dict[str, Any]
    environment: dict[str, Any]


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: Any, state: State, kept: int = KEPT
) -> Path:
    """Write a folder beside its final name, then rename it; all but the newest ``kept`` go.

    Raises:
        StorageError: If the disk is full or the folder cannot be written; former checkpoints stay.
    """
    final = run / FOLDER / f"{state.iteration:07d}"
    partial = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial / WEIGHTS, dict(tree_flatten(model.trainable_parameters())))
        _write(partial / OPTIMIZER, dict(tree_flatten(optimizer.state)))
        text = json.dumps({name: getattr(state, name) for name in State.__slots__}, indent=1)
        (partial / STATE).write_text(text + "\n", encoding="utf-8")
        sync(partial / STATE)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"the checkpoint cannot be written to {final}: {error}; earlier ones are kept"
        ) from error
    for old in checkpoints(run)[:-kept]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    mx.save_safetensors(str(path), {k: v for k, v in arrays.items() if isinstance(v, mx.array)})
    sync(path)


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (run / FOLDER).glob("[0-9]" * 7)
    return sorted(path for path in found if (path / STATE).is_file())


def read_state(checkpoint: Path) -> State:
    """The state of a checkpoint.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        return State(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / STATE} cannot be read: {error}") from error


def restore(checkpoint: Path, model: nn.Module, optimizer: Any) -> None:
    """Put adapter, optimizer and random state back as they were.

    Raises:
        CheckpointError: If the adapter has other names or shapes, or a file cannot be read.
    """
    trained = dict(tree_flatten(model.trainable_parameters()))
    model.load_weights(list(load_adapter(checkpoint / WEIGHTS, trained).items()), strict=False)
    try:
        arrays: Any = mx.load(str(checkpoint / OPTIMIZER))
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / OPTIMIZER} cannot be read: {error}") from error
    optimizer.state = tree_unflatten(list(arrays.items()))
    mx.eval(model.trainable_parameters(), optimizer.state)
    mx.random.seed(read_state(checkpoint).random_state)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that differ, as ``name: was, is``."""
    names = sorted({*one, *other})
    return [
        f"{name}: was {one.get(name)}, is {other.get(name)}"
        for name in names
        if one.get(name) != other.get(name)
    ]
