"""Short answers to what people ask of a report, from its document."""

from collections.abc import Iterator, Mapping
from typing import Any

from uma.report.capacity.plot_rows import sizes_of
from uma.report.capacity.summary import MANY, number, speed_words
from uma.units import format_gib

Doc = Mapping[str, Any]
RUNS = ("fits", "tight")
NAMED = 5  # models that a raised limit admits


def answers(found: Doc) -> list[tuple[str, str, list[str]]]:
    """Machine, question and answers; of many machines to the first question alone."""
    made = []
    asked = 1 if len(found["machines"]) > MANY else None
    for machine in found["machines"]:
        for question, texts in (
            ("What is the largest model I can run, and how fast?", _largest(machine)),
            ("What would iogpu.wired_limit_mb buy me?", _raised(machine, found)),
            ("Can I fine-tune on it?", _training(machine)),
            ("Would graphics cards be faster?", _cards(machine, found)),
        )[:asked]:
            if kept := list(texts):
                made.append((machine["name"], question, kept))
    return made


def _largest(machine: Doc) -> Iterator[str]:
    for best in machine["best"]:
        if best["limit"] == 0:
            context = f"With {best['context_tokens']:,} tokens of context:"
            if best["model"] is None:
                yield f"{context} none of the catalog in 4 bits or more."
            else:
                size = format_gib(best["total_bytes"])
                yield f"{context} {best['model']} in {best['format']}, {size}{speed_words(best)}."


def _raised(machine: Doc, found: Doc) -> Iterator[str]:
    limits = machine["budget"]["limits"]
    if len(limits) == 1:
        if machine["backend"] == "metal":
            yield "Nothing that is advised: more would take from what the system needs."
        return
    now, last = limits[0], limits[-1]
    budgets = f"{format_gib(last['budget_bytes'])} instead of {format_gib(now['budget_bytes'])}"
    left = format_gib(last["left_bytes"])
    yield f"Up to {budgets} for models, which leaves {left} to the system, until the next restart."
    yield f"The command is: {last['command']}"
    for context in found["settings"]["contexts"]:
        yield f"With {context:,} tokens of context: {_gained(machine, found, context)}."


def _gained(machine: Doc, found: Doc, context: int) -> str:
    best = [one for one in machine["best"] if one["context_tokens"] == context]
    formats = best[-1]["formats"] - best[0]["formats"]
    if not formats:
        return "nothing more fits"
    names = [
        row["model"]
        for row in machine["rows"]
        if not _held(row, context, 0) and _held(row, context, -1)
    ]
    names.sort(key=sizes_of(found).__getitem__, reverse=True)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    new = f"{', '.join(names[:NAMED])}{more}" if names else "none"
    return f"{formats} more pairs of model and format; models that did not fit in 4 bits: {new}"


def _held(row: Doc, context: int, limit: int) -> bool:
    return any(
        one["verdicts"][limit] == "fits"
        for cell in row["cells"]
        if cell["bits"] >= 4
        for one in cell["at"]
        if one["context_tokens"] == context
    )


def _training(machine: Doc) -> Iterator[str]:
    by_model: dict[str, list[Doc]] = {}
    for row in machine["training"]:
        by_model.setdefault(row["model"], []).append(row)
    for model, rows in by_model.items():
        able = [_method(row) for row in rows if row["verdict"] in RUNS]
        rest = [row["method"] for row in rows if row["verdict"] not in RUNS]
        not_able = f"not {' nor '.join(rest)}" if rest else ""
        yield f"{model}: {'; '.join(filter(None, [*able, not_able]))}."


def _method(row: Doc) -> str:
    length = row["largest_seq_length"]
    rows = "" if length is None else f", rows of up to {length:,} tokens"
    return f"{row['method']} {row['verdict']}{rows}{speed_words(row, 'train')}"


def _cards(machine: Doc, found: Doc) -> Iterator[str]:
    """A sentence for each card: for which models it is faster, as fast, slower."""
    own = {plan["model"]: plan for plan in found["plans"] if plan["machine"] == machine["name"]}
    cards: dict[str, dict[str, list[str]]] = {}
    for plan in found["plans"]:
        if plan["kind"] == "discrete" and plan["machine"] != machine["name"]:
            order, speeds = _versus(own.get(plan["model"]), plan)
            held = cards.setdefault(plan["machine"], {})
            held.setdefault(order, []).append(f"{plan['model']}{speeds}")
    for card, held in cards.items():
        texts = (f"{order} {', '.join(held[order])}" for order in ORDERS if order in held)
        yield f"{card}: {'; '.join(texts)}."


ORDERS = (
    *("faster for", "about as fast for", "slower for", "at a speed not known runs"),
    *("runs what does not run here:", "does not run"),
)


def _versus(own: Doc | None, plan: Doc) -> tuple[str, str]:
    """One of ``ORDERS``, and the speeds: apart where the intervals are."""
    if plan["verdict"] not in RUNS:
        return ORDERS[5], ""
    if own is None or own["verdict"] not in RUNS:
        return ORDERS[4], speed_words(plan)
    if plan["decode_tps"] is None or own["decode_tps"] is None:
        return ORDERS[3], ""
    there, here = (f"{number(one['decode_tps'])} {one['format']}" for one in (plan, own))
    speeds = f" ({there} against {here})"
    if plan["decode_tps_low"] > own["decode_tps_high"]:
        return ORDERS[0], speeds
    if plan["decode_tps_high"] < own["decode_tps_low"]:
        return ORDERS[2], speeds
    return ORDERS[1], speeds
