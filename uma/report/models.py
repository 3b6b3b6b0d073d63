"""The models of the catalog, and those that fit a machine, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from uma.catalog.listed import ListedModel
from uma.report import SCHEMA_VERSION
from uma.report.estimate import context_words
from uma.report.text import table
from uma.units import GB, format_gib

if TYPE_CHECKING:
    from uma.plan.choice import Choice, Choices

ORDER = "largest first; size is no ranking of quality"


def models_text(found: Sequence[ListedModel]) -> str:
    """A line a model: parameters in billions, in all and active, and the longest context."""
    if not found:
        return "no model of the catalog is like that"
    head = ["name", "parameters", "active", "context", "kind"]
    return table([head, *map(_row, found)], "<>>><")


def _row(one: ListedModel) -> list[str]:
    context = "?" if one.context_tokens is None else f"{one.context_tokens:,}"
    return [one.name, _billions(one.parameters), _active(one), context, one.kind]


def _active(one: ListedModel) -> str:
    return "" if one.kind == "dense" else _billions(one.active_parameters)


def _billions(count: int | None) -> str:
    """
    >>> _billions(134_515_008), _billions(70_553_706_496)
    ('0.13B', '70.6B')
    """
    if count is None:
        return "?"
    return f"{count / GB:,.{2 if count < GB else 1}f}B"


def models_json(found: Sequence[ListedModel]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "models": [asdict(one) for one in found]}


def choices_text(choices: "Choices") -> str:
    """What fits, a line a model; how many do, and what the others lack."""
    wanted, budget = choices.wanted, choices.budget
    lines = [
        f"{choices.machine.name}, engine {choices.engine}: {format_gib(budget.budget_bytes)} "
        f"({budget.winner}), {wanted.context_tokens:,} tokens of context",
    ]
    if choices.found:
        head = ["name", "parameters", "active", "format", "memory", "verdict"]
        head += ["largest context", "tokens/s", "made for"]
        rows = [_choice_row(one) for one in choices.found]
        lines += ["", table([head, *rows], "<>><><>><"), ""]
        lines += [f"{choices.found[0].model.name}: {choices.found[0].command}"]
    return "\n".join([*lines, *(f"note: {note}" for note in notes(choices))])


def _choice_row(one: "Choice") -> list[str]:
    speed = one.speed.decode_tps
    return [
        one.model.name,
        _billions(one.parameters),
        _active(one.model),
        one.format,
        format_gib(one.needed_bytes),
        one.verdict,
        context_words(one.max_context_tokens, one.tight_context_tokens),
        "?" if speed is None else f"{speed:.3g}",
        ", ".join(use.use for use in one.uses) or "?",
    ]


def notes(choices: "Choices") -> list[str]:
    """What a reader must know of the list, and what is not on it."""
    found, wanted = choices.found, choices.wanted
    rest = choices.wanted_models - len(found) - choices.too_short - choices.too_slow
    rest -= len(choices.not_estimated) + choices.not_seen
    said = [f"{len(found)} of {choices.wanted_models} models: {ORDER}"]
    if choices.not_seen:
        said.append(f"{choices.not_seen} smaller ones were not looked at: --limit 0 lists all")
    if rest:
        said.append(f"{rest} do not fit")
    if choices.too_short:
        said.append(f"{choices.too_short} are made for less than {wanted.context_tokens:,} tokens")
    if choices.too_slow:
        said.append(f"{choices.too_slow} are slower than {wanted.min_tps:g} tokens/s")
    if choices.not_estimated:
        names = ", ".join(name for name, _ in choices.not_estimated)
        said.append(f"{len(choices.not_estimated)} cannot be run or estimated: {names}")
    if any(one.needed_bytes < one.total_bytes for one in found):
        said.append("memory: without the pool of freed buffers, which takes what the budget leaves")
    reasons = sorted({one.speed.reason for one in found if one.speed.reason})
    said += [f"tokens/s ?: {reason}" for reason in reasons]
    if wanted.min_tps is not None and reasons:
        said.append("--min-tps leaves out no model whose speed is not known")
    if any(not one.uses for one in found):
        said.append("made for ?: neither the model's name nor a page that was read says it")
    said += sorted({note for one in found for note in one.notes})
    return said


def choices_json(choices: "Choices") -> dict[str, Any]:
    """The document of ``uma models --fits --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": asdict(choices.machine),
        "engine": choices.engine,
        "context_tokens": choices.wanted.context_tokens,
        "use": choices.wanted.use,
        "min_tps": choices.wanted.min_tps,
        "budget_bytes": choices.budget.budget_bytes,
        "budget_source": choices.budget.winner,
        "limit_bytes": choices.budget.limit_bytes,
        "order": ORDER,
        "models": [_choice_json(one) for one in choices.found],
        "wanted_models": choices.wanted_models,
        "not_seen": choices.not_seen,
        "not_estimated": [
            {"name": name, "reason": reason} for name, reason in choices.not_estimated
        ],
        "notes": notes(choices),
    }


def _choice_json(one: "Choice") -> dict[str, Any]:
    return {
        **asdict(one.model),
        "parameters": one.parameters,
        "uses": [use._asdict() for use in one.uses] or None,
        "format": one.format,
        "bits": one.bits,
        "weights_bytes": one.weights_bytes,
        "total_bytes": one.total_bytes,
        "needed_bytes": one.needed_bytes,
        "headroom_bytes": one.headroom_bytes,
        "verdict": one.verdict,
        "max_context_tokens": one.max_context_tokens,
        "tight_context_tokens": one.tight_context_tokens,
        "decode_tps": one.speed.decode_tps,
        "decode_tps_low": one.speed.decode_tps_low,
        "decode_tps_high": one.speed.decode_tps_high,
        "decode_tps_reason": one.speed.reason,
        "command": one.command,
        "notes": list(one.notes),
    }
