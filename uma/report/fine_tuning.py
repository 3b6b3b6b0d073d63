"""The plan of a fine-tuning run as text and as JSON."""

import datetime
from typing import Any

from uma.plan.fine_tuning import FineTuningPlan, longest
from uma.plan.training.time import Duration
from uma.report import SCHEMA_VERSION
from uma.report.ledger import ledger_text
from uma.report.plan import machine_json
from uma.report.run_status import span
from uma.speed import NotKnown
from uma.units import format_gib


def plan_text(plan: FineTuningPlan, time: Duration | NotKnown, name: str) -> str:
    """The plan before anything is loaded: batches, memory, hours."""
    case = plan.case
    lines = [
        f"{name}: {case.form.name}, on {case.machine.name}",
        batches_text(plan),
        time_text(time),
        "",
        ledger_text(plan.ledger, case.budget.winner),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def batches_text(plan: FineTuningPlan) -> str:
    """The batches on one line: how large, how cut, how many shapes, how much padding."""
    case, (rows, length) = plan.case, plan.worst
    update = f"updates of {_count(case.update_rows, 'row')}"
    if plan.micro_batch < case.rows.batch_size:
        update += f", {plan.micro_batch:,} of the longest at once"
    if plan.cut.row_tokens is not None:
        update += f", packed into {plan.cut.row_tokens:,} tokens"
    return (
        f"{_count(len(case.rows.train), 'row')}, {update}; {_count(len(plan.shapes), 'shape')} of "
        f"{_count(len({length for _, length in plan.shapes}), 'length')} up to "
        f"{longest(plan.shapes):,}, {plan.padding:.0%} padding; "
        f"most memory at {rows} x {length:,}"
    )


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + ("s" if number != 1 else "")


def time_text(time: Duration | NotKnown) -> str:
    """Hours as an interval, and the time of day when it is done."""
    if isinstance(time, NotKnown):
        return f"time not known: {time.reason}"
    first, last = finishing(time)
    each = " to ".join(f"{s:.2g}" for s in time.s_per_iter)
    return (
        f"{time.iters:,} iterations in {span(time.low_s)} to {span(time.high_s)} ({each} s each), "
        f"done between {first:%a %H:%M} and {last:%a %H:%M}; from {time.source}"
    )


def finishing(time: Duration) -> tuple[datetime.datetime, datetime.datetime]:
    """The earliest and the latest end, in local time."""
    begin = datetime.datetime.now().astimezone()
    ends = (begin + datetime.timedelta(seconds=s) for s in (time.low_s, time.high_s))
    return next(ends), next(ends)


def exceeds_text(plan: FineTuningPlan, name: str) -> str:
    """What a plan that exceeds is short of, and what would fit."""
    from uma.plan.fine_tuning_remedies import remedies

    budget, (rows, length) = plan.case.budget, plan.worst
    own = budget.user_bytes is not None and plan.ledger.predicted_peak_bytes > budget.user_bytes
    line = (
        f"your budget is {format_gib(budget.user_bytes or 0)}"
        if own
        else f"the limit is {format_gib(budget.limit_bytes)} ({plan.case.machine.limit_source})"
    )
    first = (
        f"{name} needs {format_gib(plan.ledger.predicted_peak_bytes)} to train on {rows} x "
        f"{length:,} tokens; {line}"
    )
    return "\n  ".join([first, *remedies(plan), "--force goes on anyway"])


def plan_json(plan: FineTuningPlan, time: Duration | NotKnown, name: str) -> dict[str, Any]:
    """The document of ``uma lora train --dry-run --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"name": name, "form": plan.case.form.name},
        "machine": machine_json(plan.case.machine),
        "batches": batches_json(plan),
        "duration": time_json(time),
        "ledger": plan.ledger.to_json(),
        "notes": list(plan.notes),
    }


def batches_json(plan: FineTuningPlan) -> dict[str, Any]:
    case, (rows, length) = plan.case, plan.worst
    shapes = sorted(plan.shapes.items(), key=lambda one: (one[0][1], one[0][0]))
    return {
        "rows": len(case.rows.train),
        "batch_size": case.rows.batch_size,
        "grad_accumulation_steps": case.workload.grad_accumulation_steps,
        "micro_batch": plan.micro_batch,
        "pass_tokens": plan.pass_tokens,
        "row_tokens": plan.cut.row_tokens,
        "loss_slice_bytes": plan.cut.loss_slice_bytes,
        "attention_slice_bytes": plan.cut.attention_slice_bytes,
        "worst": {"rows": rows, "tokens": length},
        "shapes": [{"rows": r, "tokens": t, "passes": n} for (r, t), n in shapes],
        "padding_share": plan.padding,
    }


def time_json(time: Duration | NotKnown) -> dict[str, Any]:
    if isinstance(time, NotKnown):
        return {"duration_s_low": None, "duration_s_high": None, "reason": time.reason}
    first, last = finishing(time)
    return {
        "duration_s_low": time.low_s,
        "duration_s_high": time.high_s,
        "s_per_iter_low": time.s_per_iter[0],
        "s_per_iter_high": time.s_per_iter[1],
        "finishes_low": first.isoformat(timespec="seconds"),
        "finishes_high": last.isoformat(timespec="seconds"),
        "source": time.source,
    }
