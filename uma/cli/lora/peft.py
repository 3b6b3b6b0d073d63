"""``uma lora import`` and ``export``: adapters of Hugging Face's PEFT."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import chosen_model
from uma.cli.progress import say
from uma.errors import UsageError

AdapterPath = Annotated[Path | None, typer.Option(help="Folder of the adapter to convert.")]
Output = Annotated[Path | None, typer.Option("--save-path", "-o", help="The folder to write.")]


def import_(
    context: typer.Context,
    model_argument: opt.Model = None,
    adapter_path: AdapterPath = None,
    save_path: Output = None,
    model: opt.ModelOption = None,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Convert a LoRA or DoRA adapter of PEFT to one that mlx_lm and uma load.

    The logits stay the same. What mlx-lm's layers cannot do (biases, trained tokens, other methods)
    is refused by name. An existing folder is never written to.

    \b
    Examples:
      uma lora import llama-3-8b --adapter-path ./peft_adapter -o ./adapter
    """
    source, folder, out = _asked(
        chosen_model(context, model_argument, model), adapter_path, save_path, json, yes
    )
    from uma.runtime.load import open_model
    from uma.runtime.lora.adapter import save_adapter
    from uma.runtime.lora.peft import from_peft

    adapter, arrays = from_peft(folder, open_model(source.path)[0])
    save_adapter(out, arrays, adapter.config() | {"model": str(source.path)})
    _print(out, arrays, source.name, json)


def export(
    context: typer.Context,
    model_argument: opt.Model = None,
    adapter_path: AdapterPath = None,
    save_path: Output = None,
    model: opt.ModelOption = None,
    to: Annotated[Literal["peft"], typer.Option(help="Whose format to write.")] = "peft",
    base_name: Annotated[
        str | None, typer.Option(help="The published model it is for, as its hub names it.")
    ] = None,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Convert a LoRA or DoRA adapter to one that PEFT, vLLM and others load.

    The logits stay the same, on the published model that the one here was made of. An existing
    folder is never written to.

    \b
    Examples:
      uma lora export llama-3-8b --adapter-path ./run1 -o ./peft_adapter
    """
    source, folder, out = _asked(
        chosen_model(context, model_argument, model), adapter_path, save_path, json, yes
    )
    from uma.runtime.load import open_model
    from uma.runtime.lora.peft_export import save_peft, to_peft

    base = base_name or source.repo
    if base is None:
        say("note: the adapter will not say which model it is for; --base-name names one", json)
    config, arrays = to_peft(folder, open_model(source.path)[0], base)
    save_peft(out, config, arrays)
    _print(out, arrays, source.name, json)


def _asked(
    name: str | None, adapter_path: Path | None, save_path: Path | None, quiet: bool, yes: bool
) -> tuple[Any, Path, Path]:
    """The model on this disk, the adapter's folder and the one to write.

    Raises:
        UsageError: If one is not given, or the folder to write exists.
    """
    from uma.checkpoint.adapter import require_config
    from uma.cli.convert import require_new
    from uma.cli.lora.data import model_on_disk

    if adapter_path is None or save_path is None:
        raise UsageError("give the adapter and a folder: --adapter-path FOLDER -o NEW")
    require_new(save_path)
    require_config(adapter_path)
    return model_on_disk(name, quiet=quiet, yes=yes), adapter_path, save_path


def _print(out: Path, arrays: dict[str, Any], model: str, json: bool) -> None:
    from uma.report import SCHEMA_VERSION

    size = sum(value.size for value in arrays.values())
    if json:
        document = {"folder": str(out), "tensors": len(arrays), "parameters": size, "model": model}
        print(json_module.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2))
    else:
        print(f"{out}: {len(arrays)} tensors, {size:,} parameters, for {model}")
