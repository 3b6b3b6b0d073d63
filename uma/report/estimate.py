"""An estimate as text and as JSON."""

from dataclasses import asdict
from typing import Any

from uma.ledger import peak
from uma.plan.estimate import Estimate
from uma.report import SCHEMA_VERSION
from uma.report.ledger import ledger_text
from uma.report.plan import machine_json
from uma.units import format_gib

BAR_WIDTH = 40


def estimate_text(estimate: Estimate, model_name: str) -> str:
    """The verdict with its context, the terms, and how much of the budget they take."""
    workload, ledger = estimate.workload, estimate.ledger
    lines = [
        f"{model_name}: {estimate.format} on {estimate.machine.name}, engine {estimate.engine}",
        f"{ledger.verdict} at {workload.context_tokens:,} tokens of context, batch "
        f"{workload.batch_size}: {format_gib(ledger.predicted_peak_bytes)} of "
        f"{format_gib(estimate.budget.budget_bytes)}",
        bar(ledger.predicted_peak_bytes, estimate.budget.budget_bytes),
        "",
        ledger_text(ledger, estimate.budget.winner),
        "largest context that fits: "
        + ("none" if estimate.max_context_tokens is None else f"{estimate.max_context_tokens:,}"),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in estimate.notes)])


def bar(size_bytes: int, budget_bytes: int) -> str:
    """A line of ``#`` for what is taken of the budget, ``.`` for what is left.

    >>> bar(1, 4), bar(9, 4)[-1]
    ('[##########..............................]', '>')
    """
    filled = size_bytes * BAR_WIDTH // max(1, budget_bytes)
    if filled > BAR_WIDTH:
        return "[" + "#" * BAR_WIDTH + ">"
    return "[" + "#" * filled + "." * (BAR_WIDTH - filled) + "]"


def estimate_json(estimate: Estimate, model: dict[str, Any]) -> dict[str, Any]:
    """The document of ``uma estimate --json``."""
    ledger = estimate.ledger
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model | {"format": estimate.format},
        "machine": machine_json(estimate.machine),
        "workload": asdict(estimate.workload) | {"engine": estimate.engine},
        "terms": [
            {
                "name": term.name,
                "size_bytes": term.size_bytes,
                "basis": term.basis,
                "source": term.source,
                "phase": term.phase,
            }
            for term in ledger.terms
        ],
        "total_bytes": ledger.predicted_peak_bytes,
        "binding_phase": peak(ledger.terms)[0],
        "budget_bytes": estimate.budget.budget_bytes,
        "limit_bytes": estimate.budget.limit_bytes,
        "headroom_bytes": estimate.headroom_bytes,
        "verdict": ledger.verdict,
        "max_context_tokens": estimate.max_context_tokens,
        "largest_buffer_bytes": estimate.largest_buffer_bytes,
        "decode_tps": None,
        "prompt_tps": None,
        "notes": [*estimate.notes, "speed is not estimated yet"],
    }
