"""``uma bench``: prompt and generation rates with the ledger."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, chosen_model, size_option

if TYPE_CHECKING:
    from uma.cli.session import Ready
    from uma.ledger import Ledger
    from uma.runtime.bench import Bench


def bench(
    context: typer.Context,
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
    dequantize: opt.Dequantize = "auto",
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
    chosen = RunOptions(
        model=chosen_model(context, model_argument, model),
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        context=prompt_tokens + generation_tokens,
        prefill_step_size=prefill_step_size,
        budget_bytes=size_option(budget, "--budget"),
        wire=not no_wire,
        dequantize=dequantize,
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
        from uma.runtime.session import bench_ledger

        result = run_bench(
            have.session.loaded,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            batch_size=batch_size,
            num_trials=num_trials,
            prefill_step_size=have.planned.plan.workload.prefill_step_size,
            on_trial=show,
        )
        ledger = bench_ledger(have.session, result)
    if json:
        print(json_module.dumps(_document(have, result, ledger), indent=2))
    else:
        print(_text(have, result, ledger))


def _document(have: "Ready", result: "Bench", ledger: "Ledger") -> dict[str, Any]:
    from dataclasses import asdict

    from uma.cli.plan import model_json
    from uma.report.plan import plan_json

    rates = {
        f"{name}{suffix}": round(value, 3)
        for name in ("prompt_tps", "generation_tps", "ttft_s")
        for suffix, value in zip(("", "_stdev"), result.spread(name), strict=True)
    }
    return (
        rates
        | {"trials": [asdict(trial) for trial in result.trials]}
        | plan_json(have.planned.plan, model_json(have.planned.source))
        | {"ledger": ledger.to_json(), "row": row_of(have, result, ledger)}
    )


def row_of(have: "Ready", result: "Bench", ledger: "Ledger") -> dict[str, Any]:
    """The measurement as a row of the table of measurements."""
    import time

    from uma.records import model_name
    from uma.report.bench import bench_row
    from uma.runtime.versions import versions

    source = have.planned.source
    return bench_row(
        have.planned.plan,
        ledger,
        model=model_name(source.name, local=source.repo is None),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions=versions(),
        peak_bytes=result.meter.peak_bytes,
        prompt_tps=result.spread("prompt_tps"),
        generation_tps=result.spread("generation_tps"),
    )


def _text(have: "Ready", result: "Bench", ledger: "Ledger") -> str:
    from uma.report.ledger import ledger_text

    lines = [
        f"{label} {mean:,.1f} tokens/s, standard deviation {spread:,.1f}"
        for label, (mean, spread) in (
            ("prompt", result.spread("prompt_tps")),
            ("generation", result.spread("generation_tps")),
        )
    ]
    return "\n".join([*lines, "", ledger_text(ledger, have.planned.plan.budget.winner)])
