"""A comparison of machines as JSON and as CSV."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from uma.plan.compare import Comparison, HostProfile, Plan, Row
from uma.plan.compare.costs import tokens_per_joule
from uma.plan.compare.plans import first_token_s
from uma.plan.compare.subject import Subject
from uma.report import SCHEMA_VERSION
from uma.report.compare import speed_of
from uma.report.compare_notes import notes_of
from uma.speed.rate import NotKnown, Rate


def compare_json(
    found: Sequence[Comparison], model: dict[str, Any], host: HostProfile
) -> dict[str, Any]:
    """The document of ``uma compare --json``; of several contexts the plans of all."""
    first = found[0]
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "workload": _workload(first),
        "prefer": first.wanted.prefer,
        "host": _host(host),
        "use": asdict(first.wanted.use),
        "plans": [row_json(row, one) for one in found for row in one.rows],
    }
    if len(found) == 1:
        return document | _choice(first)
    return document | {"contexts": [_workload(one) | _choice(one) for one in found]}


def _workload(found: Comparison) -> dict[str, Any]:
    subject, wanted = found.subject, found.wanted
    asked = asdict(subject.workload) | {"min_bits": wanted.min_bits, "min_tps": wanted.min_tps}
    if not isinstance(subject, Subject):
        del asked["sharding"], asked["grad_checkpoint"], asked["optimizer"], asked["quantized"]
        return {"train": subject.kind} | asked
    room = subject.workload.context_tokens
    return asked | {"context_tokens": subject.tokens, "min_context_tokens": room}


def _host(host: HostProfile) -> dict[str, Any]:
    price = None if host.price is None else host.price.usd
    values = {name: value for name, value in asdict(host).items() if name != "price"}
    return values | {"price_usd": price}


def _choice(found: Comparison) -> dict[str, Any]:
    return {
        "cheapest": None if found.cheapest is None else found.cheapest.candidate.name,
        "cheapest_reason": found.cheapest_reason,
        "cheapest_left_out": [{"machine": name, "reason": why} for name, why in found.left_out],
        "pareto_front": [row.candidate.name for row in found.front],
        "hidden": found.hidden,
    }


def row_json(row: Row, found: Comparison) -> dict[str, Any]:
    """One plan: the contract's names, and more."""
    candidate, machine = row.candidate, row.candidate.machine
    several = f"{candidate.number} x " if candidate.number > 1 else ""
    price, parts = candidate.price, candidate.parts_price
    devices = [device.name for device in machine.devices]
    devices = devices or [machine.chip or machine.cpu or machine.name] * candidate.number
    return {
        "machine": candidate.name,
        "title": f"{several}{machine.name}",
        "kind": "discrete" if candidate.discrete else "unified",
        "devices": devices,
        **_plan_json(row, found),
        "price_usd": None if price is None else price.usd,
        "price_kind": None if price is None else price.kind,
        "price_date": None if price is None else price.date,
        "price_reason": candidate.price_reason,
        "devices_price_usd": None if parts is None else parts.usd,
        "sold": candidate.sold,
        **_cost_json(row, found),
        "notes": notes_of(row, found),
        "rejected": [
            {"format": plan.format, "technique": plan.technique, "reason": why}
            for plan, why in row.rejected
        ],
    }


NOT_FLAT = ("notes", "rejected", "sharding")  # of the JSON, left out of a spreadsheet

PLAN_KEYS: dict[str, Callable[[Plan], Any]] = {
    "technique": lambda plan: plan.technique,
    "engine": lambda plan: plan.engine,
    "format": lambda plan: plan.format,
    "bits": lambda plan: plan.bits,
    "bits_per_weight": lambda plan: round(plan.bits_per_weight, 4),
    "device_bytes": lambda plan: plan.device_bytes,
    "host_bytes": lambda plan: plan.host_bytes,
    "disk_bytes": lambda plan: plan.disk_bytes,
    "budget_bytes": lambda plan: plan.budget_bytes,
    "headroom_bytes": lambda plan: plan.headroom_bytes,
    "verdict": lambda plan: plan.verdict,
    "options": lambda plan: list(plan.options),
}


def _plan_json(row: Row, found: Comparison) -> dict[str, Any]:
    """The plan; where there is none every value is null, and the verdict unknown."""
    plan, subject, none = row.plan, found.subject, NotKnown(row.reason or "")
    values: dict[str, Any] = {
        name: None if plan is None else value(plan) for name, value in PLAN_KEYS.items()
    }
    values["verdict"] = values["verdict"] or "unknown"
    speed = none if plan is None else speed_of(plan)
    if not isinstance(subject, Subject):
        values |= _interval("train_tps", speed, 1) | _recipe_json(plan)
        return values | {"decode_tps": None, "prompt_tps": None}  # nothing is generated
    number = subject.workload.batch_size
    return (
        values
        | {"context_tokens": subject.tokens}
        | {"kv_cache_bytes": None if plan is None else plan.cache_bytes}
        | _interval("decode_tps", speed, number)
        | _interval("total_decode_tps", speed, 1)
        | _interval("prompt_tps", none if plan is None else plan.prompt, 1)
        | _interval("ttft_s", none if plan is None else first_token_s(plan, subject.tokens), 1)
    )


def _recipe_json(plan: Plan | None) -> dict[str, Any]:
    """How the plan trains."""
    names = ("quantized", "optimizer", "grad_checkpoint", "sharding")
    if plan is None or plan.recipe is None:
        return dict.fromkeys(names)
    workload = plan.recipe.workload
    return {
        "quantized": workload.quantized or None,
        "optimizer": workload.optimizer,
        "grad_checkpoint": workload.grad_checkpoint,
        "sharding": asdict(workload.sharding),
    }


def _cost_json(row: Row, found: Comparison) -> dict[str, Any]:
    candidate, cost = row.candidate, found.cost(row)
    total = None
    if row.runs and row.plan is not None and isinstance(row.plan.decode, Rate):
        total = row.plan.decode.best
    yielded, why = tokens_per_joule(candidate, total)
    return {
        "power_w": candidate.power_w,
        "power_reason": candidate.power_reason,
        "tokens_per_joule": None if yielded is None else _round(yielded),
        "tokens_per_joule_reason": why,
        "rent_usd_per_h": candidate.rent_usd_per_h,
        "total_cost_usd": _rounded(cost.owned_usd),
        "total_cost_reason": cost.reason,
        "energy_cost_usd": _rounded(cost.energy_usd),
        "rent_cost_usd": _rounded(cost.rented_usd),
        "break_even_hours": _rounded(cost.break_even_h),
        "break_even_against": cost.rented,
        "break_even_reason": cost.break_even_reason,
    }


def _interval(name: str, rate: Rate | NotKnown, number: int) -> dict[str, Any]:
    """``name`` with ``_low`` and ``_high`` beside it; null with the reason where not known."""
    if isinstance(rate, NotKnown):
        missing = dict.fromkeys((name, f"{name}_low", f"{name}_high"))
        return {**missing, f"{name}_source": None, f"{name}_reason": rate.reason}
    return {
        name: _round(rate.best / number),
        f"{name}_low": _round(rate.low / number),
        f"{name}_high": _round(rate.high / number),
        f"{name}_source": f"{rate.basis}: {rate.source}",
        f"{name}_reason": None,
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def compare_csv(found: Sequence[Comparison]) -> str:
    """A line a machine and context, the columns of the JSON's plans that are one value."""
    import csv
    import io

    rows = [row_json(row, one) for one in found for row in one.rows]
    columns = [name for name in rows[0] if name not in NOT_FLAT] if rows else ["machine"]
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _flat(value) for name, value in row.items()} for row in rows)
    return file.getvalue().rstrip("\n")


def _flat(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value
