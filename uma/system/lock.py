"""One heavy command at a time: run, lora, bandwidth, bench, doctor.

Two processes that fill the GPU's memory at once can crash a Mac. The system's own file lock is
held, which ends with the process however it ends, so that no lock can be stale; the file's text
only names the holder, and may outlive it.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from uma.checkpoint.lock import POLL_S, try_lock
from uma.errors import Busy


@contextlib.contextmanager
def heavy_command(
    command: str,
    folder: Path,
    *,
    wait: bool = False,
    allow_concurrent: bool = False,
    on_wait: Callable[[str], None] = lambda holder: None,
) -> Iterator[str | None]:
    """Hold the lock of ``folder`` while ``command`` (such as ``uma run``, no arguments) works.

    Yields ``None``, or a note when the lock could not be had and the command goes on without it:
    the folder cannot be written, or ``allow_concurrent`` says so. With ``wait`` it queues, after
    telling ``on_wait`` once who holds the lock.

    Raises:
        Busy: If another command holds it and neither option is given.
    """
    path = folder / "heavy.lock"
    file, note = _open(path)
    if file is None:
        yield note
        return
    try:
        note = _acquire(file, path, wait, allow_concurrent, on_wait)
        if note is None:
            _name_holder(file, command)
        yield note
    finally:
        os.close(file)


def _open(path: Path) -> tuple[int | None, str | None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600), None
    except OSError as error:
        return None, _no_lock(path.parent, error)


def _acquire(
    file: int, path: Path, wait: bool, allow_concurrent: bool, on_wait: Callable[[str], None]
) -> str | None:
    """Lock the file; a note instead where that cannot be or is not wanted."""
    told = False
    while True:
        try:
            if try_lock(file):
                return None
        except OSError as error:  # a file system without locks
            return _no_lock(path.parent, error)
        holder = _holder(path)
        if allow_concurrent:
            return f"running beside {holder}: the two together can exhaust the memory"
        if not wait:
            raise Busy(
                f"{holder} is running; wait for it, queue with --wait, "
                "or override with --allow-concurrent"
            )
        if not told:
            on_wait(holder)
            told = True
        time.sleep(POLL_S)


def _no_lock(folder: Path, error: OSError) -> str:
    return f"no lock in {folder} ({error.strerror}): nothing keeps a second command away"


def _name_holder(file: int, command: str) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    text = json.dumps({"pid": os.getpid(), "command": command, "since": since})
    with contextlib.suppress(OSError):  # a full disk keeps the name, not the lock
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, text.encode())


def _holder(path: Path) -> str:
    """Who holds the lock, in words; the text may be cut while it is being written."""
    try:
        holder = json.loads(path.read_text())
        return f"{holder['command']} (process {holder['pid']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another uma command"
