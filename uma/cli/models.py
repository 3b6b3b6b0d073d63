"""``uma models``: the models that a name means, and those that fit a machine."""

import json as json_module
import re
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from uma.cli import options as opt
from uma.errors import DoesNotFit, UsageError
from uma.workload import Engine

if TYPE_CHECKING:
    from uma.plan.choice import Wanted

LINES = 30  # as many as one looks through
WITH_FITS = ("machine", "ram", "context", "use", "min_tps", "limit", "engine", "budget", "reserve")

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([MBT])", re.IGNORECASE)
_SCALE = {"M": 10**6, "B": 10**9, "T": 10**12}


def models(
    context_: typer.Context,
    text: Annotated[
        list[str] | None,
        typer.Argument(show_default=False, help="Words of the name, such as qwen coder."),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="dense, or moe for mixtures of experts.")] = None,
    max_parameters: Annotated[
        str | None, typer.Option(help="Only up to this size, such as 32B.")
    ] = None,
    fits: Annotated[
        bool, typer.Option("--fits", help="What should I run? Only what fits, in its best format.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="With --fits: machine by name. [default: this machine]"),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(help="With --fits: a Mac by its memory, as sold, such as 64GB."),
    ] = None,
    context: opt.ContextTokens = opt.CONTEXT_TOKENS,
    use: Annotated[
        str | None, typer.Option(help="With --fits: made for coding, chat, reasoning, ...")
    ] = None,
    min_tps: Annotated[
        float | None, typer.Option(min=0, help="With --fits: at least so many tokens per second.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="With --fits: how many, 0 for all. [default: 30; all in JSON]"),
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option(help="With --fits. [default: mlx on Apple silicon, else llama.cpp]"),
    ] = None,
    budget: opt.BudgetSize = None,
    reserve: opt.Reserve = None,
    json: opt.Json = False,
) -> None:
    """List the models of the catalog, smallest first, or with --fits what a machine can run.

    Parameters are those of the text decoder, from its shapes. Others than these run too: give a
    folder, a .gguf file or a hub repository as MODEL.

    With --fits each model stands in the widest format that fits, of 4 bits or more where it can,
    the largest first. Size is no ranking of quality. The exit code is 3 when nothing fits.

    \b
    Examples:
      uma models qwen --max-parameters 32B
      uma models --fits --use coding
      uma models --fits --machine macbook-air-m4-16 --context 32768
    """
    from uma.catalog.listed import listed_models
    from uma.report.models import models_json, models_text

    most = None if max_parameters is None else parse_count(max_parameters, "--max-parameters")
    words = " ".join(text or [])
    if not fits:
        _refuse_without_fits(context_)
        found = listed_models(words, kind=kind, max_parameters=most)
        print(json_module.dumps(models_json(found), indent=2) if json else models_text(found))
        return
    from uma.plan.choice import Wanted

    opt.require_numbers(min_tps=min_tps)
    if min_tps is not None and not isfinite(min_tps):
        raise UsageError(f"--min-tps {min_tps} is no number of tokens per second")
    wanted = Wanted(
        context_tokens=context,
        engine=engine,
        use=use,
        text=words,
        kind=kind,
        max_parameters=most,
        min_tps=min_tps,
        budget_bytes=opt.size_option(budget, "--budget"),
        reserve_bytes=opt.size_option(reserve, "--reserve"),
        limit=(0 if json else LINES) if limit is None else limit,
    )
    raise typer.Exit(_fits(wanted, machine, ram, json))


def _fits(wanted: "Wanted", name: str | None, ram: str | None, json: bool) -> int:
    """Print what fits; the exit code."""
    from uma.machine import read_machine
    from uma.machine.here import machine_of
    from uma.machine.named import sold_bytes
    from uma.plan.choice import what_fits
    from uma.report.models import choices_json, choices_text

    told = [] if name is None else ["--machine", name]
    told += [] if ram is None else ["--ram", ram]
    if told or wanted.engine != "mlx":
        machine = machine_of(name, ram_bytes=None if ram is None else sold_bytes(ram))
    else:
        machine = read_machine()  # as `uma run` sees it
    found = what_fits(machine, wanted, told)
    print(json_module.dumps(choices_json(found), indent=2) if json else choices_text(found))
    return 0 if found.found or not found.wanted_models else DoesNotFit.exit_code


def _refuse_without_fits(context: typer.Context) -> None:
    """
    Raises:
        UsageError: If an option was given that means nothing without ``--fits``.
    """
    for name in WITH_FITS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')} goes with --fits")


def parse_count(text: str, name: str) -> int:
    """A number of parameters as models are named.

    Raises:
        UsageError: If it has no unit, which could mean anything.

    >>> parse_count("0.5B", "--max-parameters")
    500000000
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name}: {text!r} is not a number of parameters; write 500M or 32B")
    return int(Decimal(match[1]) * _SCALE[match[2].upper()])
