"""``uma lora eval``: losses of a model on a data set, without and with an adapter."""

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uma.cli import options as opt
from uma.cli.lora.options import BatchSize, Config, Data, MaskPrompt, MaxSeqLength, Overlong
from uma.cli.options import chosen_model
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.report.evaluation import Scores


def evaluate(
    context: typer.Context,
    model_argument: opt.Model = None,
    data: Data = None,
    model: opt.ModelOption = None,
    config: Config = None,
    adapter_path: Annotated[
        Path | None, typer.Option(help="Folder of an adapter; without, the model alone.")
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="train, valid or test; repeatable. [default: valid and test]"),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="At most so many rows of each, drawn from all.")
    ] = None,
    mask_prompt: MaskPrompt = False,
    max_seq_length: MaxSeqLength = 2048,
    overlong: Overlong = "truncate",
    batch_size: BatchSize = 4,
    dequantize: opt.Dequantize = "auto",
    force: opt.Force = False,
    json: opt.Json = False,
    yes: opt.Yes = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Loss and perplexity on the files of a data set, the model's beside the adapter's.

    Every supervised token weighs the same. Give the --mask-prompt that the adapter was trained
    with: else the numbers speak of other tokens.

    \b
    Examples:
      uma lora eval --data ./data
      uma lora eval llama-3-8b --data ./data --adapter-path ./run1 --mask-prompt --split test
    """
    from uma.checkpoint.adapter import adapter_header
    from uma.cli.lora.data import checked, data_folder, tokenizer_of
    from uma.cli.lora.model import form_that_fits, heavy, loaded_model
    from uma.cli.progress import progress, say
    from uma.dataset.check import require_examples

    if adapter_path is not None:
        adapter_header(adapter_path)
        given = {"mask_prompt": mask_prompt, "max_seq_length": max_seq_length, "overlong": overlong}
        for line in _trained_otherwise(adapter_path, given):
            say(f"note: {line}", json)
    folder = data_folder(data, quiet=json)
    name = chosen_model(context, model_argument, model)
    source, encoder = tokenizer_of(name, quiet=json, yes=yes)
    assert source.path is not None
    splits = checked(
        folder,
        encoder,
        mask_prompt=mask_prompt,
        max_seq_length=max_seq_length,
        overlong=overlong,
        quiet=json,
        only=_names(folder, split),
    )
    with heavy("uma lora eval", quiet=json, wait=wait, allow_concurrent=allow_concurrent):
        from uma.runtime.lora.evaluate import base_and_adapter, some

        sets = {key: some(require_examples(one), rows) for key, one in splits.items()}
        form = form_that_fits(source, dequantize, force=force)
        loaded = loaded_model(source.path, form, json)
        with progress("evaluating batches", quiet=json) as show:
            base, adapted = base_and_adapter(loaded.model, sets, adapter_path, batch_size, show)
    about = {
        "model": {"name": source.name, "form": loaded.form},
        "adapter_path": None if adapter_path is None else str(adapter_path),
    }
    _print(base, adapted, about if json else None)


def _trained_otherwise(adapter: Path, given: dict[str, Any]) -> list[str]:
    """What the run that made the adapter was asked otherwise: its numbers are of other tokens."""
    from uma.measurement.run_folder import BEST, checkpoints, differences, read_state

    kept = checkpoints(adapter.parent if adapter.name == BEST else adapter)
    settings = read_state(kept[-1]).settings if kept else given
    trained = {name: settings.get(name, value) for name, value in given.items()}
    return [f"in training {line} here" for line in differences(trained, given)]


def _names(folder: Path, asked: Sequence[str] | None) -> Sequence[str]:
    """The files that were asked for, else those of validation and test, else of training."""
    for name in asked or ():
        if name not in ("train", "valid", "test"):
            raise UsageError(f"--split {name!r} is not one of train, valid, test")
    found = [name for name in ("valid", "test") if (folder / f"{name}.jsonl").is_file()]
    return asked or found or ["train"]


def _print(base: "Scores", adapted: "Scores", about: dict[str, Any] | None) -> None:
    """As a document with ``about``, or without it as text."""
    from uma.report.evaluation import scores_json, scores_text

    if about is None:
        print(scores_text(base, adapted))
    else:
        print(json_module.dumps(scores_json(base, adapted) | about, indent=2))
