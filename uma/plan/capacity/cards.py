"""The chosen models on the reported machines against graphics cards, by ``uma compare``."""

from collections.abc import Sequence
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.catalog import Gpu, Mac, UnifiedMachine
from uma.checkpoint.source import ModelSource
from uma.errors import UmaError
from uma.machine.names import find
from uma.plan.capacity.facts import PlanRow, speed
from uma.plan.compare import Candidate, Comparison, Row, Wanted, compare
from uma.plan.compare.subject import Subject
from uma.workload import Inference

CARDS = ("rtx-4090", "2xrtx-3090", "rtx-5090", "2xrtx-5090", "rtx-pro-6000-blackwell", "h100")


def plan_rows(
    source: ModelSource,
    architecture: Architecture,
    context_tokens: int,
    candidates: Sequence[Candidate],
    wanted: Wanted,
) -> list[PlanRow]:
    """A row for each candidate, in their order."""
    found = comparison(source, architecture, context_tokens, candidates, wanted)
    rows = {row.candidate.name: row for row in found.rows}
    return [plan_row(source.name, rows[one.name]) for one in candidates if one.name in rows]


def comparison(
    source: ModelSource,
    architecture: Architecture,
    context_tokens: int,
    candidates: Sequence[Candidate],
    wanted: Wanted,
    *,
    batch_size: int = 1,
) -> Comparison:
    workload = Inference(context_tokens, batch_size=batch_size)
    return compare(Subject(source, architecture, workload), candidates, wanted)


def plan_row(model: str, row: Row) -> PlanRow:
    candidate, plan = row.candidate, row.plan
    price = candidate.price or candidate.parts_price
    found = PlanRow(
        model=model,
        machine=candidate.name,
        kind="discrete" if candidate.discrete else "unified",
        price_usd=None if price is None else price.usd,
        price_kind=None if price is None else price.kind,
        price_date=None if price is None else price.date,
        price_note=_price_note(candidate),
        power_w=power_w(candidate.name),
    )
    if plan is None:
        return found
    return replace(
        found,
        technique=plan.technique,
        engine=plan.engine,
        format=plan.format,
        bits=plan.bits,
        device_bytes=plan.device_bytes,
        host_bytes=plan.host_bytes,
        budget_bytes=plan.budget_bytes,
        verdict=plan.verdict,
        decode=speed(plan.decode, plan.sequences),
        prompt=speed(plan.prompt),
        notes=plan.notes,
    )


def _price_note(candidate: Candidate) -> str | None:
    if candidate.price is None and candidate.parts_price is not None:
        return "without the machine around the cards"
    return candidate.price_reason


def power_w(name: str) -> int | None:
    """Watts that a machine may draw by its maker's figures: of a card the card alone."""
    try:
        found = find(name)
    except UmaError:
        return None
    row = found.entries[0].row
    if isinstance(row, Gpu):
        return None if row.tdp_w is None else round(row.tdp_w * found.number)
    if isinstance(row, Mac):
        watts = [
            e.row.max_power_w
            for e in found.entries
            if isinstance(e.row, Mac) and e.row.max_power_w is not None
        ]
        return round(max(watts)) if watts else None
    if isinstance(row, UnifiedMachine):
        return None if row.power_w is None else round(row.power_w)
    return None
