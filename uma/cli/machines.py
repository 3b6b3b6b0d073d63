"""``uma machines``: the machines that --machine knows."""

import json as json_module
from typing import Annotated

import typer

from uma.cli import options as opt


def machines(
    text: Annotated[
        list[str] | None,
        typer.Argument(show_default=False, help="Words of the name, such as studio or 4090."),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="mac, gpu, or unified for the others.")] = None,
    min_memory: Annotated[
        str | None, typer.Option(help="Only with this memory as sold, such as 96GB.")
    ] = None,
    chip: Annotated[str | None, typer.Option(help="Only with this chip, such as M4 Max.")] = None,
    json: opt.Json = False,
) -> None:
    """List the machines of the catalog.

    The GPU's part of a Mac's memory depends on the version of macOS: where none is given it is a
    range. Prices are those at launch.

    \b
    Examples:
      uma machines studio --min-memory 96GB
      uma machines --kind gpu 4090
    """
    from uma.machine.listed import listed_machines
    from uma.machine.named import sold_bytes
    from uma.report.machines import machines_json, machines_text

    found = listed_machines(
        " ".join(text or []),
        kind=kind,
        min_memory_bytes=0 if min_memory is None else sold_bytes(min_memory, "--min-memory"),
        chip=chip,
    )
    print(json_module.dumps(machines_json(found), indent=2) if json else machines_text(found))
