"""What a step reads of a model in an engine's format: the bytes of every parameter."""

from collections.abc import Iterator

from uma.architecture.layers import Architecture, parameters
from uma.engines.llama_cpp_weights import tensor_types
from uma.memory.reads import Stored, WeightReads, evenly_stored, weight_reads
from uma.memory.weights import Format, parameter_bytes
from uma.quantization import gguf_bytes


def mlx_reads(architecture: Architecture, quantization: Format) -> WeightReads:
    """Of weights as ``mlx_lm.convert`` stores them."""
    return weight_reads(architecture, mlx_stored(architecture, quantization))


def gguf_reads(architecture: Architecture, quant: str) -> WeightReads:
    """Of weights in one of llama.cpp's mixes.

    Raises:
        UnknownName: If llama.cpp has no such mix.
    """
    return weight_reads(architecture, gguf_stored(architecture, quant))


def even_reads(architecture: Architecture, weights_bytes: float) -> WeightReads:
    """Of weights of which only their size is known: every number in as many bits."""
    return weight_reads(architecture, evenly_stored(architecture, weights_bytes))


def mlx_stored(architecture: Architecture, quantization: Format) -> Iterator[Stored]:
    """Every parameter of the module in mlx-lm."""
    by_name = {parameter.name: parameter for parameter in parameters(architecture)}
    for one in evenly_stored(architecture, 0):
        size = parameter_bytes(by_name[one.name], quantization)
        yield Stored(one.name, one.layer, one.shape, size)


def gguf_stored(architecture: Architecture, quant: str) -> Iterator[Stored]:
    """Every tensor of the GGUF file."""
    for tensor, kind in tensor_types(architecture, quant):
        yield Stored(tensor.name, tensor.layer, tensor.shape, gguf_bytes(kind, tensor.shape))
