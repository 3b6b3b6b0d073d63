"""Memory bandwidth: kernels that are repeated and timed, and those of the processor's threads.

Bytes are counted as STREAM counts them (McCalpin, stream.c 5.10): for arrays of N bytes a read
moves N, a write N, a copy 2 N, a triad ``a = b + s c`` 3 N. What a store first reads of its line
(write-allocate, on x86) is not counted, nor what passes between caches.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

from uma.errors import DoesNotFit, RuntimeUnavailable, UmaError, UsageError
from uma.units import GB, KIB, MIB, format_gib

KernelName = Literal["read", "write", "copy", "triad"]
DeviceName = Literal["gpu", "cpu", "host"]

ARRAY_BYTES = 512 * MIB  # five times the largest last-level cache of an Apple chip
CACHES = 4  # each array at least so many times the last-level cache: STREAM's own rule
SCALAR = 0.4
# Apple prints rounded figures: 200 for 6,400 MT/s x 32 bytes = 204.8 GB/s, and so on.
ROUNDING = 1.024
# Of a block of the triad, which NumPy passes twice: larger ones leave a core's second-level cache,
# smaller ones ask more often for Python's lock.
BLOCK_BYTES = 512 * KIB

CPU_NOTE = (
    "MLX's CPU backend runs each of these kernels on one thread and maps every output anew: they "
    "show what a model gets from it, not what the memory gives"
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is timed: ``repeat(n)`` passes over the arrays n times; a pass counts ``size_bytes``."""

    name: KernelName
    size_bytes: int
    repeat: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Seconds of each sample, for one pass; ``invalid`` says why they are no measurement."""

    name: KernelName
    size_bytes: int
    times_s: tuple[float, ...]
    invalid: str | None = None

    @property
    def best_bytes_per_s(self) -> float:
        return self.size_bytes / min(self.times_s)

    @property
    def median_bytes_per_s(self) -> float:
        return self.size_bytes / median(self.times_s)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """All kernels on one device. ``gpu`` and ``cpu`` are MLX's backends, ``host`` is NumPy."""

    device: DeviceName
    array_bytes: int
    kernels: tuple[KernelResult, ...]
    threads: int | None = None

    @property
    def achieved(self) -> KernelResult | None:
        """The best of read, copy and triad that can be believed; a write alone says little.

        ``None`` for MLX's CPU backend, which does not reach what memory gives.
        """
        valid = [k for k in self.kernels if k.invalid is None and k.name != "write"]
        if self.device == "cpu":
            return None
        return max(valid, key=lambda kernel: kernel.best_bytes_per_s, default=None)

    @property
    def spread(self) -> float:
        """The largest share by which the slowest sample of a kernel takes longer than its best."""
        return max(max(k.times_s) / min(k.times_s) - 1 for k in self.kernels)


def measure(
    device: DeviceName,
    kernels: Sequence[Kernel],
    array_bytes: int,
    *,
    repetitions: int = 10,
    warmup_s: float = 0.5,
    peak_bytes_per_s: int | None = None,
    threads: int | None = None,
) -> Bandwidth:
    """Time each of ``kernels``; ``peak_bytes_per_s`` is what the chip's vendor prints."""
    results = tuple(
        timed(kernel, repetitions, warmup_s=warmup_s, peak_bytes_per_s=peak_bytes_per_s)
        for kernel in kernels
    )
    return Bandwidth(device, array_bytes, results, threads)


def timed(
    kernel: Kernel,
    repetitions: int = 10,
    *,
    warmup_s: float = 0.5,
    sample_s: float = 0.05,
    peak_bytes_per_s: int | None = None,
) -> KernelResult:
    """Samples of at least ``sample_s`` after a warm-up: clocks rise and pages are mapped in it."""
    kernel.repeat(1)
    once = math.inf
    end = time.perf_counter() + warmup_s
    while math.isinf(once) or time.perf_counter() < end:
        once = min(once, seconds(kernel, 1))
    passes = max(1, math.ceil(sample_s / once))
    times = tuple(seconds(kernel, passes) / passes for _ in range(repetitions))
    return believed(KernelResult(kernel.name, kernel.size_bytes, times), peak_bytes_per_s)


def believed(result: KernelResult, peak_bytes_per_s: int | None) -> KernelResult:
    """``result``, marked invalid if its best is above the physical peak.

    It was then served from a cache, or its work was left out. ``peak_bytes_per_s`` is the figure
    that is printed, the physical one up to 2.4 % above it.
    """
    if peak_bytes_per_s is None or result.best_bytes_per_s <= peak_bytes_per_s * ROUNDING:
        return result
    peak = peak_bytes_per_s * ROUNDING / GB
    return replace(result, invalid=f"above the physical peak of {peak:.1f} GB/s")


def seconds(kernel: Kernel, passes: int) -> float:
    """What ``passes`` of a kernel take."""
    start = time.perf_counter()
    kernel.repeat(passes)
    return time.perf_counter() - start


def array_size(
    available_bytes: int | None, cache_bytes: int, arrays: int, asked_bytes: int | None = None
) -> int:
    """Bytes of one of ``arrays`` arrays: 512 MiB, halved until all take half of what is free.

    Raises:
        UsageError: If the size asked for is too small for a cache of ``cache_bytes``.
        DoesNotFit: If memory is short: what is measured then is the paging.
    """
    smallest = max(CACHES * cache_bytes, 64 * MIB)
    if asked_bytes is not None and asked_bytes < smallest:
        raise UsageError(
            f"--size: arrays of {format_gib(asked_bytes)} may be served from the cache of "
            f"{format_gib(cache_bytes)}; at least {format_gib(smallest)}"
        )
    room = math.inf if available_bytes is None else available_bytes / 2 / arrays
    size = asked_bytes or max(ARRAY_BYTES, smallest)
    while asked_bytes is None and size > room and size // 2 >= smallest:
        size //= 2
    if size > room:
        raise DoesNotFit(
            f"{arrays} arrays of {format_gib(size)} would take more than half of the "
            f"{format_gib(available_bytes or 0)} that are free; close other programs"
        )
    return size // 8 * 8


@contextmanager
def host_kernels(array_bytes: int, threads: int) -> Iterator[tuple[Kernel, ...]]:
    """NumPy's loops over three arrays of float64, a part of them in each thread.

    NumPy releases Python's lock within a loop. The triad goes block by block, so that its second
    pass finds the first one's results in the cache and memory sees one read of ``b`` and ``c``
    and one write of ``a``. At the end three elements of ``a`` are looked at.

    Raises:
        RuntimeUnavailable: If NumPy is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise RuntimeUnavailable("this needs NumPy: pip install numpy") from None

    elements = array_bytes // 8
    random = np.random.default_rng(0)
    a, b, c = np.ones(elements), random.random(elements), random.random(elements)
    parts = [slice(elements * i // threads, elements * (i + 1) // threads) for i in range(threads)]

    step = BLOCK_BYTES // 8
    blocks = {  # cut once: what Python does for each block, one thread does at a time
        part.start: [
            [x[at : min(at + step, part.stop)] for x in (a, b, c)]
            for at in range(part.start, part.stop, step)
        ]
        for part in parts
    }

    def triad(part: slice) -> None:
        for a_block, b_block, c_block in blocks[part.start]:
            np.multiply(c_block, SCALAR, out=a_block)
            np.add(a_block, b_block, out=a_block)

    loops: dict[KernelName, tuple[int, Callable[[slice], object]]] = {
        "read": (1, lambda part: b[part].max()),
        "write": (1, lambda part: a[part].fill(SCALAR)),
        "copy": (2, lambda part: np.copyto(a[part], c[part])),
        "triad": (3, triad),
    }
    with ThreadPoolExecutor(threads) as pool:

        def repeat(loop: Callable[[slice], object], passes: int) -> None:
            for _ in range(passes):
                for _ in pool.map(loop, parts):
                    pass

        yield tuple(
            Kernel(name, arrays * array_bytes, partial(repeat, loop))
            for name, (arrays, loop) in loops.items()
        )
        repeat(triad, 1)
        for i in (0, elements // 2, elements - 1):
            if not math.isclose(a[i], b[i] + SCALAR * c[i]):
                raise UmaError("the triad computed something else: its time means nothing")
