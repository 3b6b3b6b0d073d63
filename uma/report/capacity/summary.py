"""A report in three sentences, from its document."""

from collections.abc import Mapping, Sequence
from typing import Any

from uma.units import format_gib

Doc = Mapping[str, Any]


MANY = 3  # machines: of more than that one sentence tells of all


def summary(found: Doc) -> list[str]:
    """What each machine has, what it holds how fast, and what else it can do: three sentences.

    Of many machines two, on all together.
    """
    machines = found["machines"]
    if len(machines) > MANY:
        return [_all(machines), _holds_most(machines)]
    return [sentence for machine in machines for sentence in of_machine(machine)]


def of_machine(machine: Doc) -> list[str]:
    return [_memory(machine), _largest(machine), _more(machine)]


def _all(machines: Sequence[Doc]) -> str:
    budgets = [machine["budget"]["budget_bytes"] for machine in machines]
    return (
        f"{len(machines)} machines give models {format_gib(min(budgets))} to "
        f"{format_gib(max(budgets))} each."
    )


def _holds_most(machines: Sequence[Doc]) -> str:
    context = machines[0]["best"][0]["context_tokens"]
    most = max(machines, key=lambda machine: machine["best"][0]["models"])
    best = most["best"][0]
    if best["model"] is None:
        return f"No model of the catalog fits any of them at {context:,} tokens of context."
    return (
        f"At {context:,} tokens of context {most['name']} holds most: {best['models']} models in "
        f"4 bits or more, the largest {best['model']} in {best['format']}{speed_words(best)}."
    )


def _memory(machine: Doc) -> str:
    budget = machine["budget"]
    return (
        f"{machine['title']} has {format_gib(budget['memory_bytes'])} of memory, of which models "
        f"may take {format_gib(budget['budget_bytes'])} ({budget['budget_source']})."
    )


def _largest(machine: Doc) -> str:
    parts = []
    for best in _now(machine):
        context = f"{best['context_tokens']:,} tokens of context"
        if best["model"] is None:
            parts.append(f"at {context} no model of the catalog fits in 4 bits or more")
        else:
            parts.append(
                f"the largest model that fits at {context} is {best['model']} in "
                f"{best['format']}{speed_words(best)}"
            )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _more(machine: Doc) -> str:
    text = "; ".join(filter(None, (_raised(machine), _training(machine))))
    return f"{text[:1].upper()}{text[1:]}."


def _raised(machine: Doc) -> str:
    limits, context = machine["budget"]["limits"], machine["best"][0]["context_tokens"]
    if machine["backend"] != "metal":
        return "its memory limit is fixed"
    if len(limits) == 1:
        return (
            "raising iogpu.wired_limit_mb is not advised, for it would take from what the system "
            "needs"
        )
    last = limits[-1]
    at = {b["limit"]: b for b in machine["best"] if b["context_tokens"] == context}
    gained = at[len(limits) - 1]["formats"] - at[0]["formats"]
    more = last["budget_bytes"] - limits[0]["budget_bytes"]
    return (
        f"raising iogpu.wired_limit_mb to {last['wired_limit_mb']:,} gives models "
        f"{format_gib(more)} more, in which {gained} more of the model and format pairs fit"
    )


def _training(machine: Doc) -> str:
    if not machine["training"]:
        return ""
    fitting = [row for row in machine["training"] if row["verdict"] == "fits"]
    if not fitting:
        return "none of the chosen models can be fine-tuned on it"
    last = fitting[-1]
    best = next((row for row in reversed(fitting) if row["method"] == "QLoRA"), last)
    length = best["largest_seq_length"]
    rows = "" if length is None else f" with rows of up to {length:,} tokens"
    return f"{best['method']} of {best['model']} fits{rows}"


def _now(machine: Doc) -> list[Doc]:
    return [best for best in machine["best"] if best["limit"] == 0]


def speed_words(row: Doc, name: str = "decode") -> str:
    """`` at 12.3 tokens/s (11.0 to 13.0)``; empty where it is not known."""
    best = row[f"{name}_tps"]
    if best is None:
        return ""
    low, high = row[f"{name}_tps_low"], row[f"{name}_tps_high"]
    return f" at {number(best)} tokens/s ({number(low)} to {number(high)})"


def number(value: float) -> str:
    """Three digits that count, without a power of ten.

    >>> number(1234.5), number(12.34), number(0.0123)
    ('1,234', '12.3', '0.012')
    """
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.2g}"
