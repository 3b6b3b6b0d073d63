"""``uma report``: what a machine can hold and how fast, as a document to show."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from uma.cli import options as opt
from uma.errors import UsageError

Format = Literal["html", "md", "json"]
ENDINGS: dict[str, Format] = {".html": "html", ".htm": "html", ".md": "md", ".json": "json"}


def report(
    model_argument: opt.Model = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            autocompletion=opt.complete_model,
            help="A model in detail; repeatable. [default: four that people run; none in a fleet]",
        ),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(help="Machine by name; repeatable. [default: this machine]"),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Bundles of uma doctor, or lists of machine names, side by side.",
        ),
    ] = None,
    macos: Annotated[
        int | None, typer.Option(min=11, help="Major version of macOS, which sets the GPU limit.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            "--ctx-size",
            "-c",
            parser=opt.context_tokens,
            metavar="TOKENS",
            help="Context of the map; repeatable, the first is compared. [default: 8k and 32k]",
        ),
    ] = None,
    filter: Annotated[
        str,
        typer.Option("--filter", metavar="WORDS", help="Only models of the map so named: qwen3."),
    ] = "",
    decision: Annotated[
        bool, typer.Option("--decision", help="One page: which of the machines for MODEL.")
    ] = False,
    min_bits: Annotated[int, typer.Option(min=2, max=16, help="Fewest bits of a weight.")] = 4,
    min_tps: Annotated[
        float, typer.Option(min=0, help="Tokens per second that are fast enough.")
    ] = 10,
    price: Annotated[
        list[str] | None,
        typer.Option(help="What a machine or a card costs you, as NAME=USD; repeatable."),
    ] = None,
    host_price: Annotated[
        int | None, typer.Option(min=0, help="US$ of the machine that cards are in.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Tell what changed since this report.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Measured runs and new models from this day on."),
    ] = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="[default: by the ending of -o, else md]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE. [default: stdout]"),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write each plot there too, as PNG and SVG."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    budget: opt.BudgetSize = None,
    reserve: opt.Reserve = None,
    json: opt.Json = False,
) -> None:
    """Show what a machine can hold, how fast, and what a raised limit or another one buys.

    One HTML file that needs no network, Markdown, or JSON. Without --machine it is this machine,
    with its calibration and its measured runs.

    \b
    Examples:
      uma report -o report.html
      uma report --machine mac-studio-m3-ultra-256 --format html -o studio.html
      uma report --machine mac-studio-m4-max-128 --machine 2xrtx-3090 -m llama-3.3-70b
      uma report llama-3.3-70b --decision --machine mac-studio-m4-max-128 --machine 2xrtx-3090
      uma report --fleet bundles/ -o fleet.html
    """
    from uma.cli.report_parts import Asked, Refined, written

    opt.require_numbers(min_tps=min_tps)
    if json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} are two documents: give one of them")
    names = [*([model_argument] if model_argument else []), *(model or [])]
    written(
        Asked(
            models=tuple(dict.fromkeys(names)),
            machines=tuple(dict.fromkeys(machine or ())),
            fleet=fleet,
            macos=macos,
            contexts=tuple(dict.fromkeys(context or ())),
            filter=filter,
            budget=budget,
            reserve=reserve,
            refined=Refined(
                decision, min_bits, min_tps, tuple(price or ()), host_price, diff, since
            ),
        ),
        "json" if json else format or _by_ending(output),
        output,
        plots,
        force=force,
    )


def _by_ending(output: Path | None) -> Format:
    """
    Raises:
        UsageError: If the ending is none of a format.
    """
    if output is None:
        return "md"
    found = ENDINGS.get(output.suffix.lower())
    if found is None:
        raise UsageError(f"-o {output}: its ending names no format; give --format html, md or json")
    return found
