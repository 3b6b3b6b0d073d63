"""``uma lora fuse``: an adapter written into the weights, if it is still there afterwards."""

import json as json_module
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uma.cli import options as opt
from uma.cli.lora.options import Data
from uma.cli.options import chosen_model
from uma.errors import DataError, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.dataset.examples import Encoder
    from uma.runtime.lora.fuse import Form

Output = Annotated[Path | None, typer.Option("--save-path", "-o", help="The folder to write.")]

PROBES = (
    ("What is the capital of France?", "Paris is the capital of France."),
    ("Write a short poem about rain.", "Rain falls softly on the roof and sings until dawn."),
    ("Sum up: memory is shared.", "Processor and graphics use the same memory."),
)
"""What the logits are compared on without ``--data``."""
ROWS, ROW_TOKENS = 8, 512


def fuse(
    context: typer.Context,
    model_argument: opt.Model = None,
    adapter_path: Annotated[Path, typer.Option(help="Folder of the adapter.")] = Path("adapters"),
    save_path: Output = None,
    model: opt.ModelOption = None,
    data: Data = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Write every matrix in full precision.")
    ] = False,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the fused matrices, 16 for full precision. [default: as stored]"
        ),
    ] = None,
    group_size: opt.GroupSize = None,
    export_gguf: Annotated[
        bool, typer.Option("--export-gguf", help="Write a GGUF file too, through mlx_lm.gguf.")
    ] = False,
    gguf_path: Annotated[
        Path | None,
        typer.Option(help="That file. [default: ggml-model-f16.gguf in the folder]"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write it although the adapter is lost.")
    ] = False,
    json: opt.Json = False,
    yes: opt.Yes = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Write a model with its adapter fused; mlx_lm and uma load it without the adapter.

    Few bits swallow small changes: the logits of model, adapter and fusion are compared, on rows of
    --data or on three questions, and a fusion that lost the adapter is refused. An existing folder
    is never written to.

    \b
    Examples:
      uma lora fuse --adapter-path ./run1 -o ./fused
      uma lora fuse llama-3-8b --adapter-path ./run1 -o ./fused --bits 8 --data ./data
    """
    from uma.checkpoint.adapter import adapter_header
    from uma.cli.convert import require_new
    from uma.cli.lora.data import tokenizer_of
    from uma.cli.lora.model import form_that_fits, heavy

    if save_path is None:
        raise UsageError("give a folder to write: --save-path FOLDER")
    require_new(save_path)
    if gguf_path is not None:
        _require_new_file(gguf_path, export_gguf, save_path)
    adapter_header(adapter_path)
    form = _form(bits, group_size, dequantize)
    name = chosen_model(context, model_argument, model)
    source, encoder = tokenizer_of(name, quiet=json, yes=yes)
    assert source.path is not None
    if export_gguf:
        _require_gguf(source, dequantize)
    rows = _rows(data, encoder)
    with heavy("uma lora fuse", quiet=json, wait=wait, allow_concurrent=allow_concurrent):
        from uma.runtime.lora.fusion import Fusion, fuse_adapter

        float32 = form_that_fits(source, "auto", force=force) == "always"
        fusion = Fusion(form, dense=dequantize, force=force)
        written = fuse_adapter(source.path, adapter_path, save_path, fusion, rows, float32=float32)
        if export_gguf:
            from uma.runtime.lora.gguf_export import export_gguf as write_gguf

            file = gguf_path or save_path / "ggml-model-f16.gguf"
            written |= {"gguf": str(file), "gguf_bytes": write_gguf(save_path, file)}
    _print(written | {"folder": str(save_path), "model": source.name}, json)


def _require_new_file(path: Path, export_gguf: bool, save_path: Path) -> None:
    """Refuse a GGUF file that cannot be written there, before anything is loaded.

    It may lie in the folder that will be made.

    Raises:
        UsageError: With what to give instead.
    """
    if not export_gguf:
        raise UsageError("--gguf-path is of --export-gguf: add it")
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; it is not written over: give another --gguf-path")
    folder = path.absolute().parent
    if folder != save_path.absolute() and not folder.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it first")


def _form(bits: int | None, group_size: int | None, dequantize: bool) -> "Form":
    """The form of the fused matrices.

    Raises:
        UsageError: If the options contradict each other, or MLX has no such number of bits.
    """
    from uma.quantization import quantization_for

    if dequantize and bits not in (None, 16):
        raise UsageError("--dequantize writes 16 bits; leave out --bits")
    if bits is None and group_size is None and not dequantize:
        return "stored"
    return quantization_for(bits=16 if dequantize else bits, group_size=group_size) or "dense"


def _require_gguf(source: "ModelSource", dequantize: bool) -> None:
    """Refuse a GGUF file that cannot be, before anything is loaded."""
    from uma.architecture import architecture_from_config
    from uma.runtime.lora.gguf_export import require_dense, require_exportable

    assert source.path is not None
    config = source.config or {}
    size = 2 * architecture_from_config(config).num_parameters
    require_exportable(source.path, config, size)
    require_dense(config, dequantize, size)


def _rows(data: Path | None, encoder: "Encoder") -> Sequence[Sequence[int]]:
    """The first rows of the validation set, else of the training set, else three questions."""
    from uma.dataset.examples import example_of
    from uma.dataset.rows import Row

    if data is None:
        rows = [Row(1, "completions", {"prompt": q, "completion": a}) for q, a in PROBES]
        plain = [Row(1, "text", {"text": f"{q} {a}"}) for q, a in PROBES]
    else:
        from uma.cli.lora.data import data_folder
        from uma.dataset.check import split_files
        from uma.dataset.rows import read_rows

        files = split_files(data_folder(data))
        rows = plain = list(read_rows(files.get("valid", files["train"])).rows[:ROWS])
    if not rows:
        raise DataError("--data has no row that can be used; see uma lora check")
    encoded = partial(example_of, encoder=encoder, mask_prompt=False, count_roles=False)
    try:
        found = [encoded(row) for row in rows]
    except UnsupportedModel:  # no chat template
        found = [encoded(row) for row in plain]
    return [example.tokens[:ROW_TOKENS] for example in found]


def _print(written: dict[str, Any], json: bool) -> None:
    from uma.report import SCHEMA_VERSION
    from uma.units import format_gib

    if json:
        print(json_module.dumps({"schema_version": SCHEMA_VERSION} | written, indent=2))
        return
    print(
        f"{written['folder']}: {format_gib(written['size_bytes'])}, {written['form']}; it keeps "
        f"{written['kept_share']:.0%} of what the adapter does, with an error of "
        f"{written['error_share']:.0%}"
    )
    if "gguf" in written:
        print(f"{written['gguf']}: {format_gib(written['gguf_bytes'])}")
