"""Checkpoints that are whole or absent: adapter, optimizer, random state and place in the data."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.checkpoint.adapter import WEIGHTS
from uma.errors import CheckpointError, StorageError
from uma.measurement.run_folder import (
    CHECKPOINTS,
    OPTIMIZER,
    STATE,
    State,
    checkpoints,
    damaged,
    read_state,
    state_text,
)
from uma.runtime.lora.adapter import load_adapter, reason, sync

KEPT = 2


def save_checkpoint(
    run: Path, model: nn.Module, optimizer: Any, state: State, kept: int = KEPT
) -> Path:
    """Write a folder beside its final name, then rename it; all but the newest ``kept`` go.

    Raises:
        StorageError: If the disk is full or the folder cannot be written; former checkpoints stay.
    """
    final = run / CHECKPOINTS / f"{state.progress.iteration:07d}"
    partial = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial / WEIGHTS, dict(tree_flatten(model.trainable_parameters())))
        _write(partial / OPTIMIZER, dict(tree_flatten(optimizer.state)))
        (partial / STATE).write_text(state_text(state), encoding="utf-8")
        sync(partial / STATE)
        _replace(partial, final)
    except (OSError, RuntimeError) as error:
        why = reason(error, run)
        shutil.rmtree(partial, ignore_errors=True)
        rest = "earlier ones are kept" if checkpoints(run) else "there was none before it"
        raise StorageError(
            f"the checkpoint cannot be written to {final}: {why}; {rest}; put that right and go on"
        ) from error
    for old in checkpoints(run)[:-kept]:
        _remove(old)
    return final


def _replace(partial: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    _sync_folder(final.parent)


def _remove(old: Path) -> None:
    """Remove a checkpoint, its state first: what is left of it is then none."""
    with suppress(OSError):
        (old / STATE).unlink()
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    mx.save_safetensors(str(path), {k: v for k, v in arrays.items() if isinstance(v, mx.array)})
    sync(path)


def _sync_folder(path: Path) -> None:
    """Bring a new name in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
        raise CheckpointError(
            f"{checkpoint / OPTIMIZER} cannot be read: {error}; {damaged(checkpoint)}"
        ) from error
    optimizer.state = tree_unflatten(list(arrays.items()))
    mx.eval(model.trainable_parameters(), optimizer.state)
    mx.random.seed(read_state(checkpoint).random_state)
