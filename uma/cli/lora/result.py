"""What a run of ``uma lora train`` ends with: its document, its record, its lines."""

import json as json_module
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import Asked
from uma.cli.progress import say
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.ledger import Ledger
    from uma.measurement.run_folder import Progress
    from uma.plan.fine_tuning import FineTuningPlan
    from uma.runtime.load import LoadedModel
    from uma.runtime.lora.run import Result


PLANNED = 0.05
"""From so much above its plan on a run is told to have needed more."""


def tell_result(
    asked: Asked,
    source: "ModelSource",
    loaded: "LoadedModel",
    plan: "FineTuningPlan",
    result: "Result",
) -> None:
    """Print how a run went, and keep a record of it on this machine if that is wanted."""
    document = _document(asked, source, loaded, plan, result)
    if not asked.no_record:
        _keep(asked, source, document)
    if asked.json:
        print(json_module.dumps(document, indent=2))
        return
    from uma.report.ledger import ledger_text

    print(ledger_text(_measured(plan, loaded, result), plan.case.budget.winner) + "\n")
    print(", ".join(_parts(asked, document, result)))
    over = result.held.peak_bytes / plan.ledger.predicted_peak_bytes - 1
    if over > PLANNED and plan.ledger.verdict != "unknown":
        print(f"note: it took {over:.0%} more than planned; leave as much free next time")
    if result.ending == "stopped":
        again = " and --resume" if result.progress.iteration else ""
        print(f"stopped; continue with the same command{again} ({asked.adapter_path})")


def tell_nothing_left(asked: Asked, reason: str) -> int:
    """Print where a run stands of which nothing is left to do, and write nothing; the exit code."""
    from uma.measurement.run_folder import last_progress
    from uma.report import SCHEMA_VERSION

    if not asked.json:
        print(f"{asked.adapter_path}: {reason}")
        return 0
    unknown = ("tokens_per_s", "s_per_iter", "trainable_parameters", "model", "machine", "ledger")
    document = {
        "schema_version": SCHEMA_VERSION,
        "ending": "done",
        **_progress_json(last_progress(asked.adapter_path)),
        **dict.fromkeys(unknown),
        "adapter_path": str(asked.adapter_path),
        "settings": _settings_json(asked),
        "notes": [reason],
    }
    print(json_module.dumps(document, indent=2))
    return 0


def _progress_json(done: "Progress") -> dict[str, Any]:
    return {
        "iters": done.iteration,
        "train_loss": done.train_loss,
        "val_loss": done.val_loss,
        "best_val_loss": done.best_val_loss,
        "best_iteration": done.best_iteration,
        "trained_tokens": done.trained_tokens,
    }


def _settings_json(asked: Asked) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(asked).items()}


def _measured(plan: "FineTuningPlan", loaded: "LoadedModel", result: "Result") -> "Ledger":
    """The terms of the plan beside what of them was measured.

    Of a phase with several temporaries only the peak is known, and none before an update.
    """
    held, terms = result.held, plan.ledger.terms
    measured = {
        ("weights", "always"): loaded.weights_bytes,
        ("adapters", "always"): held.adapter_bytes,
        ("optimizer_states", "always"): held.optimizer_bytes,
    }
    for phase, size in held.peaks.items():
        there = [term for term in terms if term.phase in (phase, "always")]
        own = [term for term in there if term.phase == phase and term.basis != "exact"]
        if len(own) == 1:
            sizes = [measured.get((t.name, t.phase), t.size_bytes) for t in there if t != own[0]]
            measured[own[0].name, phase] = max(0, size - sum(sizes))
    peak = held.peak_bytes if "optimizer" in held.peaks else None
    return replace(plan.ledger, measured=measured, measured_peak_bytes=peak)


def _document(
    asked: Asked,
    source: "ModelSource",
    loaded: "LoadedModel",
    plan: "FineTuningPlan",
    result: "Result",
) -> dict[str, Any]:
    from uma.report import SCHEMA_VERSION
    from uma.report.fine_tuning import batches_json
    from uma.report.plan import machine_json
    from uma.runtime.versions import versions

    held = result.held
    peaks = {f"{name}_peak_bytes": size for name, size in held.peaks.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "ending": result.ending,
        **_progress_json(result.progress),
        "tokens_per_s": result.tokens_per_s,
        "s_per_iter": result.s_per_iter,
        "trainable_parameters": result.trainable_parameters,
        "adapter_path": str(asked.adapter_path),
        "model": {
            "name": source.name,
            "model_type": (source.config or {}).get("model_type"),
            "form": loaded.form,
            "weights_bytes": loaded.weights_bytes,
        },
        "machine": machine_json(plan.case.machine),
        "settings": _settings_json(asked),
        "versions": versions(),
        "batches": batches_json(plan),
        "ledger": _measured(plan, loaded, result).to_json()
        | {"resting_bytes": held.resting_bytes, "pool_bytes": held.pool_bytes, **peaks},
        "notes": [*plan.notes, *result.notes],
    }


def _keep(asked: Asked, source: "ModelSource", document: dict[str, Any]) -> None:
    """Record a run on this machine; a failure is only noted."""
    from uma.paths import records_folder
    from uma.records import model_name, write_record

    name = model_name(source.name, local=source.repo is None)
    batches = document["batches"]
    speeds = ("tokens_per_s", "s_per_iter", "trained_tokens", "iters", "trainable_parameters")
    kept = {
        "command": "lora train",
        "model": document["model"] | {"name": name},
        "machine": document["machine"],
        "versions": document["versions"],
        "settings": document["settings"]
        | {"worst_rows": batches["worst"]["rows"], "worst_tokens": batches["worst"]["tokens"]}
        | {key: batches[key] for key in ("micro_batch", "pass_tokens", "loss_slice_bytes")},
        "ledger": document["ledger"],
        "speeds": {key: document[key] for key in speeds},
    }
    note = write_record(kept, records_folder()).note
    if note is not None:
        say(f"note: {note}", asked.quiet)


def _parts(asked: Asked, document: dict[str, Any], result: "Result") -> Iterator[str]:
    done = result.progress
    yield f"{asked.adapter_path}: {done.iteration:,} iterations"
    if result.ending == "patience":
        yield "ended because the validation loss no longer falls"
    yield f"{result.trainable_parameters:,} trained parameters"
    if done.train_loss is not None:
        yield f"loss {done.train_loss:.3f}"
    if done.val_loss is not None:
        yield f"validation loss {done.val_loss:.3f}"
    if done.best_iteration == 0:
        yield f"no adapter was better than the untouched model, which had {done.best_val_loss:.3f}"
    elif done.best_iteration is not None and done.best_iteration != done.iteration:
        yield (
            f"lowest {done.best_val_loss:.3f} at iteration {done.best_iteration:,} "
            f"(in {asked.adapter_path / 'best'})"
        )
    ledger = document["ledger"]
    above = result.held.peak_bytes - result.held.resting_bytes
    yield f"peak {format_gib(result.held.peak_bytes)}, {format_gib(above)} above the model"
    if ledger["verdict"] != "unknown":
        yield f"{format_gib(ledger['predicted_peak_bytes'])} predicted"
