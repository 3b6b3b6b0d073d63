"""The training loop: micro-batches, updates, validation and checkpoints."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from uma.dataset.batches import batch_plan, padded_length
from uma.dataset.examples import Example
from uma.dataset.packing import packs
from uma.errors import UmaError, UnsupportedModel
from uma.runtime.lora.step import Batch, hidden_of, loss_and_gradients, loss_of
from uma.runtime.lora.tape import Gradients

Event = dict[str, Any]

PACKING_TOLERANCE = {True: 1e-4, False: 0.03}
"""Of the last layer's output, in float32 or not; bfloat16 rounds each number to 4e-3."""


class Diverged(UmaError):
    """The loss or a gradient is not finite; nothing of it reached the adapter."""


@dataclass(frozen=True, slots=True)
class Course:
    """How to go through the data. An iteration is one batch, as in mlx-lm.

    Every ``grad_accumulation_steps`` batches make one update, each token of them of equal weight.
    ``max_grad_norm`` bounds the norm of all gradients together. With ``pack_tokens`` a row of a
    batch holds as many examples as fit into so many tokens.
    """

    iters: int
    batch_size: int
    grad_accumulation_steps: int
    seed: int
    max_grad_norm: float | None = None
    pack_tokens: int | None = None
    steps_per_report: int = 10
    steps_per_eval: int = 200
    val_batches: int = 25
    save_every: int = 100


@dataclass(slots=True)
class Progress:
    """Where a run stands, and the last losses."""

    iteration: int = 0
    trained_tokens: int = 0
    train_loss: float | None = None
    val_loss: float | None = None


Unit = Sequence[Example]
"""What fills a row of a batch: one example, or several that are packed."""


def units_of(examples: Sequence[Example], pack_tokens: int | None = None) -> list[Unit]:
    """Each example by itself, or packed into rows of up to ``pack_tokens`` inputs."""
    if pack_tokens is None:
        return [[example] for example in examples]
    inputs = [len(e.tokens) - 1 for e in examples]
    return [[examples[n] for n in row] for row in packs(inputs, pack_tokens)]


def inputs_of(unit: Unit) -> int:
    """Positions that it fills: the last token of an example is only a target."""
    return sum(len(e.tokens) - 1 for e in unit)


def batch_of(units: Sequence[Unit], token_weight: float) -> Batch:
    """Padded inputs and targets; each supervised target weighs ``token_weight``."""
    shape = len(units), padded_length(max(map(inputs_of, units)))
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights, segments = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
    for row, unit in enumerate(units):
        at = 0
        for number, example in enumerate(unit):
            to = at + len(example.tokens) - 1
            tokens[row, at:to], targets[row, at:to] = example.tokens[:-1], example.tokens[1:]
            weights[row, at:to] = np.array(example.supervised[1:], np.float32) * token_weight
            segments[row, at:to] = number
            at = to
    packed = any(len(unit) > 1 for unit in units)
    return Batch(tokens, targets, weights, segments if packed else None)


def require_packable(model: nn.Module) -> None:
    """Compare what the layers give for two short examples in one row with the same apart.

    Raises:
        UnsupportedModel: If it differs: a layer sees past its own example.
    """
    model.eval()
    examples = [
        Example(n, tuple(range(3 + n, 3 + n + length)), (True,) * length, {})
        for n, length in enumerate((21, 13))
    ]
    apart = mx.concatenate(
        [hidden_of(model, batch_of([[e]], 1.0))[:, : len(e.tokens) - 1] for e in examples], axis=1
    )
    together = hidden_of(model, batch_of([examples], 1.0))[:, : apart.shape[1]]
    tolerance = PACKING_TOLERANCE[apart.dtype == mx.float32]
    apart, together = apart.astype(mx.float32), together.astype(mx.float32)
    distance = _number(mx.linalg.norm(together - apart) / mx.linalg.norm(apart))
    if distance > tolerance:
        raise UnsupportedModel(
            "examples cannot be packed for this model: in one row its layers give something else "
            f"than apart (by {distance:.2%}); leave out --packing"
        )


class Batches:
    """The batches of all epochs by number, from 0."""

    def __init__(self, units: Sequence[Unit], batch_size: int, seed: int) -> None:
        self.units, self.batch_size, self.seed = units, batch_size, seed
        self.lengths = [inputs_of(unit) for unit in units]
        self.per_epoch = -(-len(units) // batch_size)
        self._epoch, self._plan = -1, [[0]]

    def __getitem__(self, number: int) -> list[Unit]:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._plan = batch_plan(self.lengths, self.batch_size, seed=self.seed, epoch=epoch)
            self._epoch = epoch
        return [self.units[n] for n in self._plan[place]]


def targets_of(units: Sequence[Unit]) -> int:
    """Supervised targets of a batch."""
    return sum(e.targets for unit in units for e in unit)


def train(
    model: nn.Module,
    optimizer: Any,
    examples: Sequence[Example],
    validation: Sequence[Example],
    course: Course,
    progress: Progress,
    *,
    report: Callable[[Event], None],
    save: Callable[[Progress], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train from ``progress.iteration`` to ``course.iters``.

    ``save`` is called after updates, at least every ``save_every`` iterations, at the end, and when
    ``stopped()`` says so. Validation runs before the first update, then every ``steps_per_eval``.

    Raises:
        Diverged: If a loss or gradient is not finite; the update is not made.
        UnsupportedModel: If examples are to be packed, and the model does not keep them apart.
    """
    if course.pack_tokens is not None:
        require_packable(model)
    batches = Batches(units_of(examples, course.pack_tokens), course.batch_size, course.seed)
    window = _Window()
    if not progress.iteration and validation:
        _validate(model, validation, course, progress, report)
    halted = stopped()
    while progress.iteration < course.iters and not halted:
        before = progress.iteration
        model.train()
        _step(model, optimizer, batches, course, progress, window)
        halted = stopped()
        done = progress.iteration == course.iters
        if done or _passed(before, progress.iteration, course.steps_per_report):
            progress.train_loss = window.loss
            report(window.event(progress, optimizer))
            window = _Window()
        if validation and (done or _passed(before, progress.iteration, course.steps_per_eval)):
            _validate(model, validation, course, progress, report)
        if done or halted or _passed(before, progress.iteration, course.save_every):
            save(progress)
    return progress


def _step(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    course: Course,
    progress: Progress,
    window: "_Window",
) -> None:
    """One update, from as many batches as it takes."""
    first = progress.iteration
    count = min(course.grad_accumulation_steps, course.iters - first)
    group = [batches[n] for n in range(first, first + count)]
    started = time.perf_counter()
    loss, gradients = _accumulated(model, group, first)
    _update(model, optimizer, gradients, course.max_grad_norm)
    tokens = sum(map(targets_of, group))
    window.add(loss, tokens, count, time.perf_counter() - started)
    progress.iteration += count
    progress.trained_tokens += tokens


def _passed(before: int, now: int, every: int) -> bool:
    return before // every != now // every


def _accumulated(
    model: nn.Module, group: Sequence[Sequence[Unit]], first: int
) -> tuple[float, Gradients]:
    """Loss and gradients of one update, the mean over all its supervised tokens."""
    weight = 1 / sum(map(targets_of, group))
    total, gradients = 0.0, Gradients()
    for n, batch in enumerate(group, start=first + 1):
        loss, found = loss_and_gradients(model, batch_of(batch, weight))
        _require_finite(loss, found, n, batch)
        total += _number(loss)
        if gradients:
            found = {name: gradients[name] + value for name, value in found.items()}
            mx.eval(found)
        gradients = found
    return total, gradients


def _number(value: mx.array) -> float:
    number: Any = value.item()
    return float(number)


def _require_finite(
    loss: mx.array, gradients: Gradients, iteration: int, batch: Sequence[Unit]
) -> None:
    values = {"loss": loss} | gradients
    finite: Any = mx.stack([mx.isfinite(value).all() for value in values.values()]).tolist()
    bad = [name for name, ok in zip(values, finite, strict=True) if not ok]
    if bad:
        lines = ", ".join(str(e.line) for unit in batch for e in unit)
        what = "the loss" if bad[0] == "loss" else f"the gradient of {bad[0]}"
        raise Diverged(
            f"{what} is not finite in iteration {iteration} (lines {lines} of train.jsonl); the "
            "adapter is as it was before; lower --learning-rate, or look at those lines"
        )


def _update(model: nn.Module, optimizer: Any, gradients: Gradients, max_norm: float | None) -> None:
    if max_norm is not None:
        squares = [mx.square(g.astype(mx.float32)).sum() for g in gradients.values()]
        norm = mx.sqrt(mx.stack(squares).sum())
        factor = mx.minimum(max_norm / (norm + 1e-6), 1.0)
        gradients = {name: (g * factor).astype(g.dtype) for name, g in gradients.items()}
    optimizer.update(model, tree_unflatten(list(gradients.items())))
    mx.eval(model.trainable_parameters(), optimizer.state)


def validation_loss(
    model: nn.Module, examples: Sequence[Example], batch_size: int, max_batches: int = -1
) -> float:
    """The mean loss of a supervised token, over the first batches of like length."""
    lengths = [len(e.tokens) for e in examples]
    plan = batch_plan(lengths, batch_size, seed=0, epoch=0)
    total, tokens = 0.0, 0
    model.eval()
    for batch in plan[: None if max_batches < 0 else max_batches]:
        chosen = [[examples[n]] for n in batch]
        total += _number(loss_of(model, batch_of(chosen, 1.0)))
        tokens += targets_of(chosen)
    return total / tokens if tokens else math.nan


def _validate(
    model: nn.Module,
    validation: Sequence[Example],
    course: Course,
    progress: Progress,
    report: Callable[[Event], None],
) -> None:
    started = time.perf_counter()
    progress.val_loss = validation_loss(model, validation, course.batch_size, course.val_batches)
    report(
        {
            "event": "validation",
            "iteration": progress.iteration,
            "val_loss": progress.val_loss,
            "seconds": time.perf_counter() - started,
        }
    )


@dataclass(slots=True)
class _Window:
    """Sums since the last report."""

    weighted: float = 0.0
    tokens: int = 0
    iterations: int = 0
    seconds: float = 0.0

    def add(self, loss: float, tokens: int, iterations: int, seconds: float) -> None:
        self.weighted += loss * tokens
        self.tokens += tokens
        self.iterations += iterations
        self.seconds += seconds

    @property
    def loss(self) -> float:
        return self.weighted / self.tokens

    def event(self, progress: Progress, optimizer: Any) -> Event:
        return {
            "event": "train",
            "iteration": progress.iteration,
            "train_loss": self.loss,
            "learning_rate": optimizer.learning_rate.item(),
            "tokens_per_s": self.tokens / self.seconds,
            "s_per_iter": self.seconds / self.iterations,
            "trained_tokens": progress.trained_tokens,
            "peak_memory_bytes": mx.get_peak_memory(),
        }
