"""The forms of a matrix in MLX, one module at a time: quantized, dense, float32."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from uma.quantization import Quantization

Convert = Callable[[str, nn.Module], nn.Module]
"""From a module's path and the module to the one that takes its place."""

_SLICE_ELEMENTS = 1 << 15
_UNPACKED_ELEMENTS = 1_000_000


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules without modules inside, by path, in the order of the model."""
    found: list[tuple[str, nn.Module]] = tree_flatten(
        model.leaf_modules(), is_leaf=nn.Module.is_module
    )
    return found


def form_name(model: nn.Module) -> str:
    """The number formats of a model's matrices, the one that holds most bytes first."""
    sizes: dict[str, int] = {}
    for module in dict(leaves(model)).values():
        if (found := matrix_format(module)) is not None:
            sizes[found[0]] = sizes.get(found[0], 0) + found[1]
    return form_of(sizes)


def matrix_format(module: Any) -> tuple[str, int] | None:
    """The number format of a module's matrix and its bytes; ``None`` if it holds no matrix."""
    weight = module.get("weight")
    if weight is None or weight.ndim < 2:
        return None
    bits = getattr(module, "bits", None)
    if bits is not None:
        return f"{getattr(module, 'mode', 'affine')} {bits}/{module.group_size}", weight.nbytes
    return str(weight.dtype).removeprefix("mlx.core."), weight.nbytes


def form_of(sizes: dict[str, int]) -> str:
    """The formats of ``sizes`` (bytes by format) in one line, the largest first."""
    return " + ".join(sorted(sizes, key=sizes.__getitem__, reverse=True)) or "no matrices"


def quantizer(model: nn.Module, quantization: Quantization) -> Convert:
    """Quantize what ``mlx_lm.utils.quantize_model`` (0.32.2) quantizes, and as it does."""
    predicate = getattr(model, "quant_predicate", None)

    def convert(path: str, module: nn.Module) -> nn.Module:
        module = as_dense(module, None)
        if not hasattr(module, "to_quantized"):
            return module
        if module.weight.shape[-1] % quantization.group_size != 0:
            return module
        verdict = True if predicate is None else predicate(path, module)
        if not verdict:
            return module
        return as_quantized(
            module, verdict if isinstance(verdict, dict) else quantization.to_config()
        )

    return convert


def as_quantized(module: Any, options: dict[str, Any]) -> Any:
    """The module quantized; in slices of rows where MLX's CPU backend would take 20 times the size.

    It composes mxfp4, mxfp8 and nvfp4 from array operations (mlx 0.32.4, ``ops.cpp``,
    ``fp_quantize``); rows do not depend on each other.
    """
    new = module.to_quantized(**options)
    rows = _SLICE_ELEMENTS // module.weight.shape[-1] + 1
    flat = module.weight.reshape(-1, module.weight.shape[-1])
    if options.get("mode", "affine") == "affine" or mx.default_device() == mx.gpu:
        return new
    if options.get("global_scale") or flat.shape[0] <= rows:
        return new
    parts = []
    for start in range(0, flat.shape[0], rows):
        parts.append(mx.quantize(flat[start : start + rows], **options))
        mx.eval(parts[-1])
    for name, pieces in zip(("weight", "scales"), zip(*parts, strict=True), strict=True):
        setattr(new, name, mx.concatenate(list(pieces)).reshape(new[name].shape))
    return new


def to_float32(_: str, module: nn.Module) -> nn.Module:
    """The module with every parameter in float32, quantized matrices dequantized."""
    module = as_dense(module, mx.float32)
    module.set_dtype(mx.float32)
    if mx.default_device() == mx.cpu and type(module) in _OF_ONE_TOKEN:
        module.__class__ = _OF_ONE_TOKEN[type(module)]
    return module


class ColumnLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that takes one token's input as a column.

    MLX calls BLAS's matrix product for any shape (mlx 0.32.4, ``backend/cpu/gemms/cblas.cpp``).
    OpenBLAS copies a matrix into an order of its own before it multiplies, except a small one of
    at most 10^6 elements that meets a column (0.3.31, ``sgemm_small_kernel_permit_skylakex.c``).
    The head of SmolLM2-135M (49,152 x 576) streams at 5.9 GB/s with one row, at 5.4 with one
    column and at 12 in slices of that size (one thread of an AMD EPYC, Zen 4): the speed of decode.
    """

    def __call__(self, x: Any) -> Any:
        if x.size != x.shape[-1]:
            return super().__call__(x)
        y = _by_column(self.weight, x)
        return y + self.bias if "bias" in self else y


class ColumnEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding whose use as the head takes one token's input as a column."""

    def as_linear(self, x: Any) -> Any:
        return super().as_linear(x) if x.size != x.shape[-1] else _by_column(self.weight, x)


class ProductRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """A norm that takes the mean square of one token by a product of matrices.

    MLX's CPU backend composes the norm of twelve operations (mlx 0.32.4, ``fast.cpp``, the
    fallback of ``rms_norm``); the product takes the place of square, mean and addition.
    """

    def __call__(self, x: Any) -> Any:
        dims = x.shape[-1]
        if x.size != dims:
            return super().__call__(x)
        row = x.reshape(1, dims)
        return (
            x * mx.rsqrt(mx.addmm(_matrix_of(self.eps), row, row.T, alpha=1 / dims)) * self.weight
        )


@functools.cache
def _matrix_of(number: float) -> Any:
    return mx.array([[number]])


def _by_column(weight: Any, x: Any) -> Any:
    rows, column = max(1, _UNPACKED_ELEMENTS // weight.shape[1]), x.reshape(-1, 1)
    if weight.shape[0] <= rows:
        y = weight @ column
    else:
        slices = mx.split(weight, list(range(rows, weight.shape[0], rows)))
        y = mx.concatenate([part @ column for part in slices])
    return y.reshape(*x.shape[:-1], -1)


_OF_ONE_TOKEN: dict[type, type] = {
    nn.Linear: ColumnLinear,
    nn.Embedding: ColumnEmbedding,
    nn.RMSNorm: ProductRMSNorm,
}


def as_dense(module: Any, dtype: mx.Dtype | None) -> Any:
    """A quantized module as its full-precision class with equal values; others unchanged."""
    dense: Any = next((new for old, new in _dense_classes() if type(module) is old), None)
    if dense is None:
        return module
    scales, biases = module.scales, module.get("biases")
    if dtype is not None and module.mode == "affine":
        scales, biases = scales.astype(dtype), biases.astype(dtype)
    extra = {"global_scale": module.global_scale} if module.get("global_scale") is not None else {}
    new = dense.__new__(dense)
    nn.Module.__init__(new)
    new.weight = mx.dequantize(
        module.weight,
        scales,
        biases,
        module.group_size,
        module.bits,
        module.mode,
        dtype=dtype,
        **extra,
    )
    if "bias" in module:
        new.bias = module.bias
    return new


def _dense_classes() -> Iterator[tuple[type, type]]:
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    yield nn.QuantizedLinear, nn.Linear
    yield nn.QuantizedEmbedding, nn.Embedding
    yield QuantizedSwitchLinear, SwitchLinear
    yield QuantizedMultiLinear, MultiLinear
