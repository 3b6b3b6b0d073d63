"""Memory bandwidth through MLX: kernels that its laziness cannot leave out.

What MLX would not do at all: an output that nobody evaluates, ``mx.contiguous``, a cast to the
same type, a slice of everything. Eager ``b + s c`` is two kernels and moves 5 N, compiled it is
one; the same product k times in one compiled function is merged into one. Hence a compiled triad
whose every launch is evaluated (mlx 0.32.4).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import mlx.core as mx

from uma.errors import UmaError, UsageError
from uma.measurement.bandwidth import SCALAR, Kernel, KernelName
from uma.runtime.limits import memory_limits

WINDOW = 2  # outputs in flight: a command buffer alone waits 20 to 110 us for the next
ARRAYS = 2 + WINDOW + 1  # inputs, outputs in flight, the one being made


@contextmanager
def on_device(name: Literal["gpu", "cpu"]) -> Iterator[None]:
    """Let MLX compute on this device by default, then on the former one."""
    former = mx.default_device()
    mx.set_default_device(mx.gpu if name == "gpu" else mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(former)


@contextmanager
def mlx_kernels(array_bytes: int) -> Iterator[tuple[Kernel, ...]]:
    """Read, write, copy, triad of float32 arrays on MLX's default device.

    The arrays are random: zeros share one page, and could be compressed. On a GPU MLX's pool keeps
    the outputs' buffers, so that they are mapped once; on a processor it is left as small as it
    is, as models find it. At the end three elements of each output are looked at.

    Raises:
        UsageError: If an array would have more elements than 32 bits count.
        UmaError: If a kernel computed something else than was counted.
    """
    elements = array_bytes // 4
    if elements >= 1 << 31:
        raise UsageError("--size: arrays of MLX are below 8 GiB here")
    pool = ARRAYS * array_bytes if mx.default_device() == mx.gpu else None
    with memory_limits(cache=pool):
        b, c = (mx.random.uniform(0.25, 0.75, (elements,), key=mx.random.key(i)) for i in (1, 2))
        mx.eval(b, c)
        triad = mx.compile(lambda x, y: x + SCALAR * y)
        loops: dict[KernelName, tuple[int, Callable[[], mx.array]]] = {
            "read": (1, lambda: mx.max(b)),
            "write": (1, lambda: mx.full((elements,), SCALAR, mx.float32)),
            "copy": (2, lambda: -b),
            "triad": (3, lambda: triad(b, c)),
        }
        try:
            yield tuple(
                Kernel(name, arrays * array_bytes, partial(_repeat, run))
                for name, (arrays, run) in loops.items()
            )
            _check(b, c, {name: run for name, (_, run) in loops.items() if name != "read"})
        finally:
            mx.clear_cache()


def _repeat(run: Callable[[], mx.array], passes: int) -> None:
    """Launch ``passes`` independent kernels; few of their outputs are alive at a time."""
    outputs: deque[mx.array] = deque()
    launch: Callable[..., None] = mx.async_eval
    for _ in range(passes):
        outputs.append(run())
        launch(outputs[-1])
        if len(outputs) > WINDOW:
            mx.eval(outputs.popleft())
    mx.eval(list(outputs))
    mx.synchronize()


def _check(b: mx.array, c: mx.array, runs: dict[KernelName, Callable[[], mx.array]]) -> None:
    places = mx.array([0, b.size // 2, b.size - 1])
    x, y = b[places], c[places]
    right = {"write": mx.full((3,), SCALAR), "copy": -x, "triad": x + SCALAR * y}
    for name, run in runs.items():
        if not mx.allclose(run()[places], right[name]).item():
            raise UmaError(f"MLX's {name} computed something else: its time means nothing")
