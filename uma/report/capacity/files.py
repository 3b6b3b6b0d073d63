"""A file that appears whole or not at all, and never over another one unless that is asked."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from uma.errors import StorageError, UsageError


def require_new(paths: list[Path], *, force: bool) -> None:
    """
    Raises:
        UsageError: If one of them exists and may not be replaced.
    """
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give the name of a file")
        if path.exists() and not force:
            raise UsageError(f"{path} exists; give another name, or --force to replace it")


def write_files(files: Mapping[Path, bytes], *, force: bool) -> None:
    """Write all of ``files``, each whole; what exists is replaced only with ``force``.

    Raises:
        UsageError: If one of them exists and may not be replaced.
        StorageError: If one cannot be written.
    """
    require_new(list(files), force=force)
    for path, content in files.items():
        try:
            _write(path, content, force=force)
        except FileExistsError:
            raise UsageError(f"{path} exists; give another name, or --force") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from None


def _write(path: Path, content: bytes, *, force: bool) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".uma-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(partial, 0o666 & ~_umask())
        if force:
            os.replace(partial, path)
        else:
            os.link(partial, path)  # fails where another program made the file meanwhile
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
