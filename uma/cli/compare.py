"""``uma compare``: which machine for a model, and how: one memory against cards."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, chosen_model
from uma.errors import DoesNotFit, UnsupportedModel, UsageError
from uma.workload import Inference

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.plan.compare import Candidate, Comparison, HostProfile, Price, Wanted
    from uma.plan.compare.subject import Subject

Prefer = Literal["quality", "speed", "price", "context"]
Emit = Literal["llama.cpp", "mlx", "accelerate", "vllm"]


def compare(
    context_: typer.Context,
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    context: opt.ContextTokens = opt.CONTEXT_TOKENS,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            help="A machine or a pattern, such as mac-studio-* or 2xrtx-3090; repeatable. "
            "[default: this one and 12 that are sold]",
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every machine of the catalog, cards also in pairs.")
    ] = False,
    min_bits: Annotated[int, typer.Option(min=2, max=16, help="Fewest bits of a weight.")] = 4,
    min_tps: Annotated[
        float, typer.Option(min=0, help="Tokens per second that are fast enough.")
    ] = 10,
    prefer: Annotated[
        Prefer,
        typer.Option(
            help="quality: the least quantized that is fast enough; speed, price, context (the "
            "most memory to spare) choose and order by those."
        ),
    ] = "quality",
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at once, each with the context.")
    ] = 1,
    kv_bits: Annotated[
        Literal["8", "4"] | None,
        typer.Option(help="Quantize the KV cache: 8 bits, or 4, which vLLM does not have."),
    ] = None,
    macos: Annotated[
        int | None, typer.Option(min=11, help="Major version of macOS, which sets the GPU limit.")
    ] = None,
    host_ram: Annotated[
        str, typer.Option(help="Memory of the machine that cards are in, as sold.")
    ] = "64GB",
    host_bandwidth: Annotated[
        float, typer.Option(min=1, help="GB/s of that memory: 89.6 is two channels of DDR5-5600.")
    ] = 89.6,
    host_price: Annotated[
        int | None, typer.Option(min=0, help="US$ of that machine without cards.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="What a machine or a card costs you, as NAME=USD; repeatable."),
    ] = None,
    launch_prices: Annotated[
        bool, typer.Option("--launch-prices", help="Let prices at launch be the cheapest.")
    ] = False,
    emit: Annotated[
        Emit | None,
        typer.Option(
            help="Print the command or script that runs the plan of one --machine with this "
            "program, each value with its reason."
        ),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="A line a machine, for a spreadsheet.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Compare machines for a model: what fits, by which technique, how fast, at what price.

    Of each machine the least quantized plan that fits and is fast enough is shown, and why better
    ones were not taken. The exit code is 3 when it fits none.

    \b
    Examples:
      uma compare llama-3-70b --context 16384
      uma compare llama-3-70b --machine mac-studio-m2-ultra-192 --machine 2xrtx-3090
      uma compare qwen3-30b-a3b --machine 'rtx-*' --prefer speed --host-price 900
      uma compare llama-3-70b --machine rtx-4090 --emit llama.cpp
    """
    from uma.machine.named import sold_bytes
    from uma.plan.compare import HostProfile, Price
    from uma.plan.compare.prices import user_prices
    from uma.plan.compare.search import Wanted

    opt.require_numbers(min_tps=min_tps, host_bandwidth=host_bandwidth)
    if csv and json:
        raise UsageError("--csv and --json are two documents: give one of them")
    if emit is not None and (csv or json):
        raise UsageError("--emit prints a configuration: leave out --csv and --json")
    if all_ and machine:
        raise UsageError("--all is every machine: leave out --machine")
    host = HostProfile(
        sold_bytes(host_ram, "--host-ram"),
        round(host_bandwidth * 1e9),
        None if host_price is None else Price(host_price, "user"),
    )
    source = _source(chosen_model(context_, model_argument, model))
    wanted = Wanted(min_bits, min_tps, prefer, launch_prices)
    prices = user_prices(price or [])
    workload = Inference(
        context, batch_size=concurrency, kv_bits=None if kv_bits is None else int(kv_bits)
    )
    if emit is not None:
        named = _candidates(_one(machine, all_), False, host, prices, macos)
        print(_configuration(emit, source, workload, named, wanted))
        return
    first, others = _candidates(machine, all_, host, prices, macos)
    found = _compared(source, workload, first, others, wanted, all_ or bool(machine))
    print(_shown(found, source, host, "json" if json else "csv" if csv else "text"))
    raise typer.Exit(0 if any(row.runs for row in found.rows) else DoesNotFit.exit_code)


def _one(names: list[str] | None, every: bool) -> list[str] | None:
    if every or len(names or []) > 1:
        raise UsageError("--emit is for one machine: give one --machine, or none for this one")
    return names


def _configuration(
    emit: Emit,
    source: "ModelSource",
    workload: Inference,
    named: "tuple[Candidate | None, list[Candidate]]",
    wanted: "Wanted",
) -> str:
    from dataclasses import replace

    from uma.plan.compare.search import best_plan
    from uma.plan.emit.configuration import ENGINES, configuration

    here, others = named
    chosen = [here] if here is not None else others
    if len(chosen) != 1:
        raise UsageError(f"--emit is for one machine, and that pattern means {len(chosen)}")
    subject = _subject(source, workload)
    row = best_plan(subject, chosen[0], replace(wanted, engine=ENGINES[emit]))
    return configuration(emit, subject, row)


def _source(model: str | None) -> "ModelSource":
    from uma.cli.plan import described, located

    chosen = RunOptions(model=model)
    source = described(chosen, located(chosen))
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    return source


def _candidates(
    names: list[str] | None,
    every: bool,
    host: "HostProfile",
    prices: "dict[str, Price]",
    macos: int | None,
) -> "tuple[Candidate | None, list[Candidate]]":
    """This machine, unless others are named, and the others."""
    from uma.plan.compare import candidates, catalog_candidates, this_candidate

    if names:
        return None, candidates(names, host, prices, macos)
    from uma.cli.calibrated import calibrated
    from uma.machine.here import machine_of

    here = this_candidate(calibrated(machine_of()), host)
    return here, catalog_candidates(host, prices, sold=not every, macos=macos)


def _compared(
    source: "ModelSource",
    workload: Inference,
    first: "Candidate | None",
    others: "list[Candidate]",
    wanted: "Wanted",
    every: bool,
) -> "Comparison":
    from uma.plan.compare import compare as compared
    from uma.plan.compare.search import SHOWN

    shown = None if every else SHOWN
    return compared(_subject(source, workload), others, wanted, shown, first)


def _subject(source: "ModelSource", workload: Inference) -> "Subject":
    from uma.architecture import architecture_from_config
    from uma.plan.compare.subject import Subject

    assert source.config is not None
    return Subject(source, architecture_from_config(source.config), workload)


def _shown(found: "Comparison", source: "ModelSource", host: "HostProfile", form: str) -> str:
    from uma.cli.plan import model_json
    from uma.report.compare import compare_csv, compare_json, compare_text

    if form == "json":
        return json_module.dumps(compare_json(found, model_json(source), host), indent=2)
    return compare_csv(found) if form == "csv" else compare_text(found, source.name, host)
