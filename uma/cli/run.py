"""``uma run``: the options, and which kind of run they ask for."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, size_option
from uma.errors import UsageError
from uma.plan.emit import Server
from uma.workload import DEFAULT_KV_GROUP_SIZE

MAX_SEED = 2**64 - 1  # mlx.core.random.seed takes an unsigned 64-bit number
MAX_TEMP = 100.0  # far above use; infinity and NaN are not within


def run(
    context_: typer.Context,
    model_argument: opt.Model = None,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", show_default=False, help="The prompt.")
    ] = None,
    model: opt.ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads it from stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Run many prompts at once: one a line, or JSON lines.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "--system-prompt", help="The system message.")
    ] = None,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    quant: opt.Quant = None,
    revision: opt.Revision = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--max-kv-size",
            min=1,
            max=opt.MAX_CONTEXT_TOKENS,
            help="Bound on prompt plus answer, in tokens. [default: what fits, at most 32768]",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(callback=opt.positive("--max-tokens"), help="Longest answer, in tokens."),
    ] = None,
    temp: Annotated[
        float | None, typer.Option(min=0, max=MAX_TEMP, help="Temperature; 0 is greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0, max=1, help="Least probability.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Likeliest tokens kept.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of the sampling.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; repeatable.")
    ] = None,
    thinking: Annotated[
        Literal["on", "off", "hide"], typer.Option(help="Let the model think, and show it.")
    ] = "on",
    chat_template_config: Annotated[
        str | None, typer.Option(help="More variables of the chat template, as a JSON object.")
    ] = None,
    prefill_step_size: opt.PrefillStep = None,
    kv_bits: opt.KvBits = None,
    kv_group_size: opt.KvGroupSize = DEFAULT_KV_GROUP_SIZE,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(help="Reuse the processed prompt in this file, and keep it there."),
    ] = None,
    adapter_path: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Smaller model that proposes tokens.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens proposed at a time.")] = 3,
    budget: opt.BudgetSize = None,
    reserve: opt.Reserve = None,
    no_wire: opt.NoWire = False,
    dequantize: opt.Dequantize = "auto",
    force: opt.Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and load nothing.")
    ] = False,
    emit: Annotated[
        Server | None, typer.Option(help="Print the command that serves the model instead.")
    ] = None,
    json: opt.Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="The whole ledger before and after.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the answer.")] = False,
    yes: opt.Yes = False,
    no_record: opt.NoRecord = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Answer a prompt, a pipe or a chat inside a memory budget.

    The plan comes first: each memory term, predicted before anything is loaded, against the budget.
    The answer goes to stdout; the ledger, predicted beside measured, to stderr.

    \b
    Examples:
      uma run --prompt "What is the capital of France?"
      uma run llama-3-8b "Why is the sky blue?" --context 4096
      uma run ./my-model --bits 8 --kv-bits 8 --budget 24GiB
      git diff | uma run qwen3-30b-a3b --system "Review this change." --prompt -
      uma run --model llama-3-70b --dry-run
    """
    if model_argument is not None and not opt.given(context_, "model"):
        model = None
    if model is not None and model_argument is not None:
        # ``uma run -m MODEL PROMPT``: the first argument is then the prompt.
        if prompt_argument is not None:
            raise UsageError("the model is given twice: as --model and as the first argument")
        model_argument, prompt_argument = None, model_argument
    if prompt is not None and prompt_argument is not None:
        raise UsageError("the prompt is given twice: as --prompt and as an argument")
    if (model or model_argument) == "":
        raise UsageError("the model's name is empty; leave it out for the default model")
    asked_model = model or model_argument
    if prompt is None and prompt_argument is None and asked_model and " " in asked_model.strip():
        raise UsageError(f"{asked_model!r} is no model's name; a prompt goes after --prompt")
    opt.require_numbers(temp=temp, top_p=top_p, min_p=min_p)
    if quiet and verbose:
        raise UsageError("choose --quiet or --verbose")
    if "" in (stop or ()):
        raise UsageError("--stop is empty; give the text before which the answer ends")
    chosen = RunOptions(
        model=model or model_argument,
        prompt=prompt if prompt is not None else prompt_argument,
        prompts=prompts,
        system=system,
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        revision=revision,
        context=context,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        thinking=thinking,
        chat_template_config=chat_template_config,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        prompt_cache=prompt_cache,
        adapter_path=adapter_path,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        budget_bytes=size_option(budget, "--budget"),
        reserve_bytes=size_option(reserve, "--reserve"),
        wire=not no_wire,
        dequantize=dequantize,
        force=force,
        dry_run=dry_run,
        json=json,
        verbose=verbose,
        quiet=quiet,
        yes=yes,
        record=not no_record,
        wait=wait,
        allow_concurrent=allow_concurrent,
    )
    raise typer.Exit(_dispatch(chosen, emit))


def _dispatch(chosen: RunOptions, emit: Server | None) -> int:
    if chosen.prompts is not None:
        from uma.cli import batch

        chosen = batch.of_file(chosen)
    if chosen.dry_run or emit is not None:
        from uma.cli.plan import print_plan

        return print_plan(chosen, emit)
    from uma.cli import answer, chat

    if chosen.prompts is not None:
        return answer.run_batch(chosen)
    if chosen.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return chat.run_chat(chosen)
    return answer.run_prompt(chosen)
