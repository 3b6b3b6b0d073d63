"""A report as Markdown, from its document."""

from collections.abc import Mapping, Sequence
from typing import Any

from uma.report.capacity.summary import number, speed_words
from uma.units import GB, format_gib, printable

Doc = Mapping[str, Any]
_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]()#+|~!>"} | {"<": "&lt;"})


def plain_words(text: object) -> str:
    """``text`` without anything that Markdown or a terminal would act on."""
    return printable(str(text), kept="").translate(_MARKS)


def markdown(found: Doc) -> str:
    """The whole report; sections without content are left out."""
    parts = [_head(found), *(_machine(machine, found) for machine in found["machines"])]
    for section in (_overview, _plans, _measured, _changes, _method):
        parts.append(section(found))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(found: Doc) -> str:
    names = ", ".join(plain_words(machine["title"]) for machine in found["machines"])
    lines = [f"# What {names} can hold, and how fast", ""]
    lines += [plain_words(sentence) for sentence in found["summary"]]
    lines += ["", f"{found['date']}, uma {found['uma_version']}, catalog {found['catalog_date']}"]
    return "\n".join(lines)


def rows_text(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; cells are words already made plain."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _machine(machine: Doc, found: Doc) -> str:
    sections = [
        f"## {plain_words(machine['title'])} (`{plain_words(machine['name'])}`)",
        _budget(machine),
        _map(machine, found),
        *(_model(model) for model in machine["models"]),
        _training(machine),
    ]
    notes = [f"- {plain_words(note)}" for note in machine["notes"]]
    return "\n\n".join([part for part in sections if part] + (["\n".join(notes)] if notes else []))


def _budget(machine: Doc) -> str:
    budget = machine["budget"]
    rows = [(plain_words(line["name"]), format_gib(line["size_bytes"])) for line in budget["lines"]]
    rows.append(("**budget: the smallest of these**", f"**{format_gib(budget['budget_bytes'])}**"))
    rows.append(("limit: more is refused", format_gib(budget["limit_bytes"])))
    lines = ["### Memory budget", "", rows_text(("rule", "size"), rows)]
    raised = budget["limits"][1:]
    if raised:
        lines += ["", "What a raised GPU limit buys (until the next restart):", ""]
        lines.append(rows_text(RAISED_HEAD, [_raised(machine, i) for i in range(len(raised) + 1)]))
    return "\n".join(lines)


RAISED_HEAD = ("iogpu.wired\\_limit\\_mb", "budget", "left to the system", "models that fit")


def _raised(machine: Doc, index: int) -> list[str]:
    limit = machine["budget"]["limits"][index]
    value = "as it is" if limit["wired_limit_mb"] is None else f"{limit['wired_limit_mb']}"
    fits = [
        f"{best['models']} at {best['context_tokens']:,} tokens"
        for best in machine["best"]
        if best["limit"] == index
    ]
    sizes = [format_gib(limit[name]) for name in ("budget_bytes", "left_bytes")]
    return [value, *sizes, ", ".join(fits)]


def _map(machine: Doc, found: Doc) -> str:
    context, widths = found["settings"]["contexts"][0], found["settings"]["widths"]
    sizes = {model["name"]: model["parameters"] or 0 for model in found["models"]}
    rows = []
    for row in sorted(machine["rows"], key=lambda r: (-sizes[r["model"]], r["model"])):
        cells = {cell["bits"]: _cell(cell, context) for cell in row["cells"]}
        if any("fits" in cell or "tight" in cell for cell in cells.values()):
            rows.append([plain_words(row["model"]), *(cells.get(bits, "") for bits in widths)])
    if not machine["rows"]:
        return ""
    left = len(machine["rows"]) - len(rows)
    head = ["model", *(f"{bits} bits" for bits in widths)]
    return "\n".join(
        [
            f"### What fits at {context:,} tokens of context",
            "",
            f"Verdict, memory in GiB, tokens/s. {left} more models do not fit, or are made for a "
            "shorter context.",
            "",
            rows_text(head, rows),
        ]
    )


def _cell(cell: Doc, context: int) -> str:
    at = next((one for one in cell["at"] if one["context_tokens"] == context), None)
    if at is None:
        return ""
    speed = "" if at["decode_tps"] is None else f", {number(at['decode_tps'])}/s"
    return f"{at['verdict']} {at['total_bytes'] / 2**30:.1f}{speed}"


def _model(model: Doc) -> str:
    name = plain_words(model["model"])
    if model["reason"] is not None:
        return f"### {name}\n\n{plain_words(model['reason'])}"
    points = [p for p in model["points"] if (p["batch_size"], p["kv_bits"]) == (1, 16)]
    contexts = sorted({p["context_tokens"] for p in points})
    by_bits: dict[int, dict[int, Doc]] = {}
    for point in points:
        by_bits.setdefault(point["bits"], {})[point["context_tokens"]] = point
    memory = [
        [f"{bits} bits", *(_point(own.get(n)) for n in contexts)] for bits, own in by_bits.items()
    ]
    speeds = [_speeds(bits, own[contexts[0]]) for bits, own in by_bits.items()]
    caches = sorted({one["kv_bits"] for one in model["longest"]}, reverse=True)
    return "\n".join(
        [
            f"### {name}: context against memory",
            "",
            rows_text(["weights", *(f"{n:,} tokens" for n in contexts)], memory),
            "",
            "Largest context within the budget, by the width of the cache:",
            "",
            rows_text(["weights", *(f"{n}-bit cache" for n in caches)], _longest(model, caches)),
            "",
            f"Tokens per second at {contexts[0]:,} tokens of context:",
            "",
            rows_text(("weights", "decode", "prompt"), speeds),
            "",
            "Sequences at once, each with its whole context in a cache of 16 bits:",
            "",
            rows_text(SEQUENCES_HEAD, [_sequences(one) for one in model["sequences"]]),
        ]
    )


def _point(point: Doc | None) -> str:
    if point is None:
        return "exceeds"  # as a shorter context does
    return f"{format_gib(point['total_bytes'])} {point['verdict']}"


def _speeds(bits: int, point: Doc) -> list[str]:
    decode, prompt = speed_words(point), speed_words(point, "prompt")
    return [f"{bits} bits", decode.removeprefix(" at ") or "?", prompt.removeprefix(" at ") or "?"]


def _longest(model: Doc, caches: Sequence[int]) -> list[list[str]]:
    found: dict[int, dict[int, int | None]] = {}
    for one in model["longest"]:
        found.setdefault(one["bits"], {})[one["kv_bits"]] = one["max_context_tokens"]
    return [
        [f"{bits} bits", *("none" if own[n] is None else f"{own[n]:,}" for n in caches)]
        for bits, own in found.items()
    ]


SEQUENCES_HEAD = ("weights", "context", "sequences", "with pages", "tokens/s of each")


def _sequences(one: Doc) -> list[str]:
    return [
        f"{one['bits']} bits",
        f"{one['context_tokens']:,}",
        str(one["max_batch_size"] or "none"),
        str(one["paged_sequences"] or ""),
        speed_words(one).removeprefix(" at "),
    ]


TRAINING_HEAD = ("model", "method", "memory", "verdict", "longest rows", "largest batch", "speed")


def _training(machine: Doc) -> str:
    rows = [_training_row(row) for row in machine["training"]]
    if not rows:
        return ""
    first = machine["training"][0]
    return "\n".join(
        [
            "### Fine-tuning",
            "",
            f"With gradient checkpointing; memory of {first['batch_size']} row of "
            f"{first['max_seq_length']:,} tokens. Longest rows and largest batch are each alone.",
            "",
            rows_text(TRAINING_HEAD, rows),
        ]
    )


def _training_row(row: Doc) -> list[str]:
    name = [plain_words(row["model"]), plain_words(row["method"])]
    if row["total_bytes"] is None:
        return [*name, "", plain_words(row["reason"]), "", "", ""]
    length, batch = row["largest_seq_length"], row["largest_batch_size"]
    return [
        *name,
        format_gib(row["total_bytes"]),
        row["verdict"],
        "none" if length is None else f"{length:,}",
        "none" if batch is None else f"{batch:,}",
        speed_words(row, "train").removeprefix(" at "),
    ]


OVERVIEW_HEAD = ("machine", "memory", "budget", "GB/s", "US$", "context", "fit", "largest", "speed")


def _overview(found: Doc) -> str:
    if len(found["machines"]) < 2:
        return ""
    rows = [
        _overview_row(machine, best)
        for machine in found["machines"]
        for best in machine["best"]
        if best["limit"] == 0
    ]
    return "\n".join(["## Side by side", "", rows_text(OVERVIEW_HEAD, rows)])


def _overview_row(machine: Doc, best: Doc) -> list[str]:
    budget, rate = machine["budget"], machine["bandwidth_bytes_per_s"]
    return [
        plain_words(machine["name"]),
        format_gib(budget["memory_bytes"]),
        format_gib(budget["budget_bytes"]),
        "?" if rate is None else f"{rate / GB:,.0f}",
        "?" if machine["price_usd"] is None else f"{machine['price_usd']:,}",
        f"{best['context_tokens']:,}",
        str(best["models"]),
        "none" if best["model"] is None else f"{plain_words(best['model'])} {best['format']}",
        speed_words(best).removeprefix(" at "),
    ]


PLANS_HEAD = ("model", "machine", "weights", "how", "verdict", "decode", "prompt", "US$", "W")


def _plans(found: Doc) -> str:
    if not found["plans"]:
        return ""
    context = found["settings"]["plans_context_tokens"]
    return "\n".join(
        [
            f"## Against graphics cards, at {context:,} tokens of context",
            "",
            rows_text(PLANS_HEAD, [plan_cells(plan) for plan in found["plans"]]),
        ]
    )


def plan_cells(plan: Doc) -> list[str]:
    return [
        plain_words(plan["model"]),
        plain_words(plan["machine"]),
        plain_words(plan["format"] or ""),
        plan_words(plan),
        plan["verdict"],
        speed_words(plan).removeprefix(" at ") or "?",
        "?" if plan["prompt_tps"] is None else number(plan["prompt_tps"]),
        price_words(plan),
        "?" if plan["power_w"] is None else str(plan["power_w"]),
    ]


def plan_words(plan: Doc) -> str:
    if plan["technique"] is None:
        return "no engine that is modelled runs it"
    return f"{plan['technique']}, {plan['engine']}"


def price_words(plan: Doc) -> str:
    if plan["price_usd"] is None:
        return "?"
    kind = " ".join(filter(None, (plan["price_kind"], plan["price_date"])))
    note = f"; {plan['price_note']}" if plan["price_note"] else ""
    return f"{plan['price_usd']:,} ({kind}{note})"


MEASURED_HEAD = (
    "time",
    "command",
    "model",
    "predicted",
    "measured",
    "error",
    "tokens/s",
    "settings",
)


def _measured(found: Doc) -> str:
    runs, note = found["measured"]["runs"], found["measured"]["note"]
    lines = ["## Measured runs against predictions", ""]
    if note:
        lines += [plain_words(note)]
    if runs:
        lines += ["", rows_text(MEASURED_HEAD, [_run(run) for run in runs])]
        lines += ["", f"Measured by {', '.join({run['instrument']: None for run in runs})}."]
    return "\n".join(lines) if runs or note else ""


def _run(run: Doc) -> list[str]:
    error = run["error"]
    return [
        plain_words(run["time"]),
        plain_words(run["command"]),
        plain_words(run["model"]),
        format_gib(run["predicted_peak_bytes"]),
        format_gib(run["measured_peak_bytes"]),
        "?" if error is None else f"{100 * error:+.1f} %",
        "?" if run["generation_tps"] is None else number(run["generation_tps"]),
        plain_words(", ".join(f"{key} {value}" for key, value in run["settings"].items())),
    ]


def _changes(found: Doc) -> str:
    changes = found["changes"]
    if changes is None:
        return ""
    lines = [f"## What changed since {plain_words(changes['from'])}", ""]
    lines += [f"- {plain_words(text)}" for text in changes["texts"]] or ["Nothing."]
    return "\n".join(lines)


def _method(found: Doc) -> str:
    method = found["method"]
    lines = ["## Method", "", *(f"- {plain_words(step)}" for step in method["steps"])]
    lines += ["", "Terms:", ""]
    lines += [f"- `{t['name']}`: {plain_words(t['means'])}" for t in method["terms"]]
    for title, name in (
        ("Not modelled:", "not_modelled"),
        ("Never run on a Mac:", "never_run_on_a_mac"),
        ("Sources:", "sources"),
    ):
        lines += ["", title, "", *(f"- {plain_words(text)}" for text in method[name])]
    return "\n".join(lines)
