"""``uma lora train``: its options, and whether to plan, to train, or to watch a child train."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from uma.cli import options as opt
from uma.cli.lora.asked import HANDED, Asked, taken
from uma.cli.lora.options import (
    BatchSize,
    Config,
    Data,
    LrSchedule,
    MaskPrompt,
    MaxSeqLength,
    Optimizer,
    OptimizerConfig,
    Overlong,
    ProjectName,
    ReportTo,
)
from uma.cli.options import chosen_model
from uma.errors import UsageError

MOST_SEED = 2**64 - 1  # of MLX


def train(
    context: typer.Context,
    model_argument: opt.Model = None,
    data: Data = None,
    model: opt.ModelOption = None,
    config: Config = None,
    adapter_path: Annotated[
        Path, typer.Option(help="Folder of the run: adapter, checkpoints, log.")
    ] = Path("adapters"),
    fine_tune_type: Annotated[
        Literal["lora", "dora", "full"], typer.Option(help="What to train.")
    ] = "lora",
    num_layers: Annotated[
        int | None,
        typer.Option(
            min=-1, help="Layers to train, from the last; -1 for all. [default: at most 16]"
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=65_536, help="Rank of the two factors.")] = 8,
    scale: Annotated[
        float, typer.Option(help="Factor on their product (alpha / rank elsewhere).")
    ] = 20.0,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Of the adapter's input.")] = 0.0,
    keys: Annotated[
        list[str] | None,
        typer.Option(help="Modules of a layer, such as self_attn.q_proj; repeatable. [all]"),
    ] = None,
    iters: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 1000,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Times through the data, instead of --iters.")
    ] = None,
    batch_size: BatchSize = 4,
    grad_accumulation_steps: Annotated[int, typer.Option(min=1, help="Batches an update.")] = 1,
    max_seq_length: MaxSeqLength = 2048,
    overlong: Overlong = "truncate",
    mask_prompt: MaskPrompt = False,
    packing: Annotated[
        bool, typer.Option("--packing", help="Fill rows with several examples, each by itself.")
    ] = False,
    optimizer: Annotated[Optimizer, typer.Option(help="What makes the updates.")] = "adam",
    learning_rate: Annotated[float, typer.Option(min=0, help="Its highest value.")] = 1e-5,
    warmup: Annotated[int, typer.Option(min=0, help="Updates until it is reached.")] = 0,
    cosine: Annotated[bool, typer.Option("--cosine", help="Let it fall to 0 at the end.")] = False,
    lr_schedule: LrSchedule = None,
    optimizer_config: OptimizerConfig = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(min=0, help="Bound on the norm of the gradients.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of everything random.")] = 0,
    steps_per_report: Annotated[int, typer.Option(min=1, help="Batches a line.")] = 10,
    steps_per_eval: Annotated[int, typer.Option(min=1, help="Batches a validation.")] = 200,
    val_batches: Annotated[
        int, typer.Option(min=-1, help="Batches of a validation; -1 for all.")
    ] = 25,
    patience: Annotated[
        int | None,
        typer.Option(min=1, help="End after so many validations without a new lowest loss."),
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Batches a checkpoint.")] = 100,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints that stay.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --adapter-path.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option("--auto-resume", help="If memory ends it, go on with a smaller micro-batch."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|auto",
            help="Memory to stay within, such as 24GiB: batches are cut until they do. "
            "auto: what this machine leaves.",
        ),
    ] = None,
    reserve: opt.Reserve = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest rows that go through the model at once. [default: the batch]"
        ),
    ] = None,
    no_wire: opt.NoWire = False,
    dequantize: opt.Dequantize = "auto",
    force: opt.Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the hours; load no weights.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on without this terminal; see uma lora status.")
    ] = False,
    allow_sleep: Annotated[
        bool, typer.Option("--allow-sleep", help="Do not keep the Mac awake.")
    ] = False,
    report_to: ReportTo = None,
    project_name: ProjectName = None,
    progress: Annotated[
        Literal["text", "json"], typer.Option(help="What goes to stderr meanwhile.")
    ] = "text",
    json: opt.Json = False,
    yes: opt.Yes = False,
    no_record: opt.NoRecord = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Fine-tune a model; the adapter loads in mlx_lm and in uma run --adapter-path.

    The plan comes first: the batch that needs most memory, against the budget. Ctrl-C saves a
    checkpoint and leaves; --resume goes on from there, bit for bit on a CPU. An existing run is
    never written over. Training runs in a process of its own: if the system ends it, this one says
    why, what is left, and how to go on.

    \b
    Examples:
      uma lora train --data ./data --iters 200
      uma lora train llama-3-8b --data ./data --mask-prompt --epochs 3 --adapter-path run1
      uma lora train llama-3-8b --data ./data --mask-prompt --epochs 3 --adapter-path run1 --resume
      uma lora train llama-3-8b --data ./data --budget 24GiB --dry-run
    """
    given = locals()
    if HANDED in os.environ:
        raise typer.Exit(_child(taken(os.environ[HANDED])))
    from uma.cli.lora.config import check_optimizer
    from uma.cli.lora.data import data_folder
    from uma.cli.lora.precedence import settled
    from uma.measurement.run_folder import require_place

    options = settled(context, {name: given[name] for name in Asked.__dataclass_fields__})
    name = chosen_model(context, model_argument, model)
    require_place(adapter_path, resume)
    asked = Asked(**options | {"model": name, "data": data_folder(data, quiet=json)})
    opt.require_numbers(
        scale=asked.scale, learning_rate=asked.learning_rate, max_grad_norm=asked.max_grad_norm
    )
    for option, number in (("num-layers", num_layers), ("val-batches", val_batches)):
        if number == 0:
            raise UsageError(f"--{option} 0 leaves nothing; give 1 or more, or -1 for all")
    if asked.budget != "auto":
        opt.size_option(asked.budget, "--budget")
    opt.size_option(asked.reserve, "--reserve")
    check_optimizer(asked.optimizer, asked.lr_schedule, asked.optimizer_config, asked.report_to)
    raise typer.Exit(_dispatch(asked))


def _dispatch(asked: Asked) -> int:
    if asked.dry_run:
        from uma.cli.lora.plan import print_plan

        return print_plan(asked)
    from uma.cli.lora.supervise import detach, supervise

    return detach(asked) if asked.detach else supervise(asked)


def _child(asked: Asked) -> int:
    """What a process does that another one of ours began: train for it, or without a terminal."""
    from uma.runtime.lora.supervise import PARENT

    if PARENT in os.environ:
        from uma.cli.lora.work import work

        return work(asked, int(os.environ[PARENT]))
    from uma.cli.lora.supervise import supervise

    return supervise(asked)


def defaults() -> dict[str, Any]:
    """The default of every option."""
    import inspect

    return {name: one.default for name, one in inspect.signature(train).parameters.items()}
