"""``uma measure``: what memory this machine and its processes hold, once, live, or meanwhile."""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from uma.cli import options as opt
from uma.cli.app import SETTINGS
from uma.cli.bandwidth import bandwidth
from uma.errors import UsageError
from uma.units import MIB, printable

_BEHIND = "--during measures the command behind --, such as: --during -- python a.py"


class Measure(TyperGroup):
    """A group that also runs by itself; what stands behind ``--`` is another program's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.obj, args = args[at + 1 :], args[:at]
        elif "--during" in args:
            raise UsageError(_BEHIND)
        rest: list[str] = super().parse_args(ctx, args)
        return rest


measure = typer.Typer(
    cls=Measure,
    add_completion=False,
    invoke_without_command=True,
    subcommand_metavar="[-- COMMAND ...] | bandwidth",
    **SETTINGS,
)
measure.command("bandwidth")(bandwidth)


@measure.callback()
def memory(
    context: typer.Context,
    pid: Annotated[
        list[int] | None, typer.Option(help="A process, with all that it started; repeatable.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Processes with this in their name or command; repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=1000, help="Else how many to list.")] = 10,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again.")] = False,
    interval: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Looks until --watch ends.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write what --watch sees to this .csv or .jsonl file.")
    ] = None,
    during: Annotated[
        bool, typer.Option("--during", help="Run the command behind -- and report its peaks.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Explain an error's text, - for stdin.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Show what the memory of this machine holds, and who holds it.

    Each figure says where it was read, or why it could not be. With --during the report goes to
    stderr and the exit code is the command's own.

    \b
    Examples:
      uma measure
      uma measure --name mlx_lm --watch --log memory.csv
      uma measure --during -- python train.py
      uma measure --explain - < crash.log
      uma measure bandwidth
    """
    if context.invoked_subcommand is not None:
        return
    command = context.obj or []
    if bool(command) != during:
        raise UsageError(_BEHIND)
    if sum((watch, during, explain is not None)) > 1:
        raise UsageError("choose one of --watch, --during and --explain")
    if not watch and (log is not None or count is not None):
        raise UsageError("--log and --count are of --watch")
    if explain is not None:
        raise typer.Exit(_explain(explain, json))
    if during:
        raise typer.Exit(_during(command, json))
    opt.require_numbers(interval=interval)
    if watch:
        from uma.cli.watch import watch_memory

        watch_memory(pid or [], name or [], top, interval, count, log, json)
        return
    _page(pid or [], name or [], top, json)


def _page(pids: list[int], names: list[str], top: int, json: bool) -> None:
    from uma.measurement.diagnosis import diagnose
    from uma.measurement.snapshot import read_snapshot, with_rates
    from uma.report.measure import measure_json, measure_text

    snapshot = with_rates(read_snapshot(pids, names, largest=top))
    findings = diagnose([snapshot])
    if json:
        print(json_module.dumps(measure_json(snapshot, findings), indent=2))
    else:
        print(measure_text(snapshot, findings))


def _explain(text: str, json: bool) -> int:
    """Say what an error means; 1 if it is not known."""
    from dataclasses import asdict

    from uma.measurement.failures import explain
    from uma.report import SCHEMA_VERSION
    from uma.report.measure import explanation_text

    found = explain(bounded_text(sys.stdin) if text == "-" else text)
    if json:
        document = {"schema_version": SCHEMA_VERSION, "explanation": found and asdict(found)}
        print(json_module.dumps(document, indent=2))
    elif found is None:
        print("uma: no failure that is known here is in this text", file=sys.stderr)
    else:
        print(explanation_text(found))
    return 0 if found else 1


def bounded_text(file: TextIO | None) -> str:
    """A text of 2 MiB at most: of a longer file the first and the last MiB (in characters).

    A failure stands at the end of a log, or at the beginning of those it caused. Without a stdin
    there is no file.
    """
    if file is None:
        return ""
    first, last, left_out = file.read(MIB), "", False
    while block := file.read(MIB):
        last += block
        left_out |= len(last) > MIB
        last = last[-MIB:]
    return first + ("\n" if left_out else "") + last


def _during(command: list[str], json: bool) -> int:
    """Run a command; its own streams stay its own, except that --json keeps stdout for itself."""
    from pathlib import PurePath

    from uma.cli import leave_unflushed
    from uma.measurement.command import NOT_EXECUTABLE, NOT_FOUND, measure_command
    from uma.report.measure import record_json, record_text

    program, name = (printable(text, kept="") for text in (command[0], PurePath(command[0]).name))
    try:
        measured = measure_command(command, stdout=sys.stderr if json else None)
    except FileNotFoundError:
        print(f"uma: {program}: no such command", file=sys.stderr)
        return NOT_FOUND
    except PermissionError:
        print(f"uma: {program} may not be run", file=sys.stderr)
        return NOT_EXECUTABLE
    if json:
        print(json_module.dumps(record_json(measured.record, name, measured.status), indent=2))
    else:
        try:
            print(record_text(measured.record, name), file=sys.stderr)
        except OSError:  # nobody reads it, or its disk is full: the status is the command's still
            leave_unflushed("stderr")
    return measured.status
