"""``uma lora``: fine-tuning, and the check of its data."""

import json as json_module

import typer

from uma.cli import options as opt
from uma.cli.app import SETTINGS
from uma.cli.lora.eval import evaluate
from uma.cli.lora.fuse import fuse
from uma.cli.lora.options import BatchSize, Config, Data, MaskPrompt, MaxSeqLength, Overlong
from uma.cli.lora.peft import export, import_
from uma.cli.lora.status import status
from uma.cli.lora.train import train
from uma.cli.options import chosen_model

lora = typer.Typer(add_completion=False, invoke_without_command=True, **SETTINGS)
lora.command()(train)
lora.command()(status)
lora.command("eval")(evaluate)
lora.command()(fuse)
lora.command()(export)
lora.command("import")(import_)


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
    config: Config = None,
    mask_prompt: MaskPrompt = False,
    max_seq_length: MaxSeqLength = 2048,
    overlong: Overlong = "truncate",
    batch_size: BatchSize = 4,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Check a data set before training on it: every row, its tokens, what would be lost.

    Reads the model's tokenizer, not its weights. Exits with 1 when a row cannot be used, or none
    is left.

    \b
    Examples:
      uma lora check --data ./data
      uma lora check qwen3-4b --data ./data --mask-prompt --max-seq-length 1024
      uma lora check -c lora.yaml
    """
    from uma.cli.lora.data import checked, data_folder, tokenizer_of

    folder = data_folder(data, quiet=json)
    name = chosen_model(context, model_argument, model)
    splits = checked(
        folder,
        tokenizer_of(name, quiet=json, yes=yes)[1],
        mask_prompt=mask_prompt,
        max_seq_length=max_seq_length,
        overlong=overlong,
        quiet=json,
        count_roles=True,
    )
    from uma.report.dataset import check_json, check_text

    if json:
        print(json_module.dumps(check_json(splits, batch_size), indent=2))
    else:
        print(check_text(splits, batch_size))
    if not all(split.usable for split in splits.values()):
        raise typer.Exit(1)
