"""A comparison of machines as a table, as JSON and as CSV."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from uma.plan.compare import YOURS, Comparison, HostProfile, Plan, Price, Row
from uma.report import SCHEMA_VERSION
from uma.report.text import table
from uma.speed.prefill import time_to_first_token_s
from uma.speed.rate import NotKnown, Rate
from uma.units import GB, GIB, format_gib

BAR_WIDTH = 10
FEW_ROWS = 4  # up to so many, every plan that was not taken is told, else the best of them
REASONS = 2

HEAD = ("machine", "weights", "how", "GiB of", "verdict", "tokens/s", "", "prompt/s", "US$")
ALIGN = "<<<><><>>"


def compare_text(found: Comparison, model_name: str, host: HostProfile) -> str:
    """A line a machine, what is best of them all, and why better plans were not taken."""
    fastest = max((row.decode_tps or 0.0 for row in found.rows), default=0.0)
    rows = [HEAD, *(_cells(row, found, fastest) for row in found.rows)]
    lines = [*_header(found, model_name, host), "", table(rows, ALIGN), ""]
    return "\n".join([*lines, *_verdicts(found), *_reasons(found), *_notes(found)])


def _header(found: Comparison, model_name: str, host: HostProfile) -> Iterator[str]:
    workload, wanted = found.subject.workload, found.wanted
    requests = "one request at a time"
    if workload.batch_size > 1:
        requests = f"{workload.batch_size} requests at once, tokens/s of each"
    if workload.kv_bits is not None:
        requests += f", KV cache in {workload.kv_bits} bits"
    yield (
        f"{model_name} at {workload.context_tokens:,} tokens of context, {requests}; at least "
        f"{wanted.min_bits} bits and {wanted.min_tps:g} tokens/s, --prefer {wanted.prefer}"
    )
    if any(row.candidate.host_bandwidth_bytes_per_s for row in found.rows):
        yield (
            f"cards are taken to be in a host with {format_gib(host.memory_bytes)} at "
            f"{host.bandwidth_bytes_per_s / GB:g} GB/s: --host-ram, --host-bandwidth"
        )


def _cells(row: Row, found: Comparison, fastest: float) -> tuple[str, ...]:
    plan, name = row.plan, row.candidate.name
    if plan is None:
        return (name, "", "no engine that is modelled runs it", "", "unknown", "", "", "", "")
    number = found.subject.workload.batch_size
    return (
        name,
        plan.format,
        f"{plan.technique}, {plan.engine}",
        _memory(plan),
        plan.verdict,
        _rate(plan.decode, number),
        "#" * round(BAR_WIDTH * (row.decode_tps or 0) / fastest) if fastest else "",
        _rate(plan.prompt, 1, interval=False),
        _price(row.candidate.price) or _parts(row),
    )


def _memory(plan: Plan) -> str:
    held = f"{plan.device_bytes / GIB:.1f} of {plan.budget_bytes / GIB:.1f}"
    beside = [f"{plan.host_bytes / GIB:.1f} host"] if plan.host_bytes else []
    beside += [f"{plan.disk_bytes / GIB:.1f} disk"] if plan.disk_bytes else []
    return " + ".join([held, *beside])


def _rate(rate: Rate | NotKnown, number: int, *, interval: bool = True) -> str:
    """A rate of each of ``number`` requests, with what eight in ten measurements are within."""
    if isinstance(rate, NotKnown):
        return "?"
    low, best, high = (value / number for value in (rate.low, rate.best, rate.high))
    digits = 0 if best >= 100 else 1 if best >= 1 else 2
    shown = f"{best:.{digits}f}"
    return f"{shown} ({low:.{digits}f} to {high:.{digits}f})" if interval else shown


def _price(price: Price | None) -> str:
    if price is None:
        return ""
    return f"{price.usd:,} {price.kind}" + (f" {price.date}" if price.date else "")


def _parts(row: Row) -> str:
    parts = row.candidate.parts_price
    if row.candidate.price_reason == YOURS:
        return "yours"
    return "?" if parts is None else f"{_price(parts)} + host"


def _verdicts(found: Comparison) -> Iterator[str]:
    if found.cheapest is None:
        yield f"cheapest: {found.cheapest_reason}"
    else:
        one = found.cheapest
        yield (
            f"cheapest with {found.wanted.min_tps:g} tokens/s: {one.candidate.name}, "
            f"US$ {_price(one.candidate.price)}"
        )
    if len(found.front) > 1:
        names = ", ".join(row.candidate.name for row in found.front)
        yield f"beaten by none in price, speed and memory to spare at once: {names}"
    if found.hidden:
        yield f"{found.hidden} more are sold and not shown: --machine NAME, or --all"


def _reasons(found: Comparison) -> Iterator[str]:
    """Of each format the plan that came closest; in a long table those of the nearest formats."""
    told = [row for row in found.rows if row.rejected or (row.plan and not row.runs)]
    if told:
        yield "why nothing better:"
    for row in told:
        closest = {plan.bits: (plan, why) for plan, why in reversed(_by_distance(row, found))}
        reasons = [f"{plan.format} {plan.technique}: {why}" for plan, why in closest.values()]
        if len(found.rows) > FEW_ROWS:
            yield f"  {row.candidate.name}: {'; '.join(reasons[:REASONS])}"
        else:
            yield from (f"  {row.candidate.name}: {reason}" for reason in reasons)


def _by_distance(row: Row, found: Comparison) -> list[tuple[Plan, str]]:
    """All that is no answer, the widest format first, and of each what came closest first."""
    assert row.plan is not None
    own = row.plan.shortcoming(found.wanted.min_tps)
    rejected = list(row.rejected) if own is None else [*row.rejected, (row.plan, own)]
    return sorted(
        rejected,
        key=lambda one: (-one[0].bits, not one[0].runs, one[0].short_bytes),
    )


def _notes(found: Comparison) -> Iterator[str]:
    seen: dict[str, list[str]] = {}
    for row in found.rows:
        for note in (*_notes_of(row), *_too_long(row, found)):
            seen.setdefault(note, []).append(row.candidate.name)
    for note, names in seen.items():
        where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"note: {where}: {note}"


def _too_long(row: Row, found: Comparison) -> Iterator[str]:
    """Beyond what the model was made for: of MLX the plan itself says so."""
    longest = found.subject.architecture.max_position_embeddings
    asked = found.subject.workload.context_tokens
    if row.runs and row.plan and row.plan.engine != "mlx" and longest and asked > longest:
        yield f"the model was made for {longest:,} tokens of context"


def _notes_of(row: Row) -> Iterator[str]:
    if row.plan is None:
        return
    if row.plan.options and row.plan.technique != "resident":
        command = row.plan.options[0].startswith("sudo")
        yield " ".join([*([] if command else [row.plan.engine]), *row.plan.options])
    yield from row.plan.notes
    for name, rate in (("tokens/s", row.plan.decode), ("prompt/s", row.plan.prompt)):
        if isinstance(rate, Rate):
            yield from rate.notes
        elif row.runs:
            yield f"{name}: {rate.reason}"


def compare_json(found: Comparison, model: dict[str, Any], host: HostProfile) -> dict[str, Any]:
    """The document of ``uma compare --json``."""
    cheapest = found.cheapest
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "workload": asdict(found.subject.workload)
        | {"min_bits": found.wanted.min_bits, "min_tps": found.wanted.min_tps},
        "prefer": found.wanted.prefer,
        "host": {
            "memory_bytes": host.memory_bytes,
            "bandwidth_bytes_per_s": host.bandwidth_bytes_per_s,
            "price_usd": None if host.price is None else host.price.usd,
        },
        "plans": [_row_json(row, found) for row in found.rows],
        "cheapest": None if cheapest is None else cheapest.candidate.name,
        "cheapest_reason": found.cheapest_reason,
        "pareto_front": [row.candidate.name for row in found.front],
        "hidden": found.hidden,
    }


def _row_json(row: Row, found: Comparison) -> dict[str, Any]:
    candidate, machine = row.candidate, row.candidate.machine
    price, parts = candidate.price, candidate.parts_price
    devices = [device.name for device in machine.devices]
    return {
        "machine": candidate.name,
        "title": machine.name,
        "kind": "discrete" if candidate.discrete else "unified",
        "devices": devices or [machine.chip or machine.cpu or machine.name],
        **_plan_json(row.plan, found),
        "price_usd": None if price is None else price.usd,
        "price_kind": None if price is None else price.kind,
        "price_date": None if price is None else price.date,
        "price_reason": candidate.price_reason,
        "devices_price_usd": None if parts is None else parts.usd,
        "sold": candidate.sold,
        "notes": list(dict.fromkeys([*_notes_of(row), *_too_long(row, found)])),
        "rejected": [
            {"format": plan.format, "technique": plan.technique, "reason": why}
            for plan, why in row.rejected
        ],
    }


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


def _plan_json(plan: Plan | None, found: Comparison) -> dict[str, Any]:
    """The plan; where there is none every value is null, and the verdict unknown."""
    workload = found.subject.workload
    none = NotKnown("no engine that is modelled runs it")
    values: dict[str, Any] = {
        name: None if plan is None else value(plan) for name, value in PLAN_KEYS.items()
    }
    values["verdict"] = values["verdict"] or "unknown"
    decode, prompt = (none, none) if plan is None else (plan.decode, plan.prompt)
    first = time_to_first_token_s(prompt, decode, workload.longest_prompt_tokens)
    return (
        values
        | _interval("decode_tps", decode, workload.batch_size)
        | _interval("total_decode_tps", decode, 1)
        | _interval("prompt_tps", prompt, 1)
        | _interval("ttft_s", first, 1)
    )


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


def compare_csv(found: Comparison) -> str:
    """A line a machine, the columns of the JSON's plans that are one value."""
    import csv
    import io

    rows = [_row_json(row, found) for row in found.rows]
    flat = [
        {k: "; ".join(v) if k == "devices" else v for k, v in row.items() if _flat(k, v)}
        for row in rows
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(flat[0]) if flat else ["machine"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().rstrip("\n")


def _flat(key: str, value: Any) -> bool:
    return key == "devices" or not isinstance(value, list)
