"""A plan as text and as JSON."""

from dataclasses import asdict
from typing import Any

from uma.checkpoint.source import ModelSource
from uma.machine import Machine
from uma.plan.inference import InferencePlan
from uma.report import SCHEMA_VERSION
from uma.report.ledger import ledger_text
from uma.units import format_gib


def plan_text(plan: InferencePlan, model_name: str) -> str:
    """The plan before anything is loaded: what, where, the ledger, and what to know."""
    lines = [
        f"{model_name}: {plan.form.name}, on {plan.machine.name}",
        settings_text(plan),
        "",
        ledger_text(plan.ledger, plan.budget.winner),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def settings_text(plan: InferencePlan) -> str:
    """Context, prefill step and precisions on one line."""
    workload = plan.workload
    cache = (
        f"{workload.kv_bits}-bit" if workload.kv_bits else f"{8 * plan.form.activation_bytes}-bit"
    )
    return (
        f"context {workload.context_tokens:,} tokens, prefill step {workload.prefill_step_size:,}, "
        f"weights {plan.form.name}, KV cache {cache}, "
        f"largest buffer {format_gib(plan.largest_buffer_bytes)}"
    )


def exceeds_text(plan: InferencePlan, source: ModelSource) -> str:
    """What a plan that exceeds is short of, and what would fit, the cheapest change first."""
    from uma.plan.advice import advice

    line = (
        f"{source.name} needs {format_gib(plan.ledger.predicted_peak_bytes)} for "
        f"{plan.workload.context_tokens:,} tokens of context; "
    )
    most = plan.machine.max_buffer_bytes
    if most is not None and plan.largest_buffer_bytes > most:
        line += (
            f"its largest array takes {format_gib(plan.largest_buffer_bytes)}, and the device "
            f"allows {format_gib(most)}"
        )
    elif plan.budget.user_bytes is not None and plan.active_peak_bytes > plan.budget.user_bytes:
        line += f"your budget is {format_gib(plan.budget.user_bytes)}"
    else:
        line += f"the limit is {format_gib(plan.budget.limit_bytes)} ({plan.machine.limit_source})"
    return "\n  ".join([line, *advice(plan, source), "--force goes on anyway"])


def plan_json(plan: InferencePlan, model: dict[str, Any]) -> dict[str, Any]:
    """The parts of ``uma run --json`` that are known before the run."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "machine": machine_json(plan.machine),
        "settings": settings_json(plan),
        "ledger": plan.ledger.to_json(),
        "largest_buffer_bytes": plan.largest_buffer_bytes,
        "notes": list(plan.notes),
    }


def machine_json(machine: Machine) -> dict[str, Any]:
    return asdict(machine)


def settings_json(plan: InferencePlan) -> dict[str, Any]:
    return asdict(plan.workload) | {"form": plan.form.name, "budget_source": plan.budget.winner}
