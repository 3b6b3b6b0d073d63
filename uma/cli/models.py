"""``uma models``: the models that a name means."""

import json as json_module
import re
from decimal import Decimal
from typing import Annotated

import typer

from uma.cli import options as opt
from uma.errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([MBT])", re.IGNORECASE)
_SCALE = {"M": 10**6, "B": 10**9, "T": 10**12}


def models(
    text: Annotated[
        list[str] | None,
        typer.Argument(show_default=False, help="Words of the name, such as qwen coder."),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="dense, or moe for mixtures of experts.")] = None,
    max_parameters: Annotated[
        str | None, typer.Option(help="Only up to this size, such as 32B.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """List the models of the catalog, smallest first.

    Parameters are those of the text decoder, from its shapes. Others than these run too: give a
    folder, a .gguf file or a hub repository as MODEL.

    \b
    Examples:
      uma models qwen --max-parameters 32B
      uma models --kind moe
    """
    from uma.catalog.listed import listed_models
    from uma.report.models import models_json, models_text

    most = None if max_parameters is None else parse_count(max_parameters, "--max-parameters")
    found = listed_models(" ".join(text or []), kind=kind, max_parameters=most)
    print(json_module.dumps(models_json(found), indent=2) if json else models_text(found))


def parse_count(text: str, name: str) -> int:
    """A number of parameters as models are named.

    Raises:
        UsageError: If it has no unit, which could mean anything.

    >>> parse_count("0.5B", "--max-parameters")
    500000000
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name}: {text!r} is not a number of parameters; write 500M or 32B")
    return int(Decimal(match[1]) * _SCALE[match[2].upper()])
