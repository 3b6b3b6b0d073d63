"""The process that trains: data, plan, model, run, report."""

import hashlib
import json as json_module
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import ONLY_HERE, Asked, arguments, written
from uma.cli.progress import say
from uma.errors import StorageError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.dataset.check import Split
    from uma.plan.fine_tuning import Cut, FineTuningPlan
    from uma.runtime.load import LoadedModel
    from uma.runtime.lora.run import Recipe, Result

INTERRUPTED = 130


def work(asked: Asked, parent: int) -> int:
    """Train, and print how it went. It is saved and left when ``parent`` is gone."""
    from uma.cli.lora.data import tokenizer_of
    from uma.cli.lora.model import heavy
    from uma.runtime.lora.supervise import TERMINAL

    if os.environ.get(TERMINAL):  # the parent shows what this process writes on its terminal
        sys.stderr.isatty = lambda: True  # type: ignore[method-assign]
    source, encoder = tokenizer_of(asked.model, quiet=asked.quiet, yes=asked.yes)
    from uma.runtime.lora.run import require_free

    require_free(asked.adapter_path, asked.resume)
    with heavy(
        "uma lora train",
        quiet=asked.quiet,
        wait=asked.wait,
        allow_concurrent=asked.allow_concurrent,
    ):
        from uma.cli.lora.plan import read_splits

        splits = read_splits(asked, encoder)
        plan = _plan(asked, source, splits)
        _require_room(asked, plan)
        with _stop_signals() as seen:
            loaded, result = _trained(
                asked, source, splits, plan, lambda: bool(seen) or os.getppid() != parent
            )
    from uma.cli.lora.result import tell_result

    tell_result(asked, source, loaded, plan, result)
    return INTERRUPTED if result.ending == "stopped" else 0


def _plan(asked: Asked, source: "ModelSource", splits: "dict[str, Split]") -> "FineTuningPlan":
    """The plan, told; a resumed run is cut as it was.

    Raises:
        DoesNotFit: If it exceeds the limit, unless it is forced.
    """
    from uma.cli.lora.plan import course_of, duration_of, exceeded, planned
    from uma.cli.session import live_machine
    from uma.report.fine_tuning import batches_text, time_text

    machine = live_machine()
    cut, done = _begun(asked)
    plan = planned(asked, source, splits, machine, cut)
    ledger, budget = plan.ledger, plan.case.budget
    if ledger.verdict == "exceeds":
        error = exceeded(plan, source.name)
        if not asked.force:
            raise error
        say(f"uma: going on although {error.args[0].splitlines()[0]}", asked.quiet)
    say(batches_text(plan), asked.quiet)
    say(
        f"peak {format_gib(ledger.predicted_peak_bytes)} of {format_gib(budget.budget_bytes)}: "
        f"{ledger.verdict}; " + time_text(duration_of(asked, plan, course_of(asked, splits), done)),
        asked.quiet,
    )
    for note in plan.notes:
        say(f"note: {note}", asked.quiet)
    return plan


def _begun(asked: Asked) -> "tuple[Cut | None, int]":
    """How a resumed run was cut until now, and how many batches are done."""
    from uma.measurement.run_folder import checkpoints, events, read_state
    from uma.plan.fine_tuning import Cut

    if not asked.resume:
        return None, 0
    plans = [event["plan"] for event in events(asked.adapter_path) if event.get("plan")]
    done = read_state(checkpoints(asked.adapter_path)[-1]).progress.iteration
    if not plans:
        return None, done
    return Cut(**{name: plans[-1][name] for name in Cut.__slots__}), done


def _require_room(asked: Asked, plan: "FineTuningPlan") -> None:
    """Refuse a folder that cannot be written, or a disk that the checkpoints would fill.

    Raises:
        Busy: If another process trains there.
        StorageError: With what is needed and what is there.
    """
    from uma.engines.mlx_training import optimizer_bytes, trained_arrays
    from uma.measurement.run_folder import held

    case = plan.case
    arrays = trained_arrays(case.architecture, case.workload)
    trained = sum(array.size_bytes for array in arrays)
    # The checkpoints that stay and the one being written; the adapter, its copy, the best one.
    needed = (asked.keep + 1) * (trained + optimizer_bytes(case.workload, arrays)) + 3 * trained
    with held(asked.adapter_path):
        free = shutil.disk_usage(asked.adapter_path).free
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
    stopped: Callable[[], bool],
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
    told = asdict(plan.cut) | {"micro_batch": plan.micro_batch}
    told["predicted_peak_bytes"] = plan.ledger.predicted_peak_bytes
    return {"command": written(arguments(again, default)), "plan": told}


def _recipe(asked: Asked, splits: "dict[str, Split]", plan: "FineTuningPlan") -> "Recipe":
    from uma.cli.lora.config import mapping_of, settings_of
    from uma.cli.lora.plan import course_of
    from uma.runtime.lora.adapter import Adapter
    from uma.runtime.lora.run import Recipe

    return Recipe(
        adapter=Adapter(
            method=asked.fine_tune_type,
            num_layers=asked.num_layers,
            rank=asked.rank,
            scale=asked.scale,
            dropout=asked.dropout,
            keys=tuple(asked.keys) if asked.keys else None,
        ),
        course=course_of(asked, splits, plan),
        optimizer=asked.optimizer,
        learning_rate=asked.learning_rate,
        warmup=asked.warmup,
        cosine=asked.cosine,
        lr_schedule=mapping_of(asked.lr_schedule, "--lr-schedule"),
        optimizer_config=settings_of(asked.optimizer, asked.optimizer_config),
    )


def _data(asked: Asked, splits: "dict[str, Split]") -> dict[str, Any]:
    """What a resumed run must have equal of its data."""
    hashes = {
        f"{name}.jsonl": hashlib.sha256(splits[name].path.read_bytes()).hexdigest()[:16]
        for name in ("train", "valid")
        if name in splits
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
        best = event["best_iteration"] == event["iteration"]
        return f"{at}: validation loss {event['val_loss']:.3f}" + (", the lowest" if best else "")
    if event["event"] == "checkpoint":
        return f"{at}: saved"
    return (
        f"{at}: loss {event['train_loss']:.3f}, {event['tokens_per_s']:,.0f} tokens/s, "
        f"memory {format_gib(event['memory_bytes'])}, at most "
        f"{format_gib(event['peak_memory_bytes'])}, {span(event['left_s'])} left"
    )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and SIGHUP ask for a checkpoint and an end; a second one ends at once."""
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        say("saving after this step; once more to leave at once")

    wanted = [signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])]
    former = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield seen
    finally:
        for number, before in former.items():
            signal.signal(number, before)
