"""The decision page: one question, a row for each machine, and what to take."""

from collections.abc import Mapping
from typing import Any

from uma import __version__
from uma.plan.capacity.decision import Decision
from uma.plan.compare import HostProfile
from uma.report import SCHEMA_VERSION
from uma.report.capacity.document import plain
from uma.report.capacity.markdown import plain_words, plan_words, price_words, rows_text
from uma.report.capacity.method import NEVER_RUN
from uma.report.capacity.summary import speed_words
from uma.report.capacity.templates import rendered
from uma.units import GB, format_gib

KIND = "uma decision"
Doc = Mapping[str, Any]


def decision_document(found: Decision, date: str, host: HostProfile) -> dict[str, Any]:
    """The document of ``uma report MODEL --decision --format json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "date": date,
        "uma_version": __version__,
        "question": question(found),
        **plain(found),
        "assumptions": assumptions(found, host),
        "never_measured": list(NEVER_RUN),
    }


def question(found: Decision) -> str:
    return (
        f"Which machine runs {found.model} with {found.context_tokens:,} tokens of context, in "
        f"{found.min_bits} bits or more, at {found.min_tps:g} tokens/s or more?"
    )


def assumptions(found: Decision, host: HostProfile) -> list[str]:
    price = "not counted" if host.price is None else f"US$ {host.price.usd:,}"
    return [
        "Of each machine the least quantized plan that fits and is fast enough.",
        "Users are requests at once, each with the whole context and the asked speed, of "
        "1, 2, 4 and so on to 64; more of them may need fewer bits.",
        f"Cards are in a machine with {format_gib(host.memory_bytes)} of memory at "
        f"{host.bandwidth_bytes_per_s / GB:g} GB/s, whose price is {price}.",
        "Power is the most that a machine draws by its maker's figures, of cards that of the "
        "cards alone. Prices are without tax, of the kind and date that stand beside them.",
        "Speeds are those of one request at the end of its context; eight in ten of the "
        "measurements behind them are within the interval.",
    ]


HEAD = ("machine", "does it", "weights", "how", "tokens/s", "users", "context", "US$", "W")


def cells(row: Doc) -> list[str]:
    """What the page and the Markdown show of a row, as words."""
    plan = row["plan"]
    users, longest = row["users"], row["largest_context_tokens"]
    return [
        str(plan["machine"]),
        "yes" if row["does"] else f"no ({plan['verdict']})",
        str(plan["format"] or ""),
        plan_words(plan),
        speed_words(plan).removeprefix(" at ").replace(" tokens/s", "") or "?",
        "none" if users is None else f"{users}",
        "none" if longest is None else f"{longest:,}",
        price_words(plan),
        "?" if plan["power_w"] is None else f"{plan['power_w']}",
    ]


def recommendation(found: Doc) -> str:
    if found["recommended"] is None:
        return f"None of these: {found['why']}."
    return f"{found['recommended']}: {found['why']}."


def decision_page(found: Doc) -> str:
    """One page to print.

    Raises:
        RuntimeUnavailable: If Jinja is not installed.
    """
    return rendered(
        "decision.html",
        found=found,
        head=HEAD,
        rows=[cells(row) for row in found["rows"]],
        recommendation=recommendation(found),
    )


def decision_markdown(found: Doc) -> str:
    rows = [list(map(plain_words, cells(row))) for row in found["rows"]]
    lines = [f"# {plain_words(found['question'])}", "", rows_text(HEAD, rows), ""]
    lines += [f"**Take {plain_words(recommendation(found))}**"]
    for title, texts in (
        ("What would flip it", found["flips"] or ["Nothing that was tried."]),
        ("Assumptions", found["assumptions"]),
        ("Never measured", found["never_measured"]),
    ):
        lines += ["", f"## {title}", "", *(f"- {plain_words(text)}" for text in texts)]
    lines += ["", f"{found['date']}, uma {found['uma_version']}"]
    return "\n".join(lines) + "\n"
