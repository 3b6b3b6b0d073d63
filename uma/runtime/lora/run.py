"""A fine-tuning run in its folder: begun or resumed, trained, saved."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from uma.dataset.examples import Example
from uma.errors import StorageError, UsageError
from uma.runtime.backend import backend
from uma.runtime.load import LoadedModel
from uma.runtime.lora.adapter import WEIGHTS, Adapter, put_adapter, save_adapter
from uma.runtime.lora.checkpoint import (
    State,
    checkpoints,
    differences,
    read_state,
    restore,
    save_checkpoint,
)
from uma.runtime.lora.optimizer import make_optimizer
from uma.runtime.lora.random_state import random_state
from uma.runtime.lora.threads import fix_threads
from uma.runtime.lora.train import Course, Event, Progress, train
from uma.runtime.versions import versions

LOG = "log.jsonl"
FREE = {"iters", "steps_per_report", "steps_per_eval", "val_batches", "save_every"}
"""Of the course what a resumed run may change: it does not change what was trained."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained and how, beside model and data."""

    adapter: Adapter
    course: Course
    optimizer: str
    learning_rate: float
    warmup: int = 0
    cosine: bool = False

    def make_optimizer(self) -> Any:
        updates = -(-self.course.iters // self.course.grad_accumulation_steps)
        decay = updates if self.cosine else None
        return make_optimizer(
            self.optimizer, self.learning_rate, warmup=self.warmup, decay_updates=decay
        )


@dataclass(frozen=True, slots=True)
class Result:
    """How a run stands when it ends. ``notes`` are for a reader."""

    progress: Progress
    trainable_parameters: int
    s_per_iter: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int
    resting_bytes: int
    notes: tuple[str, ...]


def require_free(folder: Path, resume: bool) -> None:
    """Refuse to write over another run, and to resume what is not there.

    Raises:
        UsageError: With what to do instead.
    """
    there = checkpoints(folder)
    if resume and not there:
        raise UsageError(f"{folder} has no checkpoint to resume; leave out --resume to begin")
    if not resume and (there or (folder / WEIGHTS).exists()):
        raise UsageError(
            f"{folder} holds another run; continue it with --resume, or give another --adapter-path"
        )


def fine_tune(
    loaded: LoadedModel,
    examples: Sequence[Example],
    validation: Sequence[Example],
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool,
    data: dict[str, Any],
    blas: str,
    on_event: Callable[[Event], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Result:
    """Train ``loaded`` in ``folder``; what mlx_lm loads stands there after every checkpoint.

    ``data`` says what the examples were made of, ``blas`` what multiplies on the CPU.

    Raises:
        UsageError: If the folder holds another run, or the run there had other settings.
        Diverged: If a loss or gradient is not finite.
        StorageError: If something cannot be written.
    """
    require_free(folder, resume)
    mx.random.seed(recipe.course.seed)
    trained = put_adapter(loaded.model, recipe.adapter)
    mx.eval(trained)
    optimizer = recipe.make_optimizer()
    settings = _settings(loaded, recipe, data)
    environment = _environment(folder, resume, blas)
    progress = Progress()
    notes: list[str] = []
    if resume:
        progress, notes = _resumed(loaded, optimizer, folder, settings, environment)
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    last: Event = {}

    def report(event: Event) -> None:
        last.update(event)
        _log(folder, event)
        on_event(event)

    def save(now: Progress) -> None:
        state = State(now.iteration, random_state(), now.trained_tokens, settings, environment)
        save_checkpoint(folder, loaded.model, optimizer, state)
        weights = dict(tree_flatten(loaded.model.trainable_parameters()))
        save_adapter(folder, weights, _adapter_config(loaded, recipe))
        report({"event": "checkpoint", "iteration": now.iteration})

    _log(folder, {"event": "begin", "iteration": progress.iteration, "settings": settings})
    train(
        loaded.model,
        optimizer,
        examples,
        validation,
        recipe.course,
        progress,
        report=report,
        save=save,
        stopped=stopped,
    )
    return Result(
        progress,
        sum(value.size for value in trained.values()),
        last.get("s_per_iter"),
        last.get("tokens_per_s"),
        mx.get_peak_memory(),
        resting,
        tuple(notes),
    )


def _environment(folder: Path, resume: bool, blas: str) -> dict[str, Any]:
    """What the last bits depend on; BLAS takes the number of threads that the run began with."""
    begun = read_state(checkpoints(folder)[-1]).environment if resume else {}
    threads = fix_threads(begun.get("threads"))
    return versions() | {"backend": backend(), "blas": blas, "threads": threads}


def _settings(loaded: LoadedModel, recipe: Recipe, data: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have equal, as JSON gives it back."""
    course = {k: v for k, v in asdict(recipe.course).items() if k not in FREE}
    if recipe.cosine:
        course["iters"] = recipe.course.iters
    settings = {
        "base": fingerprint(loaded.folder),
        "form": loaded.form,
        **asdict(recipe.adapter),
        **course,
        "optimizer": recipe.optimizer,
        "learning_rate": recipe.learning_rate,
        "warmup": recipe.warmup,
        "cosine": recipe.cosine,
        **data,
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _resumed(
    loaded: LoadedModel,
    optimizer: Any,
    folder: Path,
    settings: dict[str, Any],
    environment: dict[str, Any],
) -> tuple[Progress, list[str]]:
    newest = checkpoints(folder)[-1]
    state = read_state(newest)
    if changed := differences(state.settings, settings):
        listed = "\n".join(f"  {line}" for line in changed)
        raise UsageError(f"{folder} was trained with other settings; give the same:\n{listed}")
    restore(newest, loaded.model, optimizer)
    notes = [f"resumed from iteration {state.iteration}"]
    if moved := differences(state.environment, environment):
        notes.append(
            f"not bit for bit what an unbroken run would give: {'; '.join(moved)} (same settings, "
            "other arithmetic)"
        )
    return Progress(state.iteration, state.trained_tokens), notes


def _adapter_config(loaded: LoadedModel, recipe: Recipe) -> dict[str, Any]:
    return recipe.adapter.config() | {
        "model": str(loaded.folder),
        "optimizer": recipe.optimizer,
        "learning_rate": recipe.learning_rate,
        "iters": recipe.course.iters,
        "batch_size": recipe.course.batch_size,
        "seed": recipe.course.seed,
    }


def fingerprint(folder: Path) -> str:
    """A hash of a model's configuration and of the beginning of each of its weight files."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def _log(folder: Path, event: Event) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
    except OSError as error:
        raise StorageError(f"{folder / LOG} cannot be written: {error.strerror}") from error
