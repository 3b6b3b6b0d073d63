"""How fast this processor multiplies matrices now, in the form that the weights have."""

import time
from typing import Any

import mlx.core as mx

from uma.quantization import Quantization
from uma.runtime.lora.threads import fix_threads

_ROWS, _WIDTH = 256, 1024


def product_flops_per_s(quantization: Quantization | None) -> float:
    """FLOP/s of ``_ROWS`` rows by a matrix in float32, or quantized with float32 scales.

    The faster of two timings after one that does not count: about 0.1 s with OpenBLAS.
    """
    fix_threads(None)
    rows, matrix = mx.ones((_ROWS, _WIDTH)), mx.ones((_WIDTH, _WIDTH))
    if quantization is None:
        mx.eval(rows, matrix)
        return _rate(lambda: rows @ matrix.T)
    q = quantization
    options: dict[str, Any] = {"group_size": q.group_size, "bits": q.bits, "mode": q.mode}
    packed = mx.quantize(matrix, **options)
    mx.eval(rows, packed)
    return _rate(lambda: mx.quantized_matmul(rows, *packed, transpose=True, **options))


def _rate(run: Any) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return 2.0 * _ROWS * _WIDTH * _WIDTH / min(times[1:])
