"""``uma lora status``: how a run stands, from any terminal."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from uma.cli import options as opt
from uma.errors import UsageError


def status(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            show_default=False,
            help="Folder of a run (its --adapter-path). [default: the one last written to]",
        ),
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all", help="Every run that was begun on this machine.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """How a run stands: step, loss, memory, time left; or how it ended, and how to go on.

    \b
    Examples:
      uma lora status
      uma lora status ./run1 --json
      uma lora status --all
    """
    from uma.measurement.run_status import read_status
    from uma.report import SCHEMA_VERSION
    from uma.report.run_status import status_json, status_text

    found = [read_status(folder) for folder in _folders(run, all_runs)]
    if json:
        runs = [status_json(one) for one in found]
        document = {"schema_version": SCHEMA_VERSION, "runs": runs} if all_runs else runs[0]
        print(json_module.dumps(document, indent=2))
    else:
        print("\n".join(map(status_text, found)))


def _folders(run: Path | None, all_runs: bool) -> list[Path]:
    from uma.measurement.run_status import known_runs
    from uma.paths import state_folder

    if run is not None:
        if all_runs:
            raise UsageError("give a run or --all, not both")
        return [run]
    known = known_runs(state_folder() / "runs")
    if not known:
        raise UsageError("no run was begun on this machine; give the folder of one")
    return known if all_runs else known[:1]
