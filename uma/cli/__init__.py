"""The command line: each command parses, makes one library call, and prints one report."""

import atexit
import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence

from uma.errors import StorageError, UmaError
from uma.units import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``uma`` and return its exit code: the only place that catches ``UmaError``.

    A reader that closes the pipe, as ``head`` does, has read enough: that is no failure.
    """
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if own_process and arguments[:1] in (["estimate"], ["compare"], ["models"], ["report"]):
        # In so short a process looking for cycles takes a fifth of the time, also at its end.
        gc.disable()
        atexit.register(gc.freeze)
    code = 0
    try:
        _survive_other_encodings()
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UmaError as error:
        print(f"uma: {printable(str(error))}", file=sys.stderr)
        if isinstance(error, StorageError):
            _name_variable(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        from uma.measurement.failures import explain

        found = explain(str(error))
        if found is None:
            raise
        print(
            f"uma: {printable(str(error))}\n  {found.text}\n  do: {found.remedy}", file=sys.stderr
        )
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        leave_unflushed("stdout")
        if error.errno == errno.EPIPE:
            return code
        print("uma: the output's disk is full", file=sys.stderr)
        return 1
    return code


def _run(arguments: list[str]) -> int:
    """The exit code of a command."""
    if arguments in (["--help"], ["-h"]):
        from uma.cli.commands import help_text

        print(help_text(), flush=True)
        return 0
    from uma.cli.app import app

    try:
        app(args=arguments, prog_name="uma")
    except SystemExit as done:
        # typer catches what a closed pipe raises itself, and leaves with 1.
        if isinstance(done.__context__, BrokenPipeError):
            raise done.__context__ from None
        return done.code if isinstance(done.code, int) else 1
    return 0


def _name_variable(message: str) -> None:
    """Say how one of our own folders is moved, if the message is about one."""
    from uma.paths import cache_folder, state_folder

    for variable, folder in (("UMA_CACHE_DIR", cache_folder()), ("UMA_STATE_DIR", state_folder())):
        if str(folder) in message:
            print(f"  {variable} names another folder", file=sys.stderr)


def leave_unflushed(stream: str) -> None:
    """Keep Python from writing the rest of stdout or stderr at exit: it would fail once more."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, stream).fileno())


def _survive_other_encodings() -> None:
    """Show what a cp1252 or ASCII console cannot as ``?``, and read what is no text as U+FFFD.

    Without a stderr, ``print`` would write to stdout what is meant for it.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
