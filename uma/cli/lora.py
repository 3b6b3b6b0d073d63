"""``uma lora``: fine-tuning, and the check of its data."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli.app import SETTINGS
from uma.cli.options import chosen_model
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.cli.lora_train import Asked

Data = Annotated[
    Path | None, typer.Option(help="Folder with train.jsonl, valid.jsonl and test.jsonl.")
]
MaskPrompt = Annotated[
    bool, typer.Option("--mask-prompt", help="Train on the assistant's turns alone, all of them.")
]
MaxSeqLength = Annotated[int, typer.Option(min=2, help="Longest row, in tokens.")]
Overlong = Annotated[
    Literal["truncate", "split", "drop"], typer.Option(help="What to do with longer rows.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch.")]

lora = typer.Typer(add_completion=False, invoke_without_command=True, **SETTINGS)


@lora.callback()
def group(context: typer.Context) -> None:
    """Fine-tune a model inside the memory you have: LoRA, DoRA, or whole layers."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@lora.command()
def check(
    context: typer.Context,
    model_argument: opt.Model = None,
    data: Data = None,
    model: opt.ModelOption = None,
    mask_prompt: MaskPrompt = False,
    max_seq_length: MaxSeqLength = 2048,
    overlong: Overlong = "truncate",
    batch_size: BatchSize = 4,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Check a data set before training on it: every row, its tokens, what would be lost.

    Reads the tokenizer of the model, not its weights. Exits with 1 when a row cannot be used.

    \b
    Examples:
      uma lora check --data ./data
      uma lora check qwen3-4b --data ./data --mask-prompt --max-seq-length 1024
    """
    from uma.cli.lora_data import checked, tokenizer_of

    folder = _required(data)
    name = chosen_model(context, model_argument, model)
    splits = checked(
        folder,
        tokenizer_of(name, quiet=json, yes=yes)[1],
        mask_prompt=mask_prompt,
        max_seq_length=max_seq_length,
        overlong=overlong,
        quiet=json,
    )
    from uma.report.dataset import check_json, check_text

    if json:
        print(json_module.dumps(check_json(splits, batch_size), indent=2))
    else:
        print(check_text(splits, batch_size))
    if any(split.problems for split in splits.values()):
        raise typer.Exit(1)


@lora.command()
def train(
    context: typer.Context,
    model_argument: opt.Model = None,
    data: Data = None,
    model: opt.ModelOption = None,
    adapter_path: Annotated[
        Path, typer.Option(help="Folder of the run: adapter, checkpoints, log.")
    ] = Path("adapters"),
    fine_tune_type: Annotated[
        Literal["lora", "dora", "full"], typer.Option(help="What to train.")
    ] = "lora",
    num_layers: Annotated[
        int, typer.Option(min=-1, help="Layers to train, from the last; -1 for all.")
    ] = 16,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the two factors.")] = 8,
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
    optimizer: Annotated[
        str, typer.Option(help="adam, adamw, sgd, lion, adafactor, muon.")
    ] = "adam",
    learning_rate: Annotated[float, typer.Option(min=0, help="Its highest value.")] = 1e-5,
    warmup: Annotated[int, typer.Option(min=0, help="Updates until it is reached.")] = 0,
    cosine: Annotated[bool, typer.Option("--cosine", help="Let it fall to 0 at the end.")] = False,
    max_grad_norm: Annotated[
        float | None, typer.Option(min=0, help="Bound on the norm of the gradients.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    steps_per_report: Annotated[int, typer.Option(min=1, help="Batches a line.")] = 10,
    steps_per_eval: Annotated[int, typer.Option(min=1, help="Batches a validation.")] = 200,
    val_batches: Annotated[
        int, typer.Option(min=-1, help="Batches of a validation; -1 for all.")
    ] = 25,
    save_every: Annotated[int, typer.Option(min=1, help="Batches a checkpoint.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --adapter-path.")
    ] = False,
    dequantize: opt.Dequantize = "auto",
    progress: Annotated[
        Literal["text", "json"], typer.Option(help="What goes to stderr meanwhile.")
    ] = "text",
    json: opt.Json = False,
    yes: opt.Yes = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Fine-tune a model; the adapter loads in mlx_lm and in uma run --adapter-path.

    Ctrl-C saves a checkpoint and leaves; --resume goes on from there, bit for bit on a CPU. An
    existing run is never written over.

    \b
    Examples:
      uma lora train --data ./data --iters 200
      uma lora train llama-3-8b --data ./data --mask-prompt --epochs 3 --adapter-path ./run1
      uma lora train llama-3-8b --data ./data --epochs 3 --adapter-path ./run1 --resume
    """
    given = locals()
    from uma.cli.lora_train import Asked, train_command

    options = {name: given[name] for name in Asked.__dataclass_fields__}
    name = chosen_model(context, model_argument, model)
    asked = Asked(**options | {"model": name, "data": _required(data)})
    _check(asked)
    train_command(asked)


def _required(data: Path | None) -> Path:
    if data is None:
        raise UsageError("give the data: --data FOLDER, which holds train.jsonl")
    return data


def _check(asked: "Asked") -> None:
    import math

    for name in ("scale", "learning_rate", "max_grad_norm"):
        value = getattr(asked, name)
        if value is not None and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} {value} is not a number")
