"""Which form of the weights is fast on MLX's CPU backend, found by timing it.

On the CPU the cost of a product depends on its dtype above all: on 2 cores of an AMD EPYC (Zen 4)
a 4-bit matrix of 576x1536 by a vector took 26.8 ms with float16 scales, 6.2 with bfloat16, 0.8
with float32, and 0.2 dequantized to float32 under OpenBLAS. On Metal the stored form is the fast
one and nothing is timed.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from uma.quantization import Quantization
from uma.workload import Backend

Form = Literal["stored", "float32_scales", "float32"]
"""As stored; quantized with scales, norms and activations in float32; all in float32."""


@dataclass(frozen=True, slots=True)
class FormRate:
    """Seconds that one million weights take: for a vector, and for each of a block of vectors."""

    decode_s: float
    prefill_s: float


def backend() -> Backend:
    """Where MLX computes by default."""
    return "metal" if mx.default_device() == mx.gpu else "cpu"


def form_rates(
    quantization: Quantization | None, dtype: str, *, experts: bool = False
) -> dict[Form, FormRate]:
    """Time the forms that a model stored in ``quantization`` and ``dtype`` could take here.

    A form that the backend cannot run is left out: MLX's CPU backend multiplies the stacked
    matrices of ``experts`` only in float32 (mlx 0.32.4, ``GatherMM::eval_cpu``). On Metal there is
    only ``stored``, not timed. Takes less than 0.1 s.
    """
    if backend() == "metal":
        return {"stored": FormRate(0.0, 0.0)}
    stored = getattr(mx, dtype)
    rates: dict[Form, FormRate] = {}
    if quantization is not None:
        rates["stored"] = _quantized_rate(quantization, stored)
        rates["float32_scales"] = _quantized_rate(quantization, mx.float32)
    elif not experts or stored == mx.float32:
        rates["stored"] = _dense_rate(stored)
    rates["float32"] = _dense_rate(mx.float32)
    return rates


def fastest_form(rates: dict[Form, FormRate], allowed: Collection[Form]) -> Form:
    """Of the allowed forms the one that decodes fastest; ``stored`` unless another is 1.2x faster.

    Raises:
        ValueError: If none of them can run.
    """
    times = {form: rates[form].decode_s for form in rates if form in allowed}
    if not times:
        raise ValueError(f"none of {sorted(allowed)} can run here; possible: {sorted(rates)}")
    best = min(times, key=times.__getitem__)
    if "stored" in times and times["stored"] <= 1.2 * times[best]:
        return "stored"
    return best


def _quantized_rate(quantization: Quantization, dtype: mx.Dtype) -> FormRate:
    q = quantization
    options: dict[str, Any] = {"group_size": q.group_size, "bits": q.bits, "mode": q.mode}

    def product(rows: int, size: int) -> Callable[[], mx.array]:
        packed = mx.quantize(mx.ones((size, size), dtype), **options)
        x = mx.ones((rows, size), dtype)
        mx.eval(x, packed)
        return lambda: mx.quantized_matmul(x, *packed, transpose=True, **options)

    return _rate(product)


def _dense_rate(dtype: mx.Dtype) -> FormRate:
    def product(rows: int, size: int) -> Callable[[], mx.array]:
        x, w = mx.ones((rows, size), dtype), mx.ones((size, size), dtype)
        mx.eval(x, w)
        return lambda: x @ w.T

    return _rate(product)


def _rate(product: Callable[[int, int], Callable[[], mx.array]]) -> FormRate:
    # A vector by 512x512 and 8 by 256x256: float16, the slowest, takes about 10 ms for each.
    return FormRate(
        decode_s=_seconds(product(1, 512)) * (1e6 / 512**2),
        prefill_s=_seconds(product(8, 256)) * (1e6 / 256**2) / 8,
    )


def _seconds(run: Callable[[], mx.array]) -> float:
    """The faster of two timings after a first run that does not count."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])
