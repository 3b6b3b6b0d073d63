"""``uma bench``: prompt and generation rates with the ledger."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uma.cli import options as opt
from uma.cli.options import size_option

if TYPE_CHECKING:
    from uma.cli.session import Ready
    from uma.runtime.bench import Bench


def bench(
    model_argument: opt.Model = None,
    model: opt.ModelOption = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", min=1, help="Length of the random prompt.")
    ] = 512,
    generation_tokens: Annotated[
        int, typer.Option("--generation-tokens", "-g", min=2, help="Tokens generated after it.")
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Sequences at once.")
    ] = 1,
    num_trials: Annotated[
        int, typer.Option("--num-trials", "-n", min=1, help="Timed runs after a warm-up.")
    ] = 5,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    quant: opt.Quant = None,
    prefill_step_size: opt.PrefillStep = None,
    budget: opt.BudgetSize = None,
    no_wire: opt.NoWire = False,
    dequantize: Annotated[
        str, typer.Option(help="On a CPU: float32 weights; auto, always or never.")
    ] = "auto",
    force: opt.Force = False,
    json: opt.Json = False,
    yes: opt.Yes = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Time a model on random tokens, and hold its memory against the prediction.

    The letters are those of mlx_lm.benchmark. With --json the document has a row in the layout of
    our measured rows, to be sent to us or kept.

    \b
    Examples:
      uma bench
      uma bench llama-3-8b -p 2048 -g 128 -b 1 -n 5
    """
    from uma.cli.run import RunOptions
    from uma.errors import UsageError

    if dequantize not in ("auto", "always", "never"):
        raise UsageError(f"--dequantize {dequantize!r} is not auto, always or never")
    chosen = RunOptions(
        model=model or model_argument,
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        context=prompt_tokens + generation_tokens,
        prefill_step_size=prefill_step_size,
        budget_bytes=size_option(budget, "--budget"),
        wire=not no_wire,
        dequantize=dequantize,  # type: ignore[arg-type]
        force=force,
        json=json,
        yes=yes,
        wait=wait,
        allow_concurrent=allow_concurrent,
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        quiet=json,
    )
    from uma.cli.progress import progress
    from uma.cli.session import ready

    with ready(chosen, "uma bench") as have, progress("trial", quiet=json) as show:
        from uma.runtime.bench import bench as run_bench

        result = run_bench(
            have.session.loaded,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            batch_size=batch_size,
            num_trials=num_trials,
            prefill_step_size=have.planned.plan.workload.prefill_step_size,
            on_trial=show,
        )
    document = _document(have, result, generation_tokens)
    print(json_module.dumps(document, indent=2) if json else _text(have, result, document))


def _document(have: "Ready", result: "Bench", generation_tokens: int) -> dict[str, Any]:
    from dataclasses import asdict

    from uma.cli.plan import model_json
    from uma.report.plan import plan_json
    from uma.runtime.session import bench_ledger

    plan = have.planned.plan
    ledger = bench_ledger(have.session, result)
    rates = {
        f"{name}{suffix}": round(value, 3)
        for name in ("prompt_tps", "generation_tps", "ttft_s")
        for suffix, value in zip(("", "_stdev"), result.spread(name), strict=True)
    }
    return (
        rates
        | {"trials": [asdict(trial) for trial in result.trials]}
        | plan_json(plan, model_json(have.planned.source))
        | {"ledger": ledger.to_json(), "row": _row(have, result, generation_tokens, ledger)}
    )


def _row(have: "Ready", result: "Bench", generation_tokens: int, ledger: Any) -> dict[str, Any]:
    """The run in the columns of our measured rows of inference; unknown cells are empty."""
    from uma.runtime.versions import versions

    plan = have.planned.plan
    machine, workload = plan.machine, plan.workload
    quantization = plan.form.quantization
    prompt, generation = result.spread("prompt_tps"), result.spread("generation_tps")
    peak = result.meter.peak_bytes
    return {
        "kind": "memory",
        "engine": "mlx-lm",
        "engine_version": versions()["mlx_lm"],
        "backend": machine.backend,
        "model": have.planned.source.name,
        "quant": plan.form.name,
        "group_size": "" if quantization is None else quantization.group_size,
        "machine": machine.name,
        "chip": machine.chip or machine.cpu or "",
        "gpu_cores": machine.gpu_cores or "",
        "ctx_alloc": workload.context_tokens,
        "prompt_tokens": workload.longest_prompt_tokens,
        "gen_tokens": generation_tokens,
        "batch": workload.batch_size,
        "ubatch": workload.prefill_step_size,
        "mem_metric": "MLX peak memory",
        "mem_value": peak,
        "mem_unit": "B",
        "mem_gib_norm": round(peak / 2**30, 4),
        "pp_tok_s": round(prompt[0], 2),
        "tg_tok_s": round(generation[0], 2),
        "speed_std": f"{prompt[1]:.2f}/{generation[1]:.2f}",
        "outcome": "ok",
        "confidence": "A",
    }


def _text(have: "Ready", result: "Bench", document: dict[str, Any]) -> str:
    from uma.report.ledger import ledger_text
    from uma.runtime.session import bench_ledger

    lines = [
        f"{label} {mean:,.1f} tokens/s, standard deviation {spread:,.1f}"
        for label, (mean, spread) in (
            ("prompt", result.spread("prompt_tps")),
            ("generation", result.spread("generation_tps")),
        )
    ]
    ledger = bench_ledger(have.session, result)
    return "\n".join([*lines, "", ledger_text(ledger, have.planned.plan.budget.winner)])
