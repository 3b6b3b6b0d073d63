"""The ``uma`` application: its commands, and what it says when called with none."""

import os
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


def _settings(context: typer.Context) -> dict[str, dict[str, str | list[str]]]:
    """Defaults of every command's options, from ``UMA_*`` variables, else from ``config.toml``.

    Raises:
        UsageError: If the file has a name that is no option of any command.
    """
    from uma.config import read_config
    from uma.paths import config_folder

    commands = getattr(context.command, "commands", {})
    names = {
        command: {
            str(p.name): getattr(p, "multiple", False)
            for p in found.params
            if p.param_type_name == "option"
        }
        for command, found in commands.items()
    }
    known = {name.replace("_", "-") for options in names.values() for name in options}
    settings = read_config(config_folder() / "config.toml", known)
    return {
        command: {
            name: [value] if multiple else value
            for name, multiple in options.items()
            if (value := os.environ.get(f"UMA_{name.upper()}") or settings.get(name))
        }
        for command, options in names.items()
    }


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
    """Run language models inside the memory you have: predicted, enforced, measured.

    Every option can be set for good: as a variable UMA_NAME, or as a line in config.toml.
    """
    context.default_map = _settings(context)
    if context.invoked_subcommand is None:
        from uma.cli.overview import print_overview

        print_overview()
