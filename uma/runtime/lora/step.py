"""One training step: the exact loss and gradients, in a sequence of evaluated phases.

The layers are run one by one and their inputs kept; the loss is taken slice by slice; then each
layer, from the last to the first that has something to train, is run again and differentiated. What
bounds the peak is that each phase is evaluated before the next begins.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from uma.runtime.lora import attention
from uma.runtime.lora.recurrence import chunked_recurrences
from uma.runtime.lora.tape import Gradients, Tape


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, the ids to predict and the weight of each, all ``(rows, length)``.

    The loss is the sum of weights times cross-entropies. With ``segments`` a row holds several
    examples, each blind to the others: a number for each position.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray | None = None


def loss_and_gradients(
    model: nn.Module,
    batch: Batch,
    *,
    loss_rows: int | None = None,
    attention_slice_bytes: int = attention.SLICE_BYTES,
    phase: Callable[[str], None] = lambda _: None,
) -> tuple[mx.array, Gradients]:
    """The loss of ``batch`` and its gradient by each trainable parameter, by name, evaluated.

    ``loss_rows`` positions at a time pass the head; by default as many as make the logits of one
    slice ``loss.SLICE_BYTES``. ``phase`` is told when the way forward begins, and the way back.

    Raises:
        UnsupportedModel: If the model's layers do not follow one another as the step needs.
    """
    with attention.sliced_attention(attention_slice_bytes), chunked_recurrences():
        phase("forward")
        tape = Tape(model, batch.tokens, batch.segments)
        loss = tape.tail(batch.targets.reshape(-1), batch.weights.reshape(-1), loss_rows)
        phase("backward")
        tape.backward()
    return loss, tape.gradients


def loss_of(model: nn.Module, batch: Batch) -> mx.array:
    """The loss alone, evaluated: layer by layer and slice by slice too."""
    with attention.sliced_attention(attention.SLICE_BYTES), chunked_recurrences():
        tape = Tape(model, batch.tokens, batch.segments, record=False)
        return tape.tail(batch.targets.reshape(-1), batch.weights.reshape(-1), None)


def hidden_of(model: nn.Module, batch: Batch) -> mx.array:
    """What the last layer gives, ``(rows, length, width)``."""
    return Tape(model, batch.tokens, batch.segments, record=False).last
