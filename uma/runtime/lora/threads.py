"""How many threads OpenBLAS takes in a run: one number from its beginning to its end.

Sums come out otherwise with another number, so a resumed run takes the one it began with.
"""

import ctypes

import mlx.core as mx

from uma.runtime.threads import set_faster_threads, thread_setter

_ROWS, _WIDTH, _INNER = 64, 256, 8192  # the shape of a gradient's product: short and deep


def fix_threads(threads: int | None) -> int | None:
    """Set ``threads``, or the faster of one and all; what it is now. ``None`` without OpenBLAS."""
    setter = thread_setter()
    if setter is not None and threads is not None:
        setter(threads)
    elif setter is not None:
        one, other = mx.ones((_ROWS, _INNER)), mx.ones((_INNER, _WIDTH))
        mx.eval(one, other)
        set_faster_threads(lambda: mx.eval(one @ other))
    current = getattr(ctypes.CDLL(None), "openblas_get_num_threads", None)
    return None if current is None else int(current())
