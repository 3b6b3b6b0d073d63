"""The models of the catalog as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from uma.catalog.listed import ListedModel
from uma.report import SCHEMA_VERSION
from uma.report.text import table
from uma.units import GB


def models_text(found: Sequence[ListedModel]) -> str:
    """A line a model: parameters in billions, in all and active, and the longest context."""
    if not found:
        return "no model of the catalog is like that"
    head = ["name", "parameters", "active", "context", "kind"]
    return table([head, *map(_row, found)], "<>>><")


def _row(one: ListedModel) -> list[str]:
    active = "" if one.kind == "dense" else _billions(one.active_parameters)
    context = "?" if one.context_tokens is None else f"{one.context_tokens:,}"
    return [one.name, _billions(one.parameters), active, context, one.kind]


def _billions(count: int | None) -> str:
    """
    >>> _billions(134_515_008), _billions(70_553_706_496)
    ('0.13B', '70.6B')
    """
    if count is None:
        return "?"
    return f"{count / GB:,.{2 if count < GB else 1}f}B"


def models_json(found: Sequence[ListedModel]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "models": [one._asdict() for one in found]}
