"""The training loop: updates from one or several batches, validation, and when to stop."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.dataset.batches import batch_plan
from uma.dataset.examples import Example
from uma.errors import StorageError, UmaError
from uma.measurement.run_folder import Event, Progress
from uma.runtime.lora import attention
from uma.runtime.lora.batching import (
    Batches,
    Unit,
    batch_of,
    inputs_of,
    passes_of,
    require_packable,
    targets_of,
    units_of,
)
from uma.runtime.lora.random_state import at_random_state, random_state
from uma.runtime.lora.step import loss_and_gradients, loss_of
from uma.runtime.lora.tape import Gradients


class Diverged(UmaError):
    """The loss, a gradient or the adapter is not finite; nothing of it was saved."""


@dataclass(frozen=True, slots=True)
class Course:
    """How to go through the data. An iteration is one batch, as in mlx-lm.

    Every ``grad_accumulation_steps`` batches make one update, each token of them of equal weight.
    ``max_grad_norm`` bounds the norm of all gradients together. With ``pack_tokens`` a row of a
    batch holds as many examples as fit into so many tokens. After ``patience`` validations
    without a new lowest loss it ends.

    ``pass_tokens`` positions of a batch at most go through the model together, and ``loss_rows``
    of them through the head; the examples of a packed row pass in rows of ``row_tokens``. Smaller
    ones take less memory, and change nothing but rounding and what dropout draws.
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
    patience: int | None = None
    pass_tokens: int | None = None
    row_tokens: int | None = None
    loss_rows: int | None = None
    attention_slice_bytes: int = attention.SLICE_BYTES


class Keeper(Protocol):
    """What becomes of what the loop does."""

    def phase(self, name: str) -> None:
        """A part of the work begins whose memory has a peak of its own."""

    def report(self, event: Event) -> None: ...

    def save(self, progress: Progress) -> None: ...

    def keep_best(self, progress: Progress) -> None: ...

    def stopped(self) -> str:
        """Why to save and leave now, or nothing."""


def train(
    model: nn.Module,
    optimizer: Any,
    examples: Sequence[Example],
    validation: Sequence[Example],
    course: Course,
    progress: Progress,
    keeper: Keeper,
) -> Progress:
    """Train from ``progress.iteration`` to ``course.iters``, or until the loss no longer falls.

    It is saved after updates, at least every ``save_every`` iterations, at the end, and when
    ``keeper.stopped()``. Validation runs before the first update, then every ``steps_per_eval``;
    one that was stopped is made when it goes on.

    Raises:
        Diverged: If a loss or gradient is not finite; the update is not made.
        UnsupportedModel: If examples are to be packed, and the model does not keep them apart.
    """
    if course.pack_tokens is not None:
        require_packable(model)
    batches = Batches(units_of(examples, course.pack_tokens), course.batch_size, course.seed)
    window = _Window()
    if validation and not (progress.iteration or keeper.stopped()):
        _try_step(model, batches.units)
    validated = progress.validated
    _validate(model, validation, course, progress, keeper)
    if progress.iteration == course.iters and progress.validated != validated:
        _save(model, optimizer, progress, keeper)  # the last one, which was left before
    halted = bool(keeper.stopped())
    while progress.iteration < course.iters and not (halted or exhausted(course, progress)):
        before = progress.iteration
        _step(model, optimizer, batches, course, progress, window, keeper.phase)
        done = progress.iteration == course.iters
        if done or _passed(before, progress.iteration, course.steps_per_report):
            progress.train_loss = window.loss
            keeper.report(window.event(progress, optimizer))
            window = _Window()
        try:
            _validate(model, validation, course, progress, keeper)
        except StorageError:  # perhaps of best/ alone: what was trained need not be lost with it
            with suppress(UmaError):
                _save(model, optimizer, progress, keeper)
            raise
        halted = bool(keeper.stopped())
        done = done or halted or exhausted(course, progress)
        if done or _passed(before, progress.iteration, course.save_every):
            _save(model, optimizer, progress, keeper)
    return progress


def _save(model: nn.Module, optimizer: Any, progress: Progress, keeper: Keeper) -> None:
    keeper.phase("save")
    _require_finite_adapter(model, optimizer, progress.iteration)
    keeper.save(progress)


def _try_step(model: nn.Module, units: Sequence[Unit]) -> None:
    """Go back through the model once with the shortest row, for nothing.

    A layer without a gradient fails now, and not after a long validation (case E6).
    """
    model.train()
    with at_random_state(random_state()):
        loss_and_gradients(model, batch_of([min(units, key=inputs_of)]))


def exhausted(course: Course, progress: Progress) -> bool:
    """Whether the validation loss has not fallen for as long as was asked."""
    return course.patience is not None and progress.worse >= course.patience


def _step(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    course: Course,
    progress: Progress,
    window: "_Window",
    phase: Callable[[str], None],
) -> None:
    """One update, from as many batches as it takes."""
    first = progress.iteration
    count = min(course.grad_accumulation_steps, course.iters - first)
    group = [batches[n] for n in range(first, first + count)]
    started = time.perf_counter()
    model.train()
    try:
        loss, gradients = _accumulated(model, group, first, course, phase)
    except Diverged:  # of the update before, perhaps, and not of this batch
        _require_finite_adapter(model, optimizer, first)
        raise
    phase("optimizer")
    _update(model, optimizer, gradients, course.max_grad_norm)
    tokens = sum(map(targets_of, group))
    window.add(loss, tokens, count, time.perf_counter() - started)
    progress.iteration += count
    progress.trained_tokens += tokens


def _passed(before: int, now: int, every: int) -> bool:
    return before // every != now // every


def _accumulated(
    model: nn.Module,
    group: Sequence[Sequence[Unit]],
    first: int,
    course: Course,
    phase: Callable[[str], None],
) -> tuple[float, Gradients]:
    """Loss and gradients of one update, the mean over all its supervised tokens.

    Each token goes back with a weight of 1, and the mean is taken at the end: of a mean from the
    start, float16 would lose much of what comes back through the layers.
    """
    tokens = sum(map(targets_of, group))
    total, gradients = 0.0, Gradients()
    for n, batch in enumerate(group, start=first + 1):
        for part in passes_of(batch, course.pass_tokens, course.row_tokens):
            loss, found = loss_and_gradients(
                model,
                batch_of(part),
                loss_rows=course.loss_rows,
                attention_slice_bytes=course.attention_slice_bytes,
                phase=phase,
            )
            _require_finite(loss, found, n, part)
            total += _number(loss)
            if gradients:
                found = {name: gradients[name] + value for name, value in found.items()}
                mx.eval(found)
            gradients = found
    return total / tokens, {name: value / tokens for name, value in gradients.items()}


def _number(value: mx.array) -> float:
    number: Any = value.item()
    return float(number)


def _not_finite(values: dict[str, mx.array]) -> str | None:
    """The first of the arrays that holds a NaN or an infinity."""
    finite: Any = mx.stack([mx.isfinite(value).all() for value in values.values()]).tolist()
    return next((name for name, ok in zip(values, finite, strict=True) if not ok), None)


def _require_finite(
    loss: mx.array, gradients: Gradients, iteration: int, batch: Sequence[Unit]
) -> None:
    bad = _not_finite({"loss": loss} | gradients)
    if bad is not None:
        lines = ", ".join(str(e.line) for unit in batch for e in unit)
        what = "the loss" if bad == "loss" else f"the gradient of {bad}"
        raise Diverged(
            f"{what} is not finite in iteration {iteration} (lines {lines} of train.jsonl); the "
            "adapter is as it was before; lower --learning-rate, or look at those lines"
        )


def _require_finite_adapter(model: nn.Module, optimizer: Any, iteration: int) -> None:
    """Of the optimizer too: with infinite averages of squares nothing moves any more."""
    bad = _not_finite(dict(tree_flatten(model.trainable_parameters())))
    bad = bad or _not_finite(dict(tree_flatten(optimizer.state, ".optimizer")))
    if bad is not None:
        raise Diverged(
            f"{bad} is not finite after iteration {iteration}; it is not saved, and what was saved "
            "before is as it was; lower --learning-rate or --scale, or bound --max-grad-norm"
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
    model: nn.Module,
    examples: Sequence[Example],
    batch_size: int,
    max_batches: int = -1,
    pass_tokens: int | None = None,
    stopped: Callable[[], Any] = lambda: False,
) -> float | None:
    """The mean loss of a supervised token, over the first batches of like length.

    ``None`` where it was ``stopped`` before the end.
    """
    lengths = [len(e.tokens) - 1 for e in examples]
    plan = batch_plan(lengths, batch_size, seed=0, epoch=0)
    total, tokens = 0.0, 0
    model.eval()
    for batch in plan[: None if max_batches < 0 else max_batches]:
        if stopped():
            return None
        chosen = [[examples[n]] for n in batch]
        for part in passes_of(chosen, pass_tokens):
            total += _number(loss_of(model, batch_of(part)))
        tokens += targets_of(chosen)
    return total / tokens if tokens else math.nan


def _validate(
    model: nn.Module,
    validation: Sequence[Example],
    course: Course,
    progress: Progress,
    keeper: Keeper,
) -> None:
    """Validate where that is due, unless it is asked to leave."""
    if not validation or not due(progress, course):
        return
    started = time.perf_counter()
    keeper.phase("validation")
    rows = course.batch_size, course.val_batches, course.pass_tokens
    loss = validation_loss(model, validation, *rows, keeper.stopped)
    if loss is None:
        return
    if not math.isfinite(loss):
        raise Diverged(
            f"the validation loss is {loss} after iteration {progress.iteration}; what was saved "
            "before is as it was; lower --learning-rate, or look at valid.jsonl"
        )
    best = progress.best_val_loss is None or loss < progress.best_val_loss
    if best and progress.iteration:  # before that it is the untouched model
        keeper.keep_best(progress)  # where that fails, it is validated again by who goes on
    progress.val_loss, progress.validated = loss, progress.iteration
    if best:
        progress.best_val_loss, progress.best_iteration = loss, progress.iteration
        progress.worse = 0
    else:
        progress.worse += 1
    keeper.report(
        {
            "event": "validation",
            "iteration": progress.iteration,
            "val_loss": loss,
            "best_val_loss": progress.best_val_loss,
            "best_iteration": progress.best_iteration,
            "seconds": time.perf_counter() - started,
        }
    )


def due(progress: Progress, course: Course) -> bool:
    """Whether a validation is to be made where the run stands."""
    last, now = progress.validated, progress.iteration
    if last is None:
        return True
    return last != now and (now == course.iters or _passed(last, now, course.steps_per_eval))


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
        }
