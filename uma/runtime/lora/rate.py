"""How fast this processor multiplies matrices now, in the form that the weights have."""

import time
from statistics import median
from typing import Any

import mlx.core as mx

from uma.quantization import Quantization
from uma.runtime.lora.threads import fix_threads

_ROWS, _WIDTH = 256, 1024
SECONDS, LEAST = 0.5, 4  # of products, and how many at least


def product_flops_per_s(quantization: Quantization | None) -> tuple[float, float]:
    """FLOP/s of ``_ROWS`` rows by a matrix in float32, or quantized with float32 scales.

    Usual and best of ``SECONDS`` of products, for other programs may take a part of the processor.
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


def _rate(run: Any) -> tuple[float, float]:
    mx.eval(run())  # the first one does not count
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < LEAST:
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    flops = 2.0 * _ROWS * _WIDTH * _WIDTH
    return flops / median(times), flops / min(times)
