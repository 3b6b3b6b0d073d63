"""A fine-tuning run in its folder: begun or resumed, trained, saved."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from uma.checkpoint.adapter import CONFIG
from uma.checkpoint.safetensors import read_header, weight_files
from uma.dataset.examples import Example
from uma.errors import StorageError, UsageError
from uma.measurement.run_folder import (
    BEST,
    RUN,
    Event,
    Progress,
    State,
    append,
    checkpoints,
    differences,
    failed,
    held,
    read_state,
    require_free,
    write_json,
)
from uma.runtime.backend import backend
from uma.runtime.load import LoadedModel
from uma.runtime.lora.adapter import Adapter, put_adapter, save_adapter
from uma.runtime.lora.checkpoint import KEPT, restore, save_checkpoint
from uma.runtime.lora.optimizer import make_optimizer
from uma.runtime.lora.random_state import random_state
from uma.runtime.lora.threads import fix_threads
from uma.runtime.lora.train import Course, exhausted, train
from uma.runtime.measure import PhaseMeter
from uma.runtime.versions import versions

FREE = {"iters", "steps_per_report", "steps_per_eval", "save_every", "patience"}
"""Of the course what a resumed run may change: what was trained and its losses stay comparable."""

ROUNDING = {"pass_tokens", "row_tokens", "loss_rows", "attention_slice_bytes"}
"""What changes the order of sums, and what dropout draws, and nothing else."""

PIECE = 4096
"""Bytes of a tensor by which a base is known again."""

Ending = Literal["done", "stopped", "abandoned", "patience"]
Stop = Literal["", "stopped", "abandoned"]
"""Nothing, or why to save and leave: somebody asked, or the process that supervises is gone."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained and how, beside model and data."""

    adapter: Adapter
    course: Course
    optimizer: str
    learning_rate: float
    warmup: int = 0
    cosine: bool = False
    lr_schedule: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None

    def make_optimizer(self) -> Any:
        updates = -(-self.course.iters // self.course.grad_accumulation_steps)
        decay = updates if self.cosine else None
        return make_optimizer(
            self.optimizer,
            self.learning_rate,
            warmup=self.warmup,
            decay_updates=decay,
            schedule=self.lr_schedule,
            settings=self.optimizer_config,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a run was measured to hold: arrays by what they are for, and peaks by phase.

    ``resting_bytes`` is the model with its adapter, before the first step.
    """

    resting_bytes: int
    adapter_bytes: int
    optimizer_bytes: int
    pool_bytes: int
    peaks: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.resting_bytes, *self.peaks.values())


@dataclass(frozen=True, slots=True)
class Result:
    """How a run stands when it ends. ``notes`` are for a reader."""

    progress: Progress
    ending: Ending
    trainable_parameters: int
    s_per_iter: float | None
    tokens_per_s: float | None
    held: Held
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Keeper:
    """Writes what the training loop gives it into the folder of the run."""

    folder: Path
    loaded: LoadedModel
    recipe: Recipe
    settings: dict[str, Any]
    environment: dict[str, Any]
    on_event: Callable[[Event], None]
    stopped: Callable[[], Stop]
    kept: int
    optimizer: Any = None
    meter: PhaseMeter = field(default_factory=PhaseMeter)
    last: Event = field(default_factory=dict)

    def phase(self, name: str) -> None:
        self.meter.enter(name)

    def report(self, event: Event) -> None:
        """Log an event, with the memory now and at most and the share of the run that is left."""
        iters = self.recipe.course.iters
        memory = mx.get_active_memory() + mx.get_cache_memory()
        event |= {
            "iters": iters,
            "memory_bytes": memory,
            "peak_memory_bytes": max(memory, self.meter.peak_bytes, mx.get_peak_memory()),
        }
        self.last |= event
        if "s_per_iter" in self.last:
            event["left_s"] = self.last["s_per_iter"] * (iters - event["iteration"])
        append(self.folder, event)
        self.on_event(event)

    def save(self, progress: Progress) -> None:
        state = State(progress, random_state(), self.settings, self.environment)
        save_checkpoint(self.folder, self.loaded.model, self.optimizer, state, self.kept)
        self.save_adapter(self.folder)
        self.report({"event": "checkpoint", "iteration": progress.iteration})

    def keep_best(self, progress: Progress) -> None:
        self.save_adapter(self.folder / BEST)

    def save_adapter(self, folder: Path) -> None:
        weights = dict(tree_flatten(self.loaded.model.trainable_parameters()))
        save_adapter(folder, weights, _adapter_config(self.loaded, self.recipe))


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
    stopped: Callable[[], Stop] = lambda: "",
    kept: int = KEPT,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Result:
    """Train ``loaded`` in ``folder``; what mlx_lm loads stands there after every checkpoint.

    ``data`` says what the examples were made of, ``blas`` what multiplies on the CPU. The newest
    ``kept`` checkpoints stay. ``about`` is kept beside them for whoever asks how the run stands.

    Raises:
        Busy: If another process trains in the folder.
        UsageError: If the folder holds another run, or the run there had other settings.
        Diverged: If a loss or gradient is not finite.
        StorageError: If something cannot be written.
    """
    with held(folder):
        require_free(folder, resume)
        mx.random.seed(recipe.course.seed)
        mx.eval(put_adapter(loaded.model, recipe.adapter))
        keeper = _Keeper(
            folder,
            loaded,
            recipe,
            _settings(loaded, recipe, data),
            _environment(folder, resume, blas, recipe.course),
            on_event,
            stopped,
            kept,
            recipe.make_optimizer(),
        )
        progress, notes = _resumed(keeper) if resume else (Progress(), [])
        write_json(folder / RUN, {"pid": os.getpid(), "iters": recipe.course.iters, **about})
        begin = {"event": "begin", "iteration": progress.iteration, "iters": recipe.course.iters}
        more = {"settings": keeper.settings, "plan": about.get("plan"), "parent": os.getppid()}
        append(folder, begin | more)
        on_event(begin | {"notes": notes})
        held_bytes = _trained(keeper, examples, validation, progress)
        parameters = sum(value.size for value in _trainable(loaded))
        return _result(keeper, progress, parameters, held_bytes, notes)


def _trainable(loaded: LoadedModel) -> list[mx.array]:
    """What trains now: kept longer, it would stay beside what an update makes of it."""
    return [value for _, value in tree_flatten(loaded.model.trainable_parameters())]


def _trained(
    keeper: _Keeper,
    examples: Sequence[Example],
    validation: Sequence[Example],
    progress: Progress,
) -> Held:
    """Train, and say what it held; an error is noted in the log before it goes on."""
    model, optimizer, course = keeper.loaded.model, keeper.optimizer, keeper.recipe.course
    adapter_bytes = sum(value.nbytes for value in _trainable(keeper.loaded))
    resting = mx.get_active_memory() - _optimizer_bytes(optimizer)
    try:
        train(model, optimizer, examples, validation, course, progress, keeper)
    except (Exception, KeyboardInterrupt) as error:
        with suppress(StorageError):
            append(keeper.folder, failed(error))
        raise
    finally:
        keeper.meter.finish()
    meter = keeper.meter
    return Held(resting, adapter_bytes, _optimizer_bytes(optimizer), meter.pool_bytes, meter.peaks)


def _result(
    keeper: _Keeper, progress: Progress, parameters: int, measured: Held, notes: list[str]
) -> Result:
    course = keeper.recipe.course
    ending: Ending = keeper.stopped() or "stopped"
    if progress.iteration >= course.iters:
        ending = "done"
    elif exhausted(course, progress):
        ending = "patience"
    append(keeper.folder, {"event": "end", "how": ending, "iteration": progress.iteration})
    rates = keeper.last.get("s_per_iter"), keeper.last.get("tokens_per_s")
    return Result(progress, ending, parameters, *rates, measured, tuple(notes))


def _optimizer_bytes(optimizer: Any) -> int:
    arrays = (value for _, value in tree_flatten(optimizer.state))
    return sum(value.nbytes for value in arrays if isinstance(value, mx.array))


def _environment(folder: Path, resume: bool, blas: str, course: Course) -> dict[str, Any]:
    """What the last bits depend on; BLAS takes the number of threads that the run began with."""
    begun = read_state(checkpoints(folder)[-1]).environment if resume else {}
    threads = fix_threads(begun.get("threads"))
    order = {name: getattr(course, name) for name in ROUNDING}
    return versions() | {"backend": backend(), "blas": blas, "threads": threads, **order}


def _settings(loaded: LoadedModel, recipe: Recipe, data: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have equal, as JSON gives it back."""
    course = {k: v for k, v in asdict(recipe.course).items() if k not in FREE | ROUNDING}
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
        "lr_schedule": recipe.lr_schedule,
        "optimizer_config": recipe.optimizer_config,
        **data,
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _resumed(keeper: _Keeper) -> tuple[Progress, list[str]]:
    """Where the newest checkpoint stands, restored; the adapter in the folder is made its own."""
    newest = checkpoints(keeper.folder)[-1]
    state = read_state(newest)
    if changed := differences(state.settings, keeper.settings):
        if state.settings.get("base") != keeper.settings["base"]:
            changed.append(f"the base was {_base_of(keeper.folder)}, is {keeper.loaded.folder}")
        listed = "\n".join(f"  {line}" for line in changed)
        raise UsageError(
            f"{keeper.folder} was trained with other settings; give the same:\n{listed}"
        )
    restore(newest, keeper.loaded.model, keeper.optimizer)
    keeper.save_adapter(keeper.folder)
    notes = [f"resumed from iteration {state.progress.iteration}"]
    if moved := differences(state.environment, keeper.environment):
        notes.append(
            f"not bit for bit what an unbroken run would give: {'; '.join(moved)} (same settings, "
            "other arithmetic)"
        )
    course = keeper.recipe.course
    if over := state.progress.iteration % course.grad_accumulation_steps:
        notes.append(
            f"not what an unbroken run of {course.iters:,} iterations would give: the last update "
            f"was made of {over} batches instead of {course.grad_accumulation_steps}"
        )
    return state.progress, notes


def _base_of(run: Path) -> str:
    """The folder of the model that a run trained, as its adapter says it."""
    try:
        return str(json.loads((run / CONFIG).read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another one"


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
    """A hash of a model's configuration and of the end of each of its tensors."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        header = read_header(path)
        with path.open("rb") as file:
            for tensor in header.tensors:
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                size = min(PIECE, tensor.size_bytes)
                file.seek(header.data_offset + tensor.end - size)
                digest.update(file.read(size))
    return digest.hexdigest()[:16]
