"""Options that take the place of others: the one that was set nearer to the command line counts."""

import os
from typing import Any

import typer

from uma.cli.options import given
from uma.errors import UsageError

FROM_FILE = "uma.from_file"
"""Where ``-c FILE`` leaves, in the context's ``meta``, the names that it set."""

_INSTEAD = {
    # an option: those that it takes the place of
    "epochs": ("iters",),
    "lr_schedule": ("learning_rate", "warmup", "cosine"),
}
OF_ADAPTERS = ("rank", "scale", "dropout", "keys")


def settled(context: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that another one takes the place of; of epochs and iters one.

    Set at the same place, ``lr_schedule`` counts, as in mlx_lm.lora; all else is an error.

    Raises:
        UsageError: If two contradict each other.
    """
    found = dict(options)
    for name, others in _INSTEAD.items():
        own = _distance(context, name)
        for other in others:
            theirs = _distance(context, other)
            if own == theirs < 4 and (own == 0 or name == "epochs"):
                raise UsageError(
                    f"{_flag(name)} takes the place of {_flag(other)}: give one of them"
                )
            if theirs < own:
                found[name] = None
    if found["epochs"] is not None:
        found["iters"] = None
    if found["fine_tune_type"] == "full":
        for name in OF_ADAPTERS:
            if given(context, name):
                raise UsageError(f"{_flag(name)} is of adapters; --fine-tune-type full has none")
    return found


def _distance(context: typer.Context, name: str) -> int:
    """From the command line (0) to the file, a variable, ``config.toml`` and the default (4)."""
    if given(context, name):
        return 0
    if name in context.meta.get(FROM_FILE, ()):
        return 1
    if os.environ.get(f"UMA_{name.upper()}"):
        return 2
    return 3 if name in (context.default_map or {}) else 4


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
