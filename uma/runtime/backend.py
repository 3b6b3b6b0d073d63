"""Which form of the weights is fast on MLX's CPU backend, found by timing it.

On the CPU the cost of a product depends on its dtype above all: on 2 cores of an AMD EPYC (Zen 4)
a 4-bit matrix of 576x1536 by a vector took 26.8 ms with float16 scales, 6.2 with bfloat16, 0.8
with float32, and 0.2 dequantized to float32 under OpenBLAS. On Metal the stored form is the fast
one and nothing is timed.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from uma.plan.forms import FormKind
from uma.quantization import Quantization
from uma.workload import Backend

_SIZE = 512  # of the matrix that is timed; float16, the slowest, takes about 10 ms


def backend() -> Backend:
    """Where MLX computes by default."""
    return "metal" if mx.default_device() == mx.gpu else "cpu"


def form_rates(
    quantization: Quantization | None, dtype: str, *, experts: bool = False
) -> dict[FormKind, float]:
    """Seconds that a million weights take for a vector, in each form that a model could take here.

    ``quantization`` and ``dtype`` are what it is stored in. A form that the backend cannot run is
    left out: MLX's CPU backend multiplies the stacked matrices of ``experts`` only in float32 (mlx
    0.32.4, ``GatherMM::eval_cpu``). On Metal there is only ``stored``, not timed. Takes less than
    0.1 s.
    """
    if backend() == "metal":
        return {"stored": 0.0}
    stored = getattr(mx, dtype)
    rates: dict[FormKind, float] = {}
    if quantization is not None:
        rates["stored"] = _quantized_rate(quantization, stored)
        rates["float32_scales"] = _quantized_rate(quantization, mx.float32)
    elif not experts or stored == mx.float32:
        rates["stored"] = _dense_rate(stored)
    rates["float32"] = _dense_rate(mx.float32)
    return rates


def _quantized_rate(quantization: Quantization, dtype: mx.Dtype) -> float:
    q = quantization
    options: dict[str, Any] = {"group_size": q.group_size, "bits": q.bits, "mode": q.mode}
    packed = mx.quantize(mx.ones((_SIZE, _SIZE), dtype), **options)
    x = mx.ones((1, _SIZE), dtype)
    mx.eval(x, packed)
    return _rate(lambda: mx.quantized_matmul(x, *packed, transpose=True, **options))


def _dense_rate(dtype: mx.Dtype) -> float:
    x, w = mx.ones((1, _SIZE), dtype), mx.ones((_SIZE, _SIZE), dtype)
    mx.eval(x, w)
    return _rate(lambda: x @ w.T)


def _rate(run: Callable[[], mx.array]) -> float:
    """Seconds for a million weights: the faster of two timings after one that does not count."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e6 / _SIZE**2
