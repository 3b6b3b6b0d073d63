"""A training estimate as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from uma.ledger import phase_totals
from uma.memory.term import MemoryTerm
from uma.plan.training import Measure, TrainingEstimate
from uma.units import format_gib


def training_text(found: TrainingEstimate, model_name: str) -> str:
    """The verdict, the terms, the phases, what fits, and what would help."""
    return "\n".join(_lines(found, model_name))


def _lines(found: TrainingEstimate, model_name: str) -> Iterator[str]:
    workload, ledger = found.case.workload, found.ledger
    yield f"{model_name}: {_method(found)} under {found.case.engine} on {found.case.machine.name}"
    rows = "1 row" if workload.batch_size == 1 else f"{workload.batch_size} rows"
    yield (
        f"{rows} of {workload.max_seq_length:,} tokens, {workload.optimizer}, "
        f"{_checkpointing(workload.grad_checkpoint)}"
    )
    yield ""
    needed, budget = ledger.predicted_peak_bytes, ledger.budget_bytes or 0
    left = budget - needed
    rest = f"{format_gib(left)} left" if left >= 0 else f"{format_gib(-left)} too much"
    yield f"{ledger.verdict}: {format_gib(needed)} of {format_gib(budget)}, {rest}"
    yield f"the {found.phase} phase needs most"
    yield ""
    for term in ledger.terms:
        if term.size_bytes and term.phase in ("always", found.phase):
            size = format_gib(term.size_bytes)
            yield f"  {term.name:17} {size:>11}  {term.basis:6}  {term.source}"
    totals = phase_totals(ledger.terms)
    yield ""
    yield "phases: " + ", ".join(f"{name} {format_gib(size)}" for name, size in totals.items())
    fits = [f"{name} {value:,}" for name, value in found.largest.items() if value]
    yield f"largest that fits, each alone: {', '.join(fits) or 'nothing'}"
    if found.host_bytes or found.disk_bytes:
        yield f"host {format_gib(found.host_bytes)}, disk {format_gib(found.disk_bytes)}"
    if found.sent_bytes:
        sent = (f"{name} {format_gib(size)}" for name, size in found.sent_bytes.items())
        yield f"each device sends in a step: {', '.join(sent)}"
    for measure in found.measures:
        yield f"  {measure.name}: saves {format_gib(measure.saves_bytes)}; time: {measure.cost}"
        yield f"    {' '.join(measure.options)}"
    yield from (f"note: {note}" for note in found.notes)


def _method(found: TrainingEstimate) -> str:
    workload = found.case.workload
    rank = "" if workload.method == "full" else f" of rank {workload.rank}"
    base = f" on {workload.quantized}" if workload.quantized else ""
    return f"{workload.method}{rank}{base}, {found.trainable_parameters:,} trained parameters"


def _checkpointing(every: int) -> str:
    if not every:
        return "no checkpointing"
    return "every layer checkpointed" if every == 1 else f"a checkpoint every {every} layers"


def training_json(found: TrainingEstimate, model: dict[str, Any]) -> dict[str, Any]:
    """The document of ``uma estimate --train --json``."""
    case, ledger = found.case, found.ledger
    workload, needed = case.workload, ledger.predicted_peak_bytes
    return {
        "schema_version": 1,
        "model": model,
        "machine": {"name": case.machine.name, "kind": case.machine.kind},
        "engine": case.engine,
        "workload": {
            "method": workload.method,
            "rank": None if workload.method == "full" else workload.rank,
            "targets": list(workload.targets),
            "num_layers": workload.num_layers,
            "batch_size": workload.batch_size,
            "max_seq_length": workload.max_seq_length,
            "grad_checkpoint": workload.grad_checkpoint,
            "grad_accumulation_steps": workload.grad_accumulation_steps,
            "optimizer": workload.optimizer,
            "quantized": workload.quantized or None,
            "loss": workload.loss,
            "attention": workload.attention,
            "mem_kind": workload.mem_kind,
        },
        "trainable_parameters": found.trainable_parameters,
        "terms": [_term_json(term) for term in ledger.terms],
        "total_bytes": needed,
        "binding_phase": found.phase,
        "phases": {f"{k}_bytes": v for k, v in phase_totals(ledger.terms).items()},
        "budget_bytes": ledger.budget_bytes,
        "limit_bytes": ledger.limit_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.disk_bytes,
        "sent_bytes": found.sent_bytes,
        "headroom_bytes": (ledger.budget_bytes or 0) - needed,
        "verdict": ledger.verdict,
        "largest": found.largest,
        "measures": [_measure_json(measure) for measure in found.measures],
        "notes": list(found.notes),
    }


def _term_json(term: MemoryTerm) -> dict[str, Any]:
    return {
        "name": term.name,
        "size_bytes": term.size_bytes,
        "basis": term.basis,
        "source": term.source,
        "phase": term.phase,
    }


def _measure_json(measure: Measure) -> dict[str, Any]:
    return {
        "name": measure.name,
        "options": list(measure.options),
        "saves_bytes": measure.saves_bytes,
        "cost": measure.cost,
    }
