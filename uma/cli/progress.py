"""Progress on stderr: one line that is rewritten on a terminal, nothing elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from uma.units import format_gib, printable

_INTERVAL_S = 0.1
SHOWN = "UMA_SHOWN_ON_TERMINAL"
"""Variable by which a child knows that its parent shows on a terminal what it writes."""


def say(text: str, quiet: bool = False) -> None:
    """Tell a person something, beside the result."""
    if not quiet:
        with contextlib.suppress(OSError):  # the answer on stdout goes on without what is said here
            print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def progress(
    label: str, *, quiet: bool = False, sizes: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes what is done and the total; the line is wiped when all is done.

    It is not wiped once more at the end of the block: other text may stand there by then.
    """
    terminal = sys.stderr.isatty() or bool(os.environ.get(SHOWN))
    shown = not quiet and terminal and os.environ.get("TERM") != "dumb"
    last = 0.0

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not shown or (now - last < _INTERVAL_S and done < total):
            return
        if done >= total:
            wipe()
            return
        last = now
        amount = f"{format_gib(done)} of {format_gib(total)}" if sizes else f"{done:,} of {total:,}"
        share = f" ({100 * done // total} %)" if total else ""
        print(f"\r\x1b[K{label}: {amount}{share}", end="", file=sys.stderr, flush=True)

    def wipe() -> None:
        nonlocal last
        if last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        last = 0.0

    try:
        yield show
    finally:
        wipe()
