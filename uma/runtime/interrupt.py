"""Ctrl-C at a moment that suits: as an event that a loop looks at between two steps."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 0.5
"""Python needs a moment to call a handler, if it is not in the middle of an evaluation."""


class Torn(KeyboardInterrupt):
    """Ctrl-C in the middle of a step: some layers may be ahead of others."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, so that no layer is left a token behind the others.

    A second one raises ``Torn`` at once, or ends the process where Python has not come to see the
    first: a chunk of a prompt is one call of MLX that may take a minute. Outside the main thread,
    or where the program handles SIGINT itself, nothing is changed and the event is never set.

    On Linux a Ctrl-C of the terminal ends a compiler of MLX's CPU backend too, and with it the
    evaluation that waits for it: that is ``Torn`` as well.
    """
    seen = 0
    event = threading.Event()
    former = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or former is not signal.default_int_handler:
        yield event
        return

    def handler(*_: object) -> None:
        nonlocal seen
        seen += 1
        if event.is_set():
            raise Torn
        event.set()

    signal.signal(signal.SIGINT, handler)
    try:
        with _second_ends_the_process(lambda: seen):
            yield event
    except RuntimeError as error:
        if event.is_set():
            raise Torn from error
        raise
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def _second_ends_the_process(seen: Callable[[], int]) -> Iterator[None]:
    """Watch the signals as they arrive, from a thread that runs while MLX evaluates."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, seen), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        writer.close()
        thread.join()
        reader.close()


def _watch(reader: socket.socket, seen: Callable[[], int]) -> None:
    arrived = 0
    while data := reader.recv(64):
        arrived += data.count(signal.SIGINT)
        if arrived - seen() >= 2:
            time.sleep(GRACE_S)
            if arrived - seen() >= 2:
                os._exit(130)
