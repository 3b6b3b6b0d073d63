"""The report's parts put together, for one machine or several."""

from collections.abc import Iterator, Sequence

from uma.architecture.layers import Architecture
from uma.catalog.listed import ListedModel
from uma.checkpoint.source import ModelSource
from uma.frozen import dataclass
from uma.machine import Machine
from uma.plan.capacity.cards import plan_rows, power_w
from uma.plan.capacity.facts import (
    CONTEXTS,
    WIDTHS,
    Best,
    BudgetFacts,
    MachineReport,
    MapRow,
    ModelReport,
    PlanRow,
    TrainingRow,
)
from uma.plan.capacity.map import Place, capacity_map, place_of
from uma.plan.capacity.model import model_report
from uma.plan.capacity.training import training_rows
from uma.plan.choice import FEW_BITS
from uma.plan.compare import Candidate, Wanted
from uma.plan.estimate import default_engine

DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "llama-3.3-70b", "gpt-oss-120b")
"""A small and a large dense model, a small and a large mixture of experts."""

Chosen = tuple[ModelSource, Architecture]


@dataclass(frozen=True, slots=True)
class Named:
    """A machine under the name that it was asked by."""

    name: str
    machine: Machine


@dataclass(frozen=True, slots=True)
class Scope:
    """What a report covers. ``listed`` are the rows of the map, ``chosen`` the models in detail."""

    listed: tuple[ListedModel, ...]
    chosen: tuple[Chosen, ...]
    contexts: tuple[int, ...] = CONTEXTS
    widths: tuple[int, ...] = WIDTHS
    budget_bytes: int | None = None
    reserve_bytes: int | None = None


def machine_reports(machines: Sequence[Named], scope: Scope) -> list[MachineReport]:
    """A report of each machine; what machines of one kind share is worked out once."""
    found: dict[int, MachineReport] = {}
    kinds: dict[object, list[int]] = {}
    for index, one in enumerate(machines):
        machine = one.machine
        key = (default_engine(machine), machine.backend, machine.kind)
        kinds.setdefault(key, []).append(index)
    for indices in kinds.values():
        some = [machines[i] for i in indices]
        found |= dict(zip(indices, _of_one_kind(some, scope), strict=True))
    return [found[i] for i in range(len(machines))]


def _of_one_kind(machines: Sequence[Named], scope: Scope) -> Iterator[MachineReport]:
    facts, places = [], []
    for one in machines:
        engine = default_engine(one.machine)
        place, lines = place_of(one.machine, engine, scope.budget_bytes, scope.reserve_bytes)
        places.append(place)
        facts.append(lines)
    maps = capacity_map(scope.listed, places, scope.contexts, scope.widths)
    models = [model_report(*chosen, places, scope.widths) for chosen in scope.chosen]
    for i, one in enumerate(machines):
        training = tuple(training_rows(scope.chosen, places[i]))
        own = tuple(reports[i] for reports in models)
        yield _report(one, places[i], facts[i], scope, maps[i], own, training)


def _report(
    one: Named,
    place: Place,
    facts: BudgetFacts,
    scope: Scope,
    rows: tuple[MapRow, ...],
    models: tuple[ModelReport, ...],
    training: tuple[TrainingRow, ...],
) -> MachineReport:
    machine = one.machine
    return MachineReport(
        name=one.name,
        title=machine.name,
        kind=machine.kind,
        backend=machine.backend,
        engine=place.engine,
        chip=machine.chip or machine.cpu,
        gpu_cores=machine.gpu_cores,
        os=machine.os,
        os_version=machine.os_version,
        bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s,
        price_usd=machine.price_usd,
        power_w=power_w(one.name),
        calibration=None if machine.calibration is None else machine.calibration.label,
        budget=facts,
        best=tuple(bests(rows, scope, len(facts.limits))),
        rows=rows,
        models=models,
        training=training,
        notes=machine.notes,
    )


def bests(rows: Sequence[MapRow], scope: Scope, limits: int) -> Iterator[Best]:
    """For each context and limit what fits, and the largest of it."""
    sizes = {model.name: model.parameters or 0 for model in scope.listed}
    for context in scope.contexts:
        for limit in range(limits):
            fitting = [
                (row, cell, at)
                for row in rows
                for cell in row.cells
                for at in cell.at
                if cell.bits >= FEW_BITS
                and at.context_tokens == context
                and at.verdicts[limit] == "fits"
            ]
            if not fitting:
                yield Best(context, limit, 0, 0)
                continue
            models = len({row.model for row, _, _ in fitting})
            row, cell, at = max(fitting, key=lambda f: (sizes[f[0].model], f[1].bits, f[0].model))
            yield Best(
                context,
                limit,
                models,
                len(fitting),
                row.model,
                cell.format,
                cell.bits,
                at.total_bytes,
                at.decode,
            )


def plans_of(
    chosen: Sequence[Chosen],
    candidates: Sequence[Candidate],
    context_tokens: int,
    wanted: Wanted,
) -> tuple[PlanRow, ...]:
    """Each chosen model on each candidate."""
    return tuple(
        row
        for source, architecture in chosen
        for row in plan_rows(source, architecture, context_tokens, candidates, wanted)
    )
