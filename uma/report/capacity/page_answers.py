"""Short answers to what people ask of a report, from its document."""

from collections.abc import Iterator, Mapping
from typing import Any

from uma.report.capacity.plot_rows import sizes_of
from uma.report.capacity.summary import number, speed_words
from uma.units import format_gib

Doc = Mapping[str, Any]
RUNS = ("fits", "tight")
NAMED = 5  # models that a raised limit admits


def answers(found: Doc) -> list[tuple[str, str, list[str]]]:
    """Machine, question and answers."""
    made = []
    for machine in found["machines"]:
        for question, texts in (
            ("What is the largest model I can run, and how fast?", _largest(machine)),
            ("What would iogpu.wired_limit_mb buy me?", _raised(machine, found)),
            ("Can I fine-tune on it?", _training(machine)),
            ("Would graphics cards be faster?", _cards(machine, found)),
        ):
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
    yield f"Up to {budgets} for models, which leaves {left} to the system: {last['command']}."
    for place, context in enumerate(found["settings"]["contexts"]):
        yield f"With {context:,} tokens of context: {_gained(machine, found, place, context)}."


def _gained(machine: Doc, found: Doc, place: int, context: int) -> str:
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
    new = f"{', '.join(names[:NAMED])}{more}" if names else "no model that does not fit now"
    return f"{formats} more pairs of model and format fit; models that did not fit in 4 bits: {new}"


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
        yield f"{model}: {'; '.join(map(_method, rows))}."


def _method(row: Doc) -> str:
    length = row["largest_seq_length"]
    if length is None:
        return f"{row['method']} {'is not possible' if row['total_bytes'] is None else 'exceeds'}"
    return f"{row['method']} {row['verdict']}, rows of up to {length:,} tokens" + speed_words(
        row, "train"
    )


def _cards(machine: Doc, found: Doc) -> Iterator[str]:
    own = {plan["model"]: plan for plan in found["plans"] if plan["machine"] == machine["name"]}
    cards: dict[str, list[str]] = {}
    for plan in found["plans"]:
        if plan["kind"] == "discrete" and plan["machine"] != machine["name"]:
            words = _versus(own.get(plan["model"]), plan)
            cards.setdefault(plan["machine"], []).append(f"{plan['model']} {words}")
    for card, words in cards.items():
        yield f"{card}: {'; '.join(words)}."


def _versus(own: Doc | None, plan: Doc) -> str:
    if plan["verdict"] not in RUNS:
        return "does not run"
    if own is None or own["verdict"] not in RUNS:
        return f"runs{speed_words(plan)} in {plan['format']}, and not here"
    if plan["decode_tps"] is None or own["decode_tps"] is None:
        return "runs, at a speed that is not known"
    faster = "faster" if plan["decode_tps_low"] > own["decode_tps_high"] else "slower"
    if faster == "slower" and plan["decode_tps_high"] >= own["decode_tps_low"]:
        faster = "about as fast"
    here, there = (f"{number(p['decode_tps'])} ({p['format']})" for p in (own, plan))
    return f"{faster}, {there} against {here} tokens/s"
