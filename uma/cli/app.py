"""The ``uma`` application: a group whose commands are imported when one is called."""

import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from uma import __version__
from uma.cli.commands import COMMANDS
from uma.errors import UsageError

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

# typer brings its own copy of click (0.26 and later): the types of commands have no public name.


@cache
def command(name: str) -> Any:
    """A command as typer runs it, imported now; a group where the module has a ``Typer``."""
    found = getattr(import_module(COMMANDS[name][0]), name)
    if isinstance(found, typer.Typer):
        return get_command(found)
    alone = typer.Typer(**SETTINGS, add_completion=False)
    alone.command(name)(found)
    return get_command(alone)


class Commands(TyperGroup):
    """The commands by name and line alone, until one is called, completed or asked for help."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, line) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, command(found.name) if found is not None else None, rest


app = typer.Typer(cls=Commands, **SETTINGS)


def _settings(invoked: str) -> dict[str, Any]:
    """Defaults of a command's options, from ``UMA_*`` variables, else from ``config.toml``.

    Raises:
        UsageError: If the file has a name that is no option of any command.
    """
    from uma.config import read_config
    from uma.paths import config_folder

    file = config_folder() / "config.toml"
    try:
        settings = read_config(file, _option_names([invoked]))
    except UsageError:  # perhaps an option of another command
        settings = read_config(file, _option_names(COMMANDS))
    return {invoked: _defaults(command(invoked), settings)}


def _option_names(commands: Iterable[str]) -> set[str]:
    """The options of the commands, with dashes."""
    found: set[str] = set()
    left = [command(name) for name in commands]
    while left:
        one = left.pop()
        left.extend(getattr(one, "commands", {}).values())
        found.update(str(p.name).replace("_", "-") for p in _options(one))
    return found


def _defaults(one: Any, settings: dict[str, str | list[str]]) -> dict[str, Any]:
    """Of a command its options' values; of a group those of its commands too, by name."""
    values: dict[str, Any] = {}
    for option in _options(one):
        name = str(option.name)
        variable = f"UMA_{name.upper()}"
        given = os.environ.get(variable)
        if value := given or settings.get(name):
            source = variable if given else f"{name.replace('_', '-')} in config.toml"
            values[name] = _value(option, value, source)
    for name, sub in getattr(one, "commands", {}).items():
        values[name] = _defaults(sub, settings)
    return values


def _value(option: Any, value: str | list[str], source: str) -> str | list[str]:
    """The value as typer takes it.

    Raises:
        UsageError: If the option does not take it; nobody typed it, so its ``source`` is named.
    """
    many = getattr(option, "multiple", False)
    if isinstance(value, list) and not many:
        raise UsageError(f"{source} takes one value")
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        try:
            option.type.convert(text, option, None)
        except Exception as error:  # of typer's own copy of click, or of an option's own parser
            raise UsageError(f"{source}: {getattr(error, 'message', error)}") from None
    return texts if many else value


def _options(one: Any) -> list[Any]:
    return [p for p in one.params if p.param_type_name == "option"]


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
    if context.invoked_subcommand is None:
        from uma.cli.overview import print_overview

        print_overview()
    else:
        context.default_map = _settings(context.invoked_subcommand)
