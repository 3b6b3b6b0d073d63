"""The process that trains: data, plan, model, run, report."""

import json as json_module
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import INTERRUPTED, ONLY_HERE, Asked, arguments, written
from uma.cli.progress import say
from uma.errors import StorageError, UmaError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.dataset.check import Split
    from uma.plan.fine_tuning import FineTuningPlan
    from uma.runtime.load import LoadedModel
    from uma.runtime.lora.run import Recipe, Result, Stop


def work(asked: Asked, parent: int) -> int:
    """Train, and print how it went. It is saved and left when ``parent`` is gone."""
    try:
        return _work(asked, parent)
    except UmaError as error:
        _note_failure(asked.adapter_path, error)
        raise


def _note_failure(run: Path, error: UmaError) -> None:
    """Keep for ``uma lora status`` why a run did not even begin."""
    from uma.measurement.run_folder import append, events, failed
    from uma.measurement.run_status import remember
    from uma.paths import state_folder

    if not any(event["event"] == "begin" for event in events(run)):
        with suppress(OSError, UmaError):
            append(run, failed(error))
            remember(run, state_folder() / "runs")


def _work(asked: Asked, parent: int) -> int:
    from uma.cli.lora.data import tokenizer_of
    from uma.cli.lora.model import heavy
    from uma.cli.lora.plan import with_layers
    from uma.cli.lora.result import tell_nothing_left, tell_result

    source, encoder = tokenizer_of(asked.model, quiet=asked.quiet, yes=asked.yes)
    asked = with_layers(asked, source)
    with heavy(
        "uma lora train",
        quiet=asked.quiet,
        wait=asked.wait,
        allow_concurrent=asked.allow_concurrent,
    ):
        from uma.cli.lora.plan import nothing_left, read_splits

        splits = read_splits(asked, encoder)
        if (reason := nothing_left(asked, splits)) is not None:
            return tell_nothing_left(asked, reason)
        plan = _plan(asked, source, splits)
        _require_room(asked, source, plan)
        with _stop_signals() as seen:

            def stopped() -> "Stop":
                if seen:
                    return "stopped"
                return "" if os.getppid() == parent else "abandoned"

            loaded, result = _trained(asked, source, splits, plan, stopped)
    tell_result(asked, source, loaded, plan, result)
    return INTERRUPTED if result.ending in ("stopped", "abandoned") else 0


def _plan(asked: Asked, source: "ModelSource", splits: "dict[str, Split]") -> "FineTuningPlan":
    """The plan, told; a resumed run is cut as it was.

    Raises:
        DoesNotFit: If it exceeds the limit, unless it is forced.
    """
    from uma.cli.lora.plan import begun, course_of, duration_of, exceeded, planned
    from uma.cli.session import live_machine
    from uma.report.fine_tuning import batches_text, time_text

    machine = live_machine()
    cut, done = begun(asked)
    plan = planned(asked, source, splits, machine, cut)
    ledger, budget = plan.ledger, plan.case.budget
    if ledger.verdict == "exceeds":
        error = exceeded(plan, source.name)
        if not asked.force:
            raise error
        say(f"uma: going on although {error.args[0].splitlines()[0]}", asked.quiet)
    say(batches_text(plan), asked.quiet)
    peak = "peak not known"
    if ledger.verdict != "unknown":
        peak = (
            f"peak {format_gib(ledger.predicted_peak_bytes)} of "
            f"{format_gib(budget.budget_bytes)}: {ledger.verdict}"
        )
    time = time_text(duration_of(asked, plan, course_of(asked, splits), done))
    say(f"{peak}; {time}", asked.quiet)
    for note in plan.notes:
        say(f"note: {note}", asked.quiet)
    return plan


def _require_room(asked: Asked, source: "ModelSource", plan: "FineTuningPlan") -> None:
    """Refuse a folder that cannot be written, or a disk that the checkpoints would fill.

    Raises:
        Busy: If another process trains there.
        StorageError: With what is needed and what is there.
    """
    from uma.cli.lora.plan import trained_of
    from uma.engines.mlx_training import optimizer_bytes
    from uma.measurement.run_folder import BEST, CHECKPOINTS, checkpoints, held
    from uma.runtime.lora.adapter import require_writable

    arrays = trained_of(asked, source, plan.case.form)
    trained = sum(array.size_bytes for array in arrays)
    whole = trained + optimizer_bytes(plan.case.workload, arrays)
    with held(asked.adapter_path):
        for folder in (CHECKPOINTS, BEST):
            require_writable(asked.adapter_path / folder)
        free = shutil.disk_usage(asked.adapter_path).free
        there = len(checkpoints(asked.adapter_path))
    # The checkpoints that stay and the one being written; the adapter, its copy, the best one.
    needed = (max(0, asked.keep - there) + 1) * whole + (1 if there else 3) * trained
    if free < needed:
        raise StorageError(
            f"the checkpoints of this run take {format_gib(needed)}, and the disk of "
            f"{asked.adapter_path} has {format_gib(free)} left; give another --adapter-path, or a "
            "smaller --keep"
        )


def _trained(
    asked: Asked,
    source: "ModelSource",
    splits: "dict[str, Split]",
    plan: "FineTuningPlan",
    stopped: "Callable[[], Stop]",
) -> "tuple[LoadedModel, Result]":
    from uma.cli.lora.model import loaded_model
    from uma.measurement.run_status import remember
    from uma.paths import cache_folder, state_folder
    from uma.plan.limits import mlx_limits
    from uma.runtime.blas import prepare_cpu
    from uma.runtime.limits import memory_limits
    from uma.runtime.lora.run import fine_tune

    case = plan.case
    weights = case.form.weights.size_bytes
    peak = plan.ledger.predicted_peak_bytes
    limits = mlx_limits(peak, weights, case.budget, case.machine, wire=not asked.no_wire)
    remember(asked.adapter_path, state_folder() / "runs")
    valid = splits.get("valid")
    with (
        memory_limits(
            wired=limits.wired_limit_bytes,
            cache=limits.cache_limit_bytes,
            memory=max(limits.memory_limit_bytes, case.budget.budget_bytes),
        ),
        _reported(asked) as on_event,
    ):
        assert source.path is not None
        dequantize = "always" if case.form.kind == "float32" else "never"
        loaded = loaded_model(source.path, dequantize, asked.quiet)
        result = fine_tune(
            loaded,
            splits["train"].fitted.examples,
            valid.fitted.examples if valid else (),
            _recipe(asked, splits, plan),
            asked.adapter_path,
            resume=asked.resume,
            data=_data(asked, splits),
            blas=prepare_cpu(cache_folder()).name,
            on_event=on_event,
            stopped=stopped,
            kept=asked.keep,
            about=_about(asked, plan),
        )
    return loaded, result


def _about(asked: Asked, plan: "FineTuningPlan") -> dict[str, Any]:
    """What others may want to know of the run while it goes on, and afterwards."""
    from uma.cli.lora.train import defaults

    default = defaults()
    here = {name: default[name] for name in ONLY_HERE}
    again = replace(asked, **here | {"resume": True})
    told = {
        "cut": asdict(plan.cut),
        "micro_batch": plan.micro_batch,
        "predicted_peak_bytes": plan.ledger.predicted_peak_bytes,
    }
    return {"command": written(arguments(again, default)), "plan": told}


def _recipe(asked: Asked, splits: "dict[str, Split]", plan: "FineTuningPlan") -> "Recipe":
    from uma.cli.lora.config import mapping_of, settings_of
    from uma.cli.lora.plan import adapter_of, course_of
    from uma.runtime.lora.run import Recipe

    return Recipe(
        adapter=adapter_of(asked),
        course=course_of(asked, splits, plan),
        optimizer=asked.optimizer,
        learning_rate=asked.learning_rate,
        warmup=asked.warmup,
        cosine=asked.cosine,
        lr_schedule=mapping_of(asked.lr_schedule, "--lr-schedule"),
        optimizer_config=settings_of(asked.optimizer, asked.optimizer_config),
    )


def _data(asked: Asked, splits: "dict[str, Split]") -> dict[str, Any]:
    """What a resumed run must have equal of its data; a chat template changes tokens too."""
    from uma.dataset.examples import fingerprint

    hashes = {
        f"tokens of {split.path.name}": fingerprint(split.fitted.examples)
        for split in splits.values()
    }
    return hashes | {
        "max_seq_length": asked.max_seq_length,
        "mask_prompt": asked.mask_prompt,
        "overlong": asked.overlong,
    }


@contextmanager
def _reported(asked: Asked) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Events to the terminal, and to what ``--report-to`` names."""
    from uma.runtime.lora.trackers import reporting, trackers

    show, names = _events(asked), trackers(asked.report_to)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(asked).items()}
    tell = partial(say, quiet=asked.json)
    with reporting(names, asked.adapter_path, asked.project_name, settings, tell) as report:

        def on_event(event: dict[str, Any]) -> None:
            show(event)
            report(event)

        yield on_event


def _events(asked: Asked) -> Callable[[dict[str, Any]], None]:
    if asked.progress == "json":
        return lambda event: say(json_module.dumps(event))
    return lambda event: say(_line(event), asked.json)


def _line(event: dict[str, Any]) -> str:
    from uma.report.run_status import span

    at = f"iteration {event['iteration']:,}"
    if event["event"] == "begin":
        return "\n".join([f"{at}: begun", *(f"note: {note}" for note in event["notes"])])
    if event["event"] == "validation":
        return f"{at}: validation loss {event['val_loss']:.3f}{_compared(event)}"
    if event["event"] == "checkpoint":
        return f"{at}: saved"
    return (
        f"{at}: loss {event['train_loss']:.3f}, {event['tokens_per_s']:,.0f} tokens/s, "
        f"memory {format_gib(event['memory_bytes'])}, at most "
        f"{format_gib(event['peak_memory_bytes'])}, {span(event['left_s'])} left"
    )


def _compared(event: dict[str, Any]) -> str:
    if event["iteration"] == 0:
        return " of the untouched model"
    if event["best_iteration"] == event["iteration"]:
        return ", the lowest"
    if event["best_iteration"] == 0:
        return f", above the {event['best_val_loss']:.3f} of the untouched model"
    return ""


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP ask for a checkpoint and an end; a second one ends at once."""
    from uma.runtime.lora.supervise import LEAVE, leaving_signals

    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt("it left at once, as a second signal asked")
        seen.append(number)
        say("saving after this step; once more to leave at once")

    wanted = {LEAVE, *leaving_signals()}
    former = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield seen
    finally:
        for number, before in former.items():
            signal.signal(number, before)
