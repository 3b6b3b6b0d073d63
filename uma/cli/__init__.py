"""The command line: each command parses, makes one library call, and prints one report."""

import sys
from collections.abc import Sequence

from uma.errors import UmaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``uma`` and return its exit code: the only place that catches ``UmaError``."""
    from uma.cli.app import app

    _survive_other_encodings()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="uma")
    except UmaError as error:
        print(f"uma: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    return 0


def _survive_other_encodings() -> None:
    """Show what a cp1252 or ASCII console cannot as ``?``, and read what is no text as U+FFFD."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
