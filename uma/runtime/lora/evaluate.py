"""Losses of a model on sets of examples, without and with an adapter."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from uma.dataset.batches import batch_plan
from uma.dataset.examples import Example
from uma.dataset.score import Score
from uma.runtime.load import add_adapter
from uma.runtime.lora.batching import batch_of
from uma.runtime.lora.step import loss_of

Progress = Callable[[int, int], None]


def score(
    model: nn.Module,
    examples: Sequence[Example],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Score:
    """The loss of every supervised token of ``examples``, each of equal weight.

    Batches are of like length, so that little is padded; that does not change the result.
    """
    plan = batch_plan([len(e.tokens) for e in examples], batch_size, seed=0, epoch=0)
    total, tokens = 0.0, 0
    model.eval()
    for done, batch in enumerate(plan, start=1):
        value: Any = loss_of(model, batch_of([[examples[n]] for n in batch])).item()
        total += float(value)
        tokens += sum(examples[n].targets for n in batch)
        progress(done, len(plan))
    return Score(total / tokens if tokens else math.nan, tokens, len(examples))


def some(examples: Sequence[Example], rows: int | None) -> Sequence[Example]:
    """At most ``rows`` of the examples, drawn alike from all of them, always the same."""
    if rows is None or rows >= len(examples):
        return examples
    return random.Random(0).sample(list(examples), rows)


def base_and_adapter(
    model: nn.Module,
    sets: Mapping[str, Sequence[Example]],
    adapter_path: Path | None,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> tuple[dict[str, Score], dict[str, Score]]:
    """Scores by set, of the model as it is and with the adapter, which stays on it.

    Raises:
        CheckpointError: If the adapter cannot be used with this model.
    """
    base = {name: score(model, rows, batch_size, progress) for name, rows in sets.items()}
    if adapter_path is None:
        return base, {}
    add_adapter(model, adapter_path)
    return base, {name: score(model, rows, batch_size, progress) for name, rows in sets.items()}
