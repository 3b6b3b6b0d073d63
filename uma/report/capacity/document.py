"""The one document of a report, as plain values: all that is shown comes from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from uma import __version__
from uma.catalog import DATA
from uma.catalog.listed import ListedModel
from uma.catalog.uses import uses_of
from uma.frozen import dataclass
from uma.plan.capacity.facts import MachineReport, PlanRow, Speed
from uma.report import SCHEMA_VERSION
from uma.report.capacity.method import METHOD, NEVER_RUN, NOT_MODELLED, SOURCES, TERMS
from uma.report.capacity.summary import summary

KIND = "uma capacity report"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a report is made of. ``measured`` are rows of ``uma.report.capacity.runs``.

    ``chosen`` are the models in detail, ``parameters`` those of models outside the catalog.
    """

    date: str
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    listed: tuple[ListedModel, ...]
    chosen: tuple[str, ...]
    machines: tuple[MachineReport, ...]
    plans: tuple[PlanRow, ...]
    plans_context_tokens: int
    measured: tuple[Mapping[str, Any], ...] = ()
    measured_note: str | None = None
    since: str | None = None
    catalog_date: str | None = None


def document(parts: Parts) -> dict[str, Any]:
    """The document of ``uma report --format json``, ``changes`` being null."""
    found = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "date": parts.date,
        "uma_version": __version__,
        "catalog_date": parts.catalog_date,
        "settings": {
            "contexts": list(parts.contexts),
            "widths": list(parts.widths),
            "chosen": list(parts.chosen),
            "plans_context_tokens": parts.plans_context_tokens,
            "since": parts.since,
        },
        "models": [_model(one) for one in parts.listed],
        "machines": plain(parts.machines),
        "plans": plain(parts.plans),
        "measured": {"runs": plain(parts.measured), "note": parts.measured_note},
        "changes": None,
        "method": {
            "steps": list(METHOD),
            "terms": [{"name": name, "means": means} for name, means in TERMS.items()],
            "not_modelled": list(NOT_MODELLED),
            "never_run_on_a_mac": list(NEVER_RUN),
            "sources": list(SOURCES),
        },
    }
    return found | {"summary": summary(found)}


def catalog_date() -> str:
    """The day of the catalog's models: the third part of the first line."""
    with open(DATA / "models.csv", encoding="utf-8") as file:
        return file.readline().rpartition(" - ")[2].strip()


def _model(one: ListedModel) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "uses": [use.use for use in uses_of(one.hf_id)]}


def plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists; a ``Speed`` as four keys beside its neighbours."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for name in value.__slots__:  # type: ignore[attr-defined]
            held = getattr(value, name)
            found |= rate(name, held) if isinstance(held, Speed) else {name: plain(held)}
        return found
    if isinstance(value, Mapping):
        return {key: plain(held) for key, held in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(held) for held in value]
    return value


def rate(name: str, found: Speed) -> dict[str, Any]:
    """The keys of a rate: null with the reason where it is not known."""
    return {
        f"{name}_tps": found.tps,
        f"{name}_tps_low": found.tps_low,
        f"{name}_tps_high": found.tps_high,
        f"{name}_tps_reason": found.reason,
    }
