"""The ``uma`` application: its commands, and what it says when called with none."""

from typing import Annotated

import typer

from uma import __version__
from uma.cli import bench, convert, run

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("bench")(bench.bench)
app.command("convert")(convert.convert)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"uma {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def uma(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models inside the memory you have: predicted, enforced, measured."""
    if context.invoked_subcommand is None:
        from uma.cli.overview import print_overview

        print_overview()
