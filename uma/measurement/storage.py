"""How fast a file comes from the disk: what loading a model can hope for."""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from uma.errors import UmaError, UsageError
from uma.units import GIB, MIB

BLOCK_BYTES = 16 * MIB
THREADS = 4  # a disk needs several reads in flight; mlx's own loader has four (io/load.cpp)
MOST_BYTES = 16 * GIB
LEAST_BYTES = 64 * MIB
_F_NOCACHE = 48  # sys/fcntl.h of macOS; Python's fcntl names it only there


@dataclass(frozen=True, slots=True)
class StorageRead:
    """A file, or several, read once from begin to end in blocks.

    ``method`` says how the page cache was kept out; ``cached`` that it may not have been.
    """

    size_bytes: int
    seconds: float
    method: str
    cached: bool
    threads: int = THREADS

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds


def read_from_disk(paths: list[Path]) -> StorageRead:
    """Read ``paths`` one after the other, 16 GiB at most, past the page cache where that goes.

    Raises:
        UsageError: If there is less than 64 MiB to read: too short to time.
        UmaError: If a file cannot be read, or on Windows.
    """
    if not hasattr(os, "preadv"):
        raise UmaError("reading from the disk is timed on Linux and macOS only")
    total = sum(path.stat().st_size for path in paths)
    if total < LEAST_BYTES:
        raise UsageError("the file is too small to time: 64 MiB or more are needed")
    read = 0
    spent = 0.0
    methods: dict[str, bool] = {}
    try:
        for path in paths:
            with _opened(path) as (file, method, cached):
                methods[method] = cached
                start = time.perf_counter()
                read += _read(file, min(path.stat().st_size, MOST_BYTES - read))
                spent += time.perf_counter() - start
            if read >= MOST_BYTES:
                break
    except OSError as error:
        raise UmaError(f"{error.filename or 'the file'} cannot be read: {error.strerror}") from None
    return StorageRead(read, spent, " and ".join(methods), any(methods.values()))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, str, bool]]:
    """A file that is read past the page cache, how, and whether some of it may be cached."""
    file, method, cached = _open(path)
    try:
        yield file, method, cached
    finally:
        os.close(file)


def _open(path: Path) -> tuple[int, str, bool]:
    if sys.platform == "darwin":
        import fcntl

        file = os.open(path, os.O_RDONLY)
        fcntl.fcntl(file, _F_NOCACHE, 1)
        return file, "F_NOCACHE, which serves pages that are cached already", True
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), "page cache bypassed (O_DIRECT)", False
        except OSError:  # a file system without it, such as tmpfs
            file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return file, "page cache dropped (posix_fadvise), as far as the kernel does it", True
    return os.open(path, os.O_RDONLY), "page cache not bypassed", True


def _read(file: int, size_bytes: int) -> int:
    """The bytes read of the first ``size_bytes``; the threads take turns, block by block.

    O_DIRECT wants buffers and offsets that are whole pages, which those of ``mmap`` are.
    """
    import mmap

    def worker(first: int) -> int:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            done = 0
            for start in range(first * BLOCK_BYTES, size_bytes, THREADS * BLOCK_BYTES):
                done += os.preadv(file, [buffer], start)
            return done

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(worker, range(THREADS)))
