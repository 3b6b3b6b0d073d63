"""What ``uma compare`` does with its options: one search for each context, then one report."""

import json as json_module
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, given
from uma.errors import DoesNotFit, UnsupportedModel, UsageError
from uma.units import GB

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.plan.compare import Candidate, Comparison, HostProfile, Row, Wanted
    from uma.plan.compare.subject import Subject
    from uma.plan.compare.training_subject import TrainingSubject

MIN_TPS = 10.0
LINKS = {"3": 15.8, "4": 31.5, "5": 63.0}  # GB/s of x16 in one direction, as in gpus.csv
GENERATING = ("context", "min_context", "concurrency", "kv_bits")
TRAINING = ("rank", "max_seq_length", "batch_size")
GENERATED_BY = ("llama.cpp", "mlx", "accelerate", "vllm")
TRAINED_BY = ("mlx", "peft", "deepspeed", "peft-deepspeed", "fsdp", "peft-fsdp")
_TRAINERS = (
    "mlx is for Macs, peft for cards, fsdp and deepspeed for several, or with a part of the state "
    "on the host"
)
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+[km]?", re.IGNORECASE)


def run(context: typer.Context, model: str | None) -> None:
    """Print the comparison, or the configuration of one machine; ends with the exit code.

    Raises:
        UsageError: If options contradict each other.
    """
    asked: dict[str, Any] = context.params
    _check(context, asked)
    host, wanted = _host(asked), _wanted(asked)
    source = _source(model)
    contexts = _contexts(asked["context"])
    subjects = [_subject(source, asked, tokens) for tokens in contexts]
    if asked["emit"] is not None:
        print(_configuration(asked, subjects, host, wanted))
        return
    found = _compared(asked, subjects, host, wanted)
    print(_shown(asked, found, source, host))
    runs = any(row.runs for one in found for row in one.rows)
    raise typer.Exit(0 if runs else DoesNotFit.exit_code)


def _check(context: typer.Context, asked: dict[str, Any]) -> None:
    numbers = ("min_tps", "host_bandwidth", "disk_bandwidth", "hours_per_day", "years", "kwh")
    opt.require_numbers(**{name: asked[name] for name in numbers})
    if asked["csv"] and asked["json"]:
        raise UsageError("--csv and --json are two documents: give one of them")
    if asked["emit"] is not None and (asked["csv"] or asked["json"]):
        raise UsageError("--emit prints a configuration: leave out --csv and --json")
    if asked["all_"] and asked["machine"]:
        raise UsageError("--all is every machine: leave out --machine")
    training = asked["train"] is not None
    stray = [name for name in (GENERATING if training else TRAINING) if given(context, name)]
    if stray:
        option = f"--{stray[0].replace('_', '-')}"
        if training:
            raise UsageError(f"{option} is for generating text: leave it out, or --train")
        raise UsageError(f"{option} is an option of training: give --train too")
    if asked["emit"] not in (None, *(TRAINED_BY if training else GENERATED_BY)):
        does, then = ("generate", "leave out") if training else ("train", "give")
        raise UsageError(f"--emit {asked['emit']} is for plans that {does}: {then} --train")


def _host(asked: dict[str, Any]) -> "HostProfile":
    from uma.machine.named import sold_bytes
    from uma.plan.compare import HostProfile, Price

    if not re.match(r"\s*\d", asked["host_ram"]):
        raise UsageError(f"--host-ram {asked['host_ram']!r}: write it as 64GB")
    price, disk = asked["host_price"], asked["host_disk"]
    link, rate = LINKS.get(asked["pcie"] or ""), asked["disk_bandwidth"]
    return HostProfile(
        sold_bytes(asked["host_ram"], "--host-ram"),
        round(asked["host_bandwidth"] * GB),
        None if price is None else Price(price, "user"),
        asked["host_power"],
        None if link is None else round(link * GB),
        opt.size_option(disk, "--host-disk"),
        None if rate is None else round(rate * GB),
    )


def _wanted(asked: dict[str, Any]) -> "Wanted":
    from uma.plan.compare.costs import Use
    from uma.plan.compare.search import Wanted

    fast = asked["min_tps"]
    if fast is None:
        fast = MIN_TPS if asked["train"] is None else 0.0
    use = Use(asked["hours_per_day"], asked["years"], asked["kwh"])
    return Wanted(asked["min_bits"], fast, asked["prefer"], asked["launch_prices"], use=use)


def _contexts(texts: list[str] | None) -> list[int]:
    """The lengths asked for, each once, the shortest first."""
    parts: list[str] = []
    for text in texts or [str(opt.CONTEXT_TOKENS)]:
        parts += [text] if _THOUSANDS.fullmatch(text.strip()) else text.split(",")
    try:
        return sorted({opt.context_tokens(part) for part in parts})
    except typer.BadParameter as error:
        raise UsageError(f"--context: {error.message}") from None


def _source(model: str | None) -> "ModelSource":
    from uma.cli.plan import described, located

    chosen = RunOptions(model=model)
    source = described(chosen, located(chosen))
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    return source


def _subject(
    source: "ModelSource", asked: dict[str, Any], tokens: int
) -> "Subject | TrainingSubject":
    from uma.architecture import architecture_from_config
    from uma.plan.compare.subject import Subject
    from uma.workload import Inference, TrainingWorkload

    assert source.config is not None
    architecture = architecture_from_config(source.config)
    if asked["train"] is not None:
        from uma.plan.compare.training_subject import TrainingSubject

        kind: Any = {"rslora": "lora"}.get(asked["train"], asked["train"])
        workload = TrainingWorkload(
            method="lora" if kind == "qlora" else kind,
            rank=asked["rank"],
            num_layers=None,
            batch_size=asked["batch_size"],
            max_seq_length=asked["max_seq_length"],
            mem_kind="device",
        )
        return TrainingSubject(source, architecture, workload, kind)
    room, bits = max(tokens, asked["min_context"] or 0), asked["kv_bits"]
    return Subject(
        source,
        architecture,
        Inference(
            room, batch_size=asked["concurrency"], kv_bits=None if bits is None else int(bits)
        ),
        tokens,
    )


def _candidates(
    asked: dict[str, Any], host: "HostProfile"
) -> "tuple[Candidate | None, list[Candidate]]":
    """This machine, unless others are named, and the others."""
    from uma.plan.compare import candidates, catalog_candidates, this_candidate
    from uma.plan.compare.candidates import with_rents
    from uma.plan.compare.costs import user_rents
    from uma.plan.compare.prices import user_prices

    prices, rents = user_prices(asked["price"] or []), user_rents(asked["rent"] or [])
    macos, here = asked["macos"], None
    if asked["machine"]:
        others = candidates(asked["machine"], host, prices, macos)
    else:
        from uma.cli.calibrated import calibrated
        from uma.machine.here import machine_of

        here = this_candidate(calibrated(machine_of()), host)
        others = catalog_candidates(host, prices, sold=not asked["all_"], macos=macos)
    return here, with_rents(others, rents, host, prices) if rents else others


def _compared(
    asked: dict[str, Any],
    subjects: "Sequence[Subject | TrainingSubject]",
    host: "HostProfile",
    wanted: "Wanted",
) -> "list[Comparison]":
    """One for each context, of the machines that are shown for the longest, and its cheapest."""
    from dataclasses import replace

    from uma.plan.compare import compare
    from uma.plan.compare.search import SHOWN, kept_names, only

    here, others = _candidates(asked, host)
    shown = None if asked["all_"] or asked["machine"] else SHOWN
    *shorter, longest = subjects
    last = compare(longest, others, wanted, None, here)
    names = {row.candidate.name for row in last.rows}
    if shown is not None:
        names = kept_names(last, shown)
    # A pair that is shown has a plan in every column.
    others = [replace(one, alone=None) if one.name in names else one for one in others]
    found = [*(compare(one, others, wanted, None, here) for one in shorter), last]
    names |= {one.cheapest.candidate.name for one in found if one.cheapest is not None}
    return [only(one, names) for one in found] if shown is not None else found


def _configuration(
    asked: dict[str, Any],
    subjects: "Sequence[Subject | TrainingSubject]",
    host: "HostProfile",
    wanted: "Wanted",
) -> str:
    """What runs the plan of the one machine with the program that is asked for."""
    names = asked["machine"] or []
    if asked["all_"] or len(names) > 1:
        raise UsageError("--emit is for one machine: give one --machine, or none for this one")
    if len(subjects) > 1:
        raise UsageError("--emit is for one --context")
    here, others = _candidates(asked, host)
    chosen = others if names else [here] if here is not None else []
    if len(chosen) != 1:
        raise UsageError(f"--emit is for one machine, and that pattern means {len(chosen)}")
    return _emitted(asked["emit"], subjects[0], chosen[0], wanted)


def _emitted(
    emit: Any, subject: "Subject | TrainingSubject", chosen: "Candidate", wanted: "Wanted"
) -> str:
    from dataclasses import replace

    from uma.plan.compare.search import best_plan
    from uma.plan.compare.subject import Subject

    if not isinstance(subject, Subject):
        # The script of peft alone is that of the best plan, whichever program's file is beside it.
        trainer: Any = {"mlx": "uma", "peft": None}.get(emit, emit.removeprefix("peft-"))
        row = best_plan(subject, chosen, replace(wanted, trainer=trainer))
        return _trainer(emit, subject, row)
    from uma.plan.emit.configuration import ENGINES, configuration

    if chosen.number > 1:
        raise UsageError("--emit is not for several Macs: the table says how mlx.launch runs it")
    row = best_plan(subject, chosen, replace(wanted, engine=ENGINES[emit]))
    return configuration(emit, subject, row)


def _trainer(emit: Any, subject: "TrainingSubject", row: "Row") -> str:
    """The file that trains by the plan of ``row``.

    Raises:
        UsageError: If the program does not train on such a machine.
        DoesNotFit: If nothing of it fits.
    """
    from uma.plan.compare.search import NO_TRAINER
    from uma.plan.compare.subject import Subject
    from uma.plan.emit.repository import repository
    from uma.workload import Inference

    plan, name = row.plan, row.candidate.name
    if plan is None or plan.recipe is None or (plan.recipe.engine == "mlx") != (emit == "mlx"):
        reason = _TRAINERS if row.reason in (None, NO_TRAINER) else row.reason
        raise UsageError(f"--emit {emit} has no plan for {name}: {reason}")
    if not plan.runs:
        raise DoesNotFit(
            f"--emit {emit}: no plan fits {name}; {plan.technique}: {plan.shortcoming(0)}"
        )
    title = f"{plan.technique} on {row.candidate.machine.name}: {plan.verdict}"
    asked = Subject(subject.source, subject.architecture, Inference())
    if emit == "mlx":
        from uma.plan.emit.mlx_training import mlx_training

        return mlx_training(repository(asked), plan.recipe, title)
    return _torch_file(emit, asked, row, title)


def _torch_file(emit: Any, asked: "Subject", row: "Row", title: str) -> str:
    """The file of a plan of PyTorch, in the 16 bits that the machine has."""

    from uma import __version__
    from uma.plan.emit.configuration import WRITTEN_FOR
    from uma.plan.emit.peft import Training
    from uma.plan.emit.repository import repository, stored_in
    from uma.plan.emit.training import training_configuration

    assert row.plan is not None
    assert row.plan.recipe is not None
    recipe = row.plan.recipe
    target: Any = "peft" if emit.startswith("peft") else emit
    if target in WRITTEN_FOR:  # JSON has no line for it
        title += f"; by uma {__version__}, for {WRITTEN_FOR[target]}"
    name, stored = repository(asked), stored_in(asked)
    training = Training(name, recipe.workload, title, recipe.stack, stored)
    return training_configuration(target, training)


def _shown(
    asked: dict[str, Any], found: "list[Comparison]", source: "ModelSource", host: "HostProfile"
) -> str:
    from uma.report.compare import compare_text, sweep_text

    if asked["json"] or asked["csv"]:
        from uma.cli.plan import model_json
        from uma.report.compare_json import compare_csv, compare_json

        if asked["csv"]:
            return compare_csv(found)
        return json_module.dumps(compare_json(found, model_json(source), host), indent=2)
    if len(found) > 1:
        return sweep_text(found, source.name, host)
    return compare_text(found[0], source.name, host)
