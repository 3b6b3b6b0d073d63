"""``uma convert``: GGUF or Hugging Face weights to a folder that mlx-lm loads."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uma.cli import options as opt
from uma.cli.options import RunOptions, chosen_model
from uma.errors import UsageError
from uma.report import SCHEMA_VERSION

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.quantization import Quantization


def convert(
    context: typer.Context,
    model_argument: opt.Model = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", "--mlx-path", help="The folder to write.")
    ] = None,
    model: opt.ModelOption = None,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    quant: opt.Quant = None,
    revision: opt.Revision = None,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Write a model as an MLX folder, in little memory.

    Q4_0, Q4_1 and Q8_0 matrices of a GGUF file keep their exact values; other types are dequantized
    and quantized as asked. Hugging Face weights are quantized as asked, to 4 bits by default; the
    result is held in memory 1 GiB at a time. An existing folder is never written to.

    \b
    Examples:
      uma convert model.Q4_0.gguf -o ./model-mlx
      uma convert ./llama-3-8b-instruct --bits 8 -o ./llama-3-8b-8bit
    """
    name = chosen_model(context, model_argument, model)
    if name is None or output is None:
        raise UsageError("give a model and a folder: uma convert model.gguf -o ./model-mlx")
    require_new(output)
    # ``force``: converting takes little memory, whatever running the result would take.
    chosen = RunOptions(
        model=name,
        bits=bits,
        mode=mode,
        group_size=group_size,
        quant=quant,
        revision=revision,
        yes=yes,
        quiet=json,
        force=True,
    )
    report = _convert(chosen, output, json)
    if json:
        document = {"schema_version": SCHEMA_VERSION} | report
        print(json_module.dumps(document, indent=2, default=str))
    else:
        from uma.units import format_gib

        print(f"{output}: {format_gib(report['size_bytes'])}")
        for note in report["notes"]:
            print(f"note: {note}")


def require_new(output: Path) -> None:
    """Refuse a folder that exists or cannot, before anything is downloaded."""
    try:
        output.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{output} cannot be a folder: {error.strerror}") from None
    raise UsageError(f"{output} exists; give a folder that does not")


def _convert(chosen: RunOptions, output: Path, json: bool) -> dict[str, Any]:
    from uma.checkpoint.source import fetch, locate
    from uma.cli.plan import asked_quantization
    from uma.cli.progress import progress
    from uma.cli.session import confirmed, require_mlx

    require_mlx(json)
    # A name without a format means the original: what others have quantized is converted already.
    source = locate(chosen.model, revision=chosen.revision)
    if source.path is None:
        source = confirmed(chosen, source)
    wanted = _format(chosen, source)
    if source.path is None:
        with progress("downloading", quiet=json, sizes=True) as show:
            source = fetch(source, progress=show)
    assert source.path is not None
    with progress("converting", quiet=json, sizes=bool(source.gguf_headers)) as show:
        if source.gguf_headers:
            from uma.runtime.gguf.convert import convert as convert_gguf

            asked = asked_quantization(chosen)
            return asdict(convert_gguf(source.path, output, quantization=asked, progress=show))
        from uma.runtime.convert import convert_folder

        return convert_folder(source.path, output, quantization=wanted, progress=show)


def _format(chosen: RunOptions, source: "ModelSource") -> "Quantization | None":
    """The format asked of safetensors, else 4 bits; ``None`` keeps what is stored.

    Raises:
        UsageError: If it is an MLX model of that format already, or would gain bits.
    """
    from uma.cli.plan import asked_format
    from uma.plan.forms import DEFAULT_BITS
    from uma.quantization import quantization_for, quantization_of_config

    stored = quantization_of_config(source.config or {})
    asked = asked_format(chosen, None)
    if stored is None:
        return quantization_for(**(asked or {"bits": DEFAULT_BITS}))
    wanted = quantization_for(**asked) if asked else stored.default
    if wanted == stored.default:
        if "quantization" in (source.config or {}):
            raise UsageError(f"{source.name} is an MLX model of {wanted} already: run it as it is")
        return None
    if wanted is None or wanted.bits > stored.default.bits:
        raise UsageError(
            f"{source.name} holds {stored.default.bits}-bit weights; more bits cannot be had from "
            "them: give the 16-bit model"
        )
    return wanted
