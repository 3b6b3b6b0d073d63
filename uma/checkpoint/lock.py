"""A lock between processes: held by one at a time, released by the system when its holder dies."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uma.errors import StorageError

POLL_S = 0.1
_FAR = 1 << 30  # Windows locks bytes: one behind the text, so that others can read the text


def try_lock(file: int) -> bool:
    """Whether this process now holds the lock on a descriptor, which stays until it is closed.

    Raises:
        OSError: If the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, _FAR, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path``; call ``waiting`` once if another process has it.

    The holder removes the file before it lets go (Windows keeps open files), so that none is left
    behind; whoever then finds that the file it locked is no longer the one at ``path`` starts over.

    Raises:
        StorageError: If it cannot be made, or the file system has no locks.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab")  # noqa: SIM115
        except OSError as error:
            raise StorageError(f"cannot write to {path.parent}: {error.strerror}") from None
        with file:
            _wait_for(file.fileno(), path, waiting)
            if not _still_at(path, file.fileno()):
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return


def _wait_for(file: int, path: Path, waiting: Callable[[], None] | None) -> None:
    try:
        free = try_lock(file)
        if not free and waiting is not None:
            waiting()
        while not free:
            time.sleep(POLL_S)
            free = try_lock(file)
    except OSError as error:
        raise StorageError(f"cannot lock {path}: {os.strerror(error.errno or 0)}") from None


def _still_at(path: Path, file: int) -> bool:
    """Whether ``path`` leads to the open ``file``, and not to nothing or to a newer one."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
