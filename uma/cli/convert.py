"""``uma convert``: GGUF or Hugging Face weights to a folder that mlx-lm loads."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from uma.cli import options as opt
from uma.errors import UsageError


def convert(
    model_argument: opt.Model = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", "--mlx-path", help="The folder to write.")
    ] = None,
    model: opt.ModelOption = None,
    bits: opt.Bits = None,
    mode: opt.Mode = None,
    group_size: opt.GroupSize = None,
    revision: opt.Revision = None,
    json: opt.Json = False,
    yes: opt.Yes = False,
) -> None:
    """Write a model as an MLX folder, one matrix in memory at a time.

    Q4_0, Q4_1 and Q8_0 matrices of a GGUF file keep their exact values; other types are dequantized
    and quantized as asked. Hugging Face weights are quantized as asked, to 4 bits by default. An
    existing folder is never written to.

    \b
    Examples:
      uma convert model.Q4_0.gguf -o ./model-mlx
      uma convert ./llama-3-8b-instruct --bits 8 -o ./llama-3-8b-8bit
    """
    name = model or model_argument
    if name is None or output is None:
        raise UsageError("give a model and a folder: uma convert model.gguf -o ./model-mlx")
    if output.exists():
        raise UsageError(f"{output} exists; give a folder that does not")
    report = _convert(name, output, bits, mode, group_size, revision, yes, json)
    if json:
        print(json_module.dumps(report, indent=2, default=str))
    else:
        from uma.units import format_gib

        print(f"{output}: {format_gib(report['size_bytes'])}")
        for note in report["notes"]:
            print(f"note: {note}")


def _convert(
    name: str,
    output: Path,
    bits: int | None,
    mode: str | None,
    group_size: int | None,
    revision: str | None,
    yes: bool,
    json: bool,
) -> dict[str, Any]:
    from uma.checkpoint.source import fetch
    from uma.cli.plan import asked_quantization, located
    from uma.cli.progress import progress
    from uma.cli.run import RunOptions
    from uma.cli.session import confirmed, require_mlx
    from uma.quantization import quantization_for

    chosen = RunOptions(
        model=name, bits=bits, mode=mode, group_size=group_size, revision=revision, yes=yes
    )
    require_mlx(json)
    source = located(chosen)
    if source.path is None:
        source = confirmed(chosen, source)
        with progress("downloading", quiet=json, sizes=True) as show:
            source = fetch(source, progress=show)
    assert source.path is not None
    with progress("converting", quiet=json, sizes=True) as show:
        if source.gguf_headers:
            from uma.runtime.gguf.convert import convert as convert_gguf

            return asdict(
                convert_gguf(
                    source.path, output, quantization=asked_quantization(chosen), progress=show
                )
            )
        from uma.runtime.convert import convert_folder

        asked = (bits, mode, group_size) != (None, None, None)
        quantization = quantization_for(bits, mode, group_size) if asked else quantization_for(4)
        return convert_folder(source.path, output, quantization=quantization, progress=show)
