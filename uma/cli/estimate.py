"""``uma estimate``: the memory of one model on any machine, under any engine."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, chosen_model, size_option
from uma.workload import DEFAULT_KV_GROUP_SIZE, Engine, Inference

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.plan.estimate import Estimate

FlashAttention = Literal["on", "off", "auto"]


def estimate(
    context_: typer.Context,
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    engine: Annotated[
        Engine | None,
        typer.Option(help="Program that runs it. [default: mlx on Apple silicon, else llama.cpp]"),
    ] = None,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    quant: Annotated[
        str | None,
        typer.Option(help="Format in the engine's words: 4bit, Q4_K_M, nf4, awq, fp8."),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            "--ctx-size",
            "-c",
            min=1,
            max=opt.MAX_CONTEXT_TOKENS,
            help="Prompt plus answer, in tokens.",
        ),
    ] = Inference().context_tokens,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--parallel", "-np", min=1, help="Sequences at once.")
    ] = 1,
    prefill_step_size: opt.PrefillStep = None,
    kv_bits: opt.KvBits = None,
    kv_group_size: opt.KvGroupSize = DEFAULT_KV_GROUP_SIZE,
    cache_type_k: Annotated[
        str, typer.Option("--cache-type-k", "-ctk", help="llama.cpp: type of the keys.")
    ] = "f16",
    cache_type_v: Annotated[
        str, typer.Option("--cache-type-v", "-ctv", help="llama.cpp: type of the values.")
    ] = "f16",
    ubatch_size: Annotated[
        int, typer.Option("--ubatch-size", "-ub", min=1, help="llama.cpp: tokens per graph.")
    ] = 512,
    flash_attn: Annotated[
        FlashAttention, typer.Option("--flash-attn", "-fa", help="llama.cpp: fused attention.")
    ] = "auto",
    swa_full: Annotated[
        bool, typer.Option("--swa-full", help="llama.cpp: whole caches of sliding layers.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine by name, such as mac-studio-m3-ultra-512 or 2xh100."),
    ] = None,
    budget: opt.BudgetSize = None,
    reserve: opt.Reserve = None,
    json: opt.Json = False,
) -> None:
    """Predict the memory of a model, term by term, without loading or fetching it.

    Each term says whether it is exact, a bound, or fitted. The exit code is 3 when the model
    exceeds what there is.

    \b
    Examples:
      uma estimate llama-3-70b --machine mac-studio-m2-ultra-192
      uma estimate qwen3-30b-a3b --quant Q4_K_M -c 32768 -ctk q8_0 -ctv q8_0
      uma estimate llama-3-8b --engine vllm --quant fp8 --batch-size 8 --json
    """
    chosen = RunOptions(
        model=chosen_model(context_, model_argument, model),
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        context=context,
        batch_size=batch_size,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        budget_bytes=size_option(budget, "--budget"),
        reserve_bytes=size_option(reserve, "--reserve"),
        json=json,
    )
    from uma.cli.plan import model_json
    from uma.errors import DoesNotFit
    from uma.report.estimate import estimate_json, estimate_text

    llama = {
        "cache_type_k": cache_type_k,
        "cache_type_v": cache_type_v,
        "n_ubatch": ubatch_size,
        "flash_attn": flash_attn,
        "swa_full": swa_full,
    }
    source, found = _estimated(chosen, engine, llama, machine)
    if json:
        print(json_module.dumps(estimate_json(found, model_json(source)), indent=2))
    else:
        print(estimate_text(found, source.name))
    raise typer.Exit(DoesNotFit.exit_code if found.ledger.verdict == "exceeds" else 0)


def _estimated(
    chosen: RunOptions, engine: Engine | None, llama: dict[str, Any], machine_name: str | None
) -> "tuple[ModelSource, Estimate]":
    """The model, and what it needs on the machine."""
    from uma.architecture import architecture_from_config
    from uma.cli.plan import described, located, plan_of
    from uma.errors import UnsupportedModel
    from uma.machine import budget_of, read_machine
    from uma.machine.here import machine_of
    from uma.plan import estimate as plan

    alone = machine_name is None and engine == "mlx"  # as `uma run` sees this machine
    machine = read_machine() if alone else machine_of(machine_name)
    engine = engine or plan.default_engine(machine)
    if engine == "mlx":
        source = described(chosen, located(chosen))
        return source, plan.estimate_of_plan(plan_of(chosen, source, machine).plan)
    # The format is the engine's own: what the name stands for without it.
    quant = chosen.quant or (plan.format_of_bits(engine, chosen.bits) if chosen.bits else None)
    plain = chosen._replace(quant=None, bits=None)
    source = described(plain, located(plain))
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    architecture = architecture_from_config(source.config)
    budget = budget_of(
        machine, user_budget_bytes=chosen.budget_bytes, reserve_bytes=chosen.reserve_bytes
    )
    assert chosen.context is not None  # it has a default here
    workload = Inference(chosen.context, batch_size=chosen.batch_size, kv_bits=chosen.kv_bits)
    return source, plan.estimate_of_engine(
        architecture, engine, quant, workload, budget, machine=machine, llama=llama
    )
