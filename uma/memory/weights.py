"""Bytes of a model's weights, to the byte, in the format that they are stored in."""

from collections.abc import Iterator

from uma.architecture.layers import Architecture, Parameter, parameters
from uma.memory.term import MemoryTerm
from uma.quantization import DTYPE_BYTES, Quantization, StoredQuantization

Format = Quantization | StoredQuantization | None


def parameter_quantization(parameter: Parameter, quantization: Format) -> Quantization | None:
    """The format that ``mlx_lm.convert`` gives a parameter; ``None`` is full precision.

    It quantizes a module that has a quantized form and whose last dimension is whole groups of
    the size asked for; the model's ``quant_predicate`` may refuse it or give it an affine format
    of its own (mlx-lm 0.32.2, ``utils.py``, ``quantize_model``). Weights that are stored already
    follow their own table instead.
    """
    if quantization is None or parameter.kind == "other" or not parameter.quantizable:
        return None
    if isinstance(quantization, StoredQuantization):
        stored = quantization.of(parameter.name)
        fits = stored is not None and parameter.shape[-1] % stored.group_size == 0
        return stored if fits else None
    if parameter.shape[-1] % quantization.group_size:
        return None
    if parameter.bits is not None:
        return Quantization(parameter.bits, parameter.group_size or 64, "affine")
    return quantization


def parameter_bytes(parameter: Parameter, quantization: Format, dtype_bytes: int = 2) -> int:
    """Bytes of one parameter with its scales and biases."""
    width = dtype_bytes if parameter.dtype == "model" else DTYPE_BYTES[parameter.dtype]
    chosen = parameter_quantization(parameter, quantization)
    if chosen is not None:
        return chosen.matrix_bytes(parameter.shape, width)
    return parameter.size * width


def tensor_bytes(
    architecture: Architecture, quantization: Format, dtype_bytes: int = 2
) -> Iterator[tuple[str, int]]:
    """Name and bytes of every parameter, scales and biases included."""
    for parameter in parameters(architecture):
        yield parameter.name, parameter_bytes(parameter, quantization, dtype_bytes)


def weight_bytes(
    architecture: Architecture, quantization: Format = None, dtype_bytes: int = 2
) -> MemoryTerm:
    """The term ``weights``: every parameter as ``mlx_lm.convert`` stores it."""
    if isinstance(quantization, StoredQuantization):  # which may go by names
        sizes = (size for _, size in tensor_bytes(architecture, quantization, dtype_bytes))
    else:
        sizes = (
            count * parameter_bytes(parameter, quantization, dtype_bytes)
            for some, count in architecture.counted_parameters
            for parameter in some
        )
    size = sum(sizes)
    return MemoryTerm("weights", size, "exact", f"catalog shapes x {_named(quantization)}")


def _named(quantization: Format) -> str:
    if quantization is None:
        return "full precision"
    if isinstance(quantization, StoredQuantization):
        return f"{quantization.default} of config.json"
    return str(quantization)
