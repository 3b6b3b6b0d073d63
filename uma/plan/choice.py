"""What fits a machine: every model of the catalog in its best format, the largest first.

Size is no ranking of quality: a newer model of half the size is often the better one.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.catalog import find_model, model_config
from uma.catalog.listed import ListedModel, listed_models
from uma.catalog.uses import Use, require_use, uses_of
from uma.checkpoint import default_model
from uma.checkpoint.source import locate
from uma.errors import UmaError, UnsupportedModel
from uma.ledger import Verdict, peak
from uma.machine import Budget, Machine, budget_of
from uma.plan.engine_case import budget_under, engine_case
from uma.plan.estimate import Asked, Change, Estimate, default_engine
from uma.plan.inference import Request
from uma.plan.inverses import largest_context
from uma.plan.mlx_case import MlxCase, mlx_case
from uma.plan.speeds import decode_of
from uma.quantization import quantization_of_config
from uma.speed.rate import NotKnown
from uma.workload import Engine, Inference

FEW_BITS = 4  # below it the answers suffer more than a smaller model's would
WIDTHS = (16, 8, 6, 5, 4, 3)
FEW_BITS_NOTE = f"below {FEW_BITS} bits answers suffer: a smaller model may serve better"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model is looked for; ``None`` leaves it open.

    ``min_tps`` leaves out those that are known to be slower, not those whose speed is not known.
    ``limit`` ends the search when so many are found, 0 never.
    """

    context_tokens: int = Inference().context_tokens
    engine: Engine | None = None
    use: str | None = None
    text: str = ""
    kind: str | None = None
    max_parameters: int | None = None
    min_tps: float | None = None
    budget_bytes: int | None = None
    reserve_bytes: int | None = None
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of decode at the asked context; ``None`` for the ``reason``."""

    decode_tps: float | None = None
    decode_tps_low: float | None = None
    decode_tps_high: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A model in the best format that fits, and the command that runs or estimates it so.

    ``needed_bytes`` are without MLX's pool, which takes what the budget leaves of ``total_bytes``.
    ``max_context_tokens`` is within the budget, ``tight_context_tokens`` within the limit, told
    where the model is tight.
    """

    model: ListedModel
    parameters: int
    uses: tuple[Use, ...]
    format: str
    bits: int
    weights_bytes: int
    total_bytes: int
    needed_bytes: int
    headroom_bytes: int
    verdict: Verdict
    max_context_tokens: int | None
    tight_context_tokens: int | None
    speed: Speed
    command: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """Those that fit, the largest first. ``wanted_models`` counts all of the asked kind.

    ``not_seen`` are smaller than the last that was looked at, ``too_short`` are made for less
    context, ``too_slow`` would run but not as fast as was asked, ``not_estimated`` are names with
    the reason.
    """

    machine: Machine
    engine: Engine
    budget: Budget
    wanted: Wanted
    found: tuple[Choice, ...]
    wanted_models: int
    not_seen: int
    too_short: int
    too_slow: int
    not_estimated: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Search:
    """What stays the same for all models."""

    machine: Machine
    engine: Engine
    budget: Budget
    wanted: Wanted


def what_fits(machine: Machine, wanted: Wanted, told: Sequence[str] = ()) -> Choices:
    """The models that ``wanted`` allows and ``machine`` has room for.

    ``told`` are the options that described the machine, for the commands; none for this one.

    Raises:
        UnknownName: If there is no such use, or kind of model.
        UsageError: If the engine does not run on the machine.
    """
    budget = budget_of(
        machine, user_budget_bytes=wanted.budget_bytes, reserve_bytes=wanted.reserve_bytes
    )
    engine = wanted.engine or default_engine(machine)
    if engine != "mlx":
        budget = budget_under(engine, budget, machine)
    search = _Search(machine, engine, budget, wanted)
    models = _named(wanted)
    least = wanted.context_tokens
    long = [model for model in models if (model.context_tokens or least) >= least]
    long.sort(key=lambda model: (-_parameters(model), model.name))
    found, unseen, too_slow, reasons = _looked_at(long, search, told)
    return Choices(
        machine=machine,
        engine=search.engine,
        budget=budget,
        wanted=wanted,
        found=tuple(sorted(found, key=lambda one: (-one.parameters, one.model.name))),
        wanted_models=len(models),
        not_seen=unseen,
        too_short=len(models) - len(long),
        too_slow=too_slow,
        not_estimated=tuple(reasons),
    )


def _looked_at(
    models: list[ListedModel], search: _Search, told: Sequence[str]
) -> tuple[list[Choice], int, int, list[tuple[str, str]]]:
    """What fits, how many were not looked at, how many are too slow, and which have no plan."""
    found: list[Choice] = []
    reasons: list[tuple[str, str]] = []
    too_slow = 0
    for index, model in enumerate(models):
        if 0 < search.wanted.limit <= len(found):
            return found, len(models) - index, too_slow, reasons
        try:
            asked, slower = _best(_formats(model, search), search)
        except UmaError as error:
            reasons.append((model.name, str(error)))
            continue
        if asked is not None:
            found.append(_choice(model, asked, told))
        elif slower:
            too_slow += 1
    return found, 0, too_slow, reasons


def _named(wanted: Wanted) -> list[ListedModel]:
    """The models of the asked name, kind, size and use."""
    if wanted.use is not None:
        require_use(wanted.use)
    return [
        model
        for model in listed_models(
            wanted.text, kind=wanted.kind, max_parameters=wanted.max_parameters
        )
        if wanted.use is None or wanted.use in {one.use for one in uses_of(model.hf_id)}
    ]


def _parameters(model: ListedModel) -> int:
    """Those of its shapes where no number is listed."""
    return model.parameters or architecture_from_config(_config(model)).num_parameters


def _config(model: ListedModel) -> dict[str, Any]:
    row = find_model(model.hf_id)
    assert row is not None
    return model_config(row).values


def _formats(model: ListedModel, search: _Search) -> Iterator[Asked]:
    """The model in each width that it can be had in, the widest first.

    Raises:
        UnsupportedModel: If the engine cannot run it.
    """
    if not _widths(model.parameters or 0, search.budget):
        return
    config = _config(model)
    architecture = architecture_from_config(config)
    widths = _widths(architecture.num_parameters, search.budget)
    if search.engine == "mlx":
        yield from _mlx_formats(_name(model), config, architecture, widths, search)
    elif widths:
        workload = Inference(search.wanted.context_tokens)
        usual = engine_case(
            architecture, search.engine, None, workload, search.budget, search.machine
        )
        for bits in widths:
            asked = usual.changed(Change(bits=bits)) if bits in usual.widths else None
            if asked is not None:
                yield asked


def _widths(num_parameters: int, budget: Budget) -> list[int]:
    """Those whose bits alone do not pass what ``_best`` would take them for."""
    ceiling = budget.ceiling_bytes
    return [
        bits
        for bits in WIDTHS
        if num_parameters * bits <= 8 * (budget.budget_bytes if bits < FEW_BITS else ceiling)
    ]


def _mlx_formats(
    name: str,
    config: dict[str, Any],
    architecture: Architecture,
    widths: list[int],
    search: _Search,
) -> Iterator[Asked]:
    """What is stored quantized has no more bits than those."""
    if architecture.module is None:
        raise UnsupportedModel(f"mlx-lm has no module for {architecture.model_type}")
    stored = quantization_of_config(config)
    held = max(WIDTHS) + 1 if stored is None else stored.default.bits
    wanted = search.wanted
    request = Request(
        context_tokens=wanted.context_tokens,
        budget_bytes=wanted.budget_bytes,
        reserve_bytes=wanted.reserve_bytes,
    )
    first: MlxCase | None = None
    for bits in widths:
        if bits <= held:
            asked: dict[str, Any] = {} if bits == held else {"bits": bits}
            source = locate(name, **asked)
            case = mlx_case(source, search.machine, request, asked=asked, architecture=architecture)
            first = case if first is None else first
            yield case.like(first)


def _best(formats: Iterator[Asked], search: _Search) -> tuple[Asked | None, bool]:
    """The widest of 4 bits or more that fits, else the narrowest of them that is tight.

    Where none of them is either, one of fewer bits that fits; ``None`` for none. The second value
    says whether one that would run is known to be slower than ``min_tps``.
    """
    budget, min_tps = search.budget, search.wanted.min_tps
    ceiling, tight, slower = budget.ceiling_bytes, None, False
    for asked in formats:
        if asked.bits < FEW_BITS and (slower or tight is not None):
            break
        workload = asked.workload
        excess = asked.excess_bytes(workload, budget.budget_bytes)
        # More above the budget than the limit is: above the limit too.
        if excess > ceiling - budget.budget_bytes:
            continue
        if excess > 0 and (asked.bits < FEW_BITS or asked.excess_bytes(workload, ceiling) > 0):
            continue
        speed = None if min_tps is None else _speed(asked.estimate()).decode_tps
        if speed is not None and speed < (min_tps or 0):
            slower = True
            continue
        if excess <= 0:
            return asked, slower
        tight = asked
    return tight, slower


def _choice(model: ListedModel, asked: Asked, told: Sequence[str]) -> Choice:
    estimate = asked.estimate()
    tight = estimate.ledger.verdict == "tight"
    return Choice(
        model=model,
        parameters=asked.architecture.num_parameters,
        uses=uses_of(model.hf_id),
        format=estimate.format,
        bits=asked.bits,
        weights_bytes=_weights_bytes(estimate),
        total_bytes=estimate.ledger.predicted_peak_bytes,
        needed_bytes=peak(t for t in estimate.ledger.terms if t.name != "buffer_pool")[1],
        headroom_bytes=estimate.headroom_bytes,
        verdict=estimate.ledger.verdict,
        max_context_tokens=largest_context(asked),
        tight_context_tokens=largest_context(asked, asked.budget.ceiling_bytes) if tight else None,
        speed=_speed(estimate),
        command=_command(model, asked, told),
        notes=(FEW_BITS_NOTE,) if asked.bits < FEW_BITS else (),
    )


def _speed(estimate: Estimate) -> Speed:
    found = decode_of(estimate)
    if isinstance(found, NotKnown):
        return Speed(reason=found.reason)
    return Speed(found.best, found.low, found.high)


def _weights_bytes(estimate: Estimate) -> int:
    return sum(t.size_bytes for t in estimate.ledger.terms if t.name == "weights")


def _command(model: ListedModel, asked: Asked, told: Sequence[str]) -> str:
    """``uma run`` on this machine under MLX, else ``uma estimate`` of the same."""
    change = Change(bits=asked.bits, context_tokens=asked.workload.context_tokens)
    words = [_name(model), *asked.options(change)]
    if asked.engine == "mlx" and not told:
        return shlex.join(["uma", "run", *words])
    return shlex.join(["uma", "estimate", *words, *told, "--engine", asked.engine])


def _name(model: ListedModel) -> str:
    """The short name, but of the default model, whose name means the copy that is shipped."""
    return model.hf_id if model.hf_id == default_model.HF_ID else model.name
