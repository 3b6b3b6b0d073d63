"""The capacity map: every model of the catalog in every width, on one machine or on several.

What a model needs is worked out once for all machines of a kind, and all limits of each.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.catalog import find_model, model_config
from uma.catalog.listed import ListedModel
from uma.checkpoint import default_model
from uma.checkpoint.source import locate
from uma.errors import UmaError, UnsupportedModel
from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.machine import Budget, Machine, budget_of
from uma.machine.named import with_gpu_limit
from uma.memory.reads import WeightReads, evenly_stored, weight_reads
from uma.plan.capacity.facts import NO_SPEED, BudgetFacts, Cell, CellAt, MapRow, budget_facts, speed
from uma.plan.engine_case import EngineCase, budget_under, engine_case
from uma.plan.engine_words import format_of_bits
from uma.plan.estimate import Asked
from uma.plan.inference import Request
from uma.plan.mlx_case import MlxCase, mlx_case
from uma.quantization import quantization_of_config
from uma.speed.decode import decode_tps
from uma.speed.processor import Processor, processors_of
from uma.workload import Engine, Inference

_UNIT = 10**9  # bytes of weights that the reads of a model are worked out for


@dataclass(frozen=True, slots=True)
class Place:
    """A machine and its budget; ``machines`` are it under each of its limits, the first as is.

    ``own_budget_bytes`` and ``own_reserve_bytes`` are those that the user set.
    """

    machine: Machine
    engine: Engine
    budget: Budget
    machines: tuple[Machine, ...]
    processors: tuple[Processor, ...]
    own_budget_bytes: int | None = None
    own_reserve_bytes: int | None = None

    def budget_on(self, machine: Machine) -> Budget:
        """The same machine under another limit."""
        return budget_of(
            machine,
            user_budget_bytes=self.own_budget_bytes,
            reserve_bytes=self.own_reserve_bytes,
        )


def place_of(
    machine: Machine,
    engine: Engine,
    own_budget_bytes: int | None = None,
    own_reserve_bytes: int | None = None,
) -> tuple[Place, BudgetFacts]:
    """
    Raises:
        UsageError: If the user's budget or reserve leaves no room on the machine.
    """
    budget = budget_of(machine, user_budget_bytes=own_budget_bytes, reserve_bytes=own_reserve_bytes)
    if engine != "mlx":
        budget = budget_under(engine, budget, machine)
    facts = budget_facts(machine, budget)
    raised = (with_gpu_limit(machine, one.limit_bytes) for one in facts.limits[1:])
    place = Place(
        machine,
        engine,
        budget,
        (machine, *raised),
        processors_of(machine),
        own_budget_bytes,
        own_reserve_bytes,
    )
    return place, facts


def capacity_map(
    models: Sequence[ListedModel],
    places: Sequence[Place],
    contexts: Sequence[int],
    widths: Sequence[int],
) -> list[tuple[MapRow, ...]]:
    """For each place the rows of all models.

    The places have one engine, backend and kind, so that what a model needs is the same on each.
    """
    found: list[list[MapRow]] = [[] for _ in places]
    for model in models:
        try:
            one = _subject(model, places[0], contexts, widths)
            told = [MapRow(model.name, tuple(_cells(one, place))) for place in places]
        except UmaError as error:
            told = [MapRow(model.name, (), str(error)) for _ in places]
        for rows, row in zip(found, told, strict=True):
            rows.append(row)
    return [tuple(rows) for rows in found]


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model in every width that it can be had in; ``reads`` are those of ``_UNIT`` bytes."""

    architecture: Architecture
    contexts: tuple[int, ...]
    reads: WeightReads
    asked: tuple[Asked, ...]


def _subject(
    model: ListedModel, place: Place, contexts: Sequence[int], widths: Sequence[int]
) -> _Subject:
    row = find_model(model.hf_id)
    assert row is not None
    config = model_config(row).values
    architecture = architecture_from_config(config)
    longest = architecture.max_position_embeddings
    if place.engine == "mlx":
        asked = _mlx_widths(catalog_name(model), config, architecture, place, widths)
    else:
        asked = _other_widths(architecture, place, widths)
    return _Subject(
        architecture,
        tuple(n for n in contexts if longest is None or n <= longest),
        weight_reads(architecture, evenly_stored(architecture, _UNIT)),
        tuple(asked),
    )


def catalog_name(model: ListedModel) -> str:
    """The short name, but of the default model, whose name means the copy that is shipped."""
    return model.hf_id if model.hf_id == default_model.HF_ID else model.name


def _mlx_widths(
    name: str,
    config: dict[str, Any],
    architecture: Architecture,
    place: Place,
    widths: Sequence[int],
) -> Iterator[Asked]:
    """What is stored quantized has no more bits than those."""
    if architecture.module is None:
        raise UnsupportedModel(f"mlx-lm has no module for {architecture.model_type}")
    stored = quantization_of_config(config)
    held = max(widths) + 1 if stored is None else stored.default.bits
    request = Request(budget_bytes=place.own_budget_bytes, reserve_bytes=place.own_reserve_bytes)
    first: MlxCase | None = None
    for bits in widths:
        if bits <= held:
            asked: dict[str, Any] = {} if bits == held else {"bits": bits}
            source = locate(name, **asked)
            case = mlx_case(source, place.machine, request, asked=asked, architecture=architecture)
            first = case if first is None else first
            yield case.like(first)


def _other_widths(
    architecture: Architecture, place: Place, widths: Sequence[int]
) -> Iterator[Asked]:
    usual = engine_case(architecture, place.engine, None, Inference(), place.budget, place.machine)
    for bits in widths:
        if bits in usual.widths:
            with suppress(UmaError):
                same = bits == usual.bits
                yield usual if same else usual.stored_as(format_of_bits(place.engine, bits))


def _cells(one: _Subject, place: Place) -> Iterator[Cell]:
    for asked in one.asked:
        weights = weights_of(asked)
        reads = scaled(one.reads, weights / _UNIT)
        yield Cell(
            asked.bits,
            asked.format,
            weights,
            round(8 * weights / one.architecture.num_parameters, 4),
            tuple(_cell_at(at_context(asked, n), place, reads, n) for n in one.contexts),
        )


def _cell_at(asked: Asked, place: Place, reads: WeightReads, context: int) -> CellAt:
    found = on(asked, place).estimate()
    verdicts = verdicts_at(asked, place, found.ledger.verdict)
    return CellAt(
        context,
        found.ledger.predicted_peak_bytes,
        found.headroom_bytes,
        found.ledger.verdict,
        verdicts,
        speed(decode_tps(asked.architecture, reads, place.processors, asked.engine, context))
        if runs(verdicts)
        else NO_SPEED,
    )


def runs(verdicts: Sequence[Verdict]) -> bool:
    """Whether it does under some limit."""
    return any(one in ("fits", "tight") for one in verdicts)


def verdicts_at(asked: Asked, place: Place, first: Verdict) -> tuple[Verdict, ...]:
    """The verdict under each limit; what fits under the first fits under those above it."""
    if first == "fits" or len(place.machines) == 1:
        return (first,) * len(place.machines)
    if weights_of(asked) > place.machines[-1].limit_bytes:
        return (first,) * len(place.machines)
    raised = (on(asked, place, machine).estimate().ledger.verdict for machine in place.machines[1:])
    return (first, *raised)


def on(asked: Asked, place: Place, limited: Machine | None = None) -> Asked:
    """The same on another machine of its kind, or on it with another limit.

    What is known of its needs is kept.
    """
    machine = limited or place.machine
    if isinstance(asked, MlxCase):
        return asked.on(machine)
    assert isinstance(asked, EngineCase)
    settings = asked.settings
    if asked.engine == "llama.cpp" and machine.devices:
        settings = replace(settings, num_devices=len(machine.devices))
    budget = budget_under(asked.engine, place.budget_on(machine), machine, settings)
    return replace(asked, machine=machine, settings=settings, budget=budget)


def at_context(asked: Asked, context: int) -> Asked:
    if isinstance(asked, MlxCase):
        return replace(asked, request=replace(asked.request, context_tokens=context))
    assert isinstance(asked, EngineCase)
    return replace(asked, workload=replace(asked.workload, context_tokens=context))


def weights_of(asked: Asked) -> int:
    if isinstance(asked, MlxCase):
        return asked.cases[-1].form.weights.size_bytes
    assert isinstance(asked, EngineCase)
    return asked.weights.size_bytes


def scaled(reads: WeightReads, part: float) -> WeightReads:
    """``reads`` of weights that take ``part`` of the bytes, in the same proportions."""
    experts = tuple(replace(one, size_bytes=one.size_bytes * part) for one in reads.experts)
    return replace(reads, dense_bytes=reads.dense_bytes * part, experts=experts)
