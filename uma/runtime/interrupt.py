"""Ctrl-C at a moment that suits: as an event that a loop looks at between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Torn(KeyboardInterrupt):
    """Ctrl-C in the middle of a step: some layers may be ahead of others."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, so that no layer is left a token behind the others.

    A second one raises ``Torn`` at once. Outside the main thread, or where the program handles
    SIGINT itself, nothing is changed and the event is never set.
    """
    event = threading.Event()
    former = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or former is not signal.default_int_handler:
        yield event
        return

    def handler(*_: object) -> None:
        if event.is_set():
            raise Torn
        event.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, former)
