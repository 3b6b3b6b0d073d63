"""Which form each tensor of a GGUF file gets, and the safetensors file that holds them."""

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.checkpoint import Progress
from uma.checkpoint.gguf import GGUFHeader, GGUFTensor
from uma.errors import CheckpointError
from uma.quantization import Quantization
from uma.runtime.gguf import tensors
from uma.runtime.gguf.names import NOT_WEIGHTS, Target, require_all, target
from uma.runtime.gguf.tensors import FLOAT_TYPES, LOSSLESS_BITS, Conversion

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_QUANTIZATION = Quantization(bits=4, group_size=64)
"""For types without a lossless form: the default of ``mlx_lm.convert -q`` (mlx-lm 0.32.2)."""


def model_dtype(header: GGUFHeader, model_type: str) -> str:
    """The dtype of scales, norms and activations that loses nothing, or least.

    The scales of Q4_0, Q4_1 and Q8_0 are float16, so they stay exact in float16; MLX computes in
    the wider of activation and scale dtype, so norms follow them. Gemma's activations exceed
    float16 (mlx-lm clips them in gemma3_text.py), so there the scales widen to float32.
    Where nothing exact is kept, bfloat16 has the range.
    """
    matrices = [tensor for tensor in header.tensors if len(tensor.dims) > 1]
    gemma = model_type.startswith("gemma")
    if any(tensor.type in LOSSLESS_BITS for tensor in matrices):
        return "float32" if gemma else "float16"
    types = {tensor.type for tensor in matrices if "ffn_gate_inp" not in tensor.name}
    if types <= FLOAT_TYPES.keys():
        dtypes = {FLOAT_TYPES[name] for name in types}
        if len(dtypes) == 1 and not (gemma and dtypes == {"float16"}):
            return dtypes.pop()
        return "float32" if "float32" in dtypes else "bfloat16"
    return "bfloat16"


def plan(
    header: GGUFHeader,
    model_type: str,
    num_hidden_layers: int,
    dtype: str,
    quantization: Quantization | None,
    wide: frozenset[str] = frozenset(),
) -> tuple[Conversion, ...]:
    """The form of each tensor, in the file's order.

    Args:
        quantization: For matrices that are not affine groups of 32 already; ``None`` keeps
            floats and gives the rest ``DEFAULT_QUANTIZATION``; 16 bits make all of them
            ``dtype``. Formats of no more bits than asked are kept: more would add nothing.
        wide: Tensors whose scales must be float32.

    Raises:
        UnsupportedModel, CheckpointError: See ``names``.
    """
    conversions = []
    for tensor in header.tensors:
        if (place := target(model_type, tensor.name, num_hidden_layers)) is not None:
            scale_dtype = "float32" if tensor.name in wide else dtype
            conversions.append(_conversion(tensor, place, scale_dtype, quantization))
    require_all(model_type, {c.target.name for c in conversions}, num_hidden_layers)
    return tuple(conversions)


def _conversion(
    tensor: GGUFTensor, place: Target, dtype: str, asked: Quantization | None
) -> Conversion:
    matrix = place.name.endswith(".weight") and len(tensor.dims) > 1
    bits = LOSSLESS_BITS.get(tensor.type)
    if matrix and bits is not None and (asked is None or bits <= asked.bits < 16):
        return Conversion(tensor, place, "exact", dtype, Quantization(bits, tensors.GROUP_SIZE))
    if asked is None and tensor.type not in FLOAT_TYPES:
        asked = DEFAULT_QUANTIZATION
    router = place.name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    if not matrix or router or asked is None or asked.bits == 16:
        return Conversion(tensor, place, "float", dtype)
    for group_size in (asked.group_size, *((32,) if asked.mode == "affine" else ())):
        if tensor.dims[0] % group_size == 0:
            fitting = replace(asked, group_size=group_size)
            return Conversion(tensor, place, "quantized", dtype, fitting)
    return Conversion(tensor, place, "float", dtype)


def quantization_config(conversions: Sequence[Conversion]) -> dict[str, Any] | None:
    """``quantization`` of ``config.json``: the commonest format, and the modules that differ.

    mlx-lm's ``load_model`` (utils.py, 0.32.2) reads a module's own entry before the default.
    """
    formats = {c.module: c.quantization for c in conversions if c.quantization is not None}
    if not formats:
        return None
    ((usual, _),) = Counter(formats.values()).most_common(1)
    config = usual.to_config()
    for module, own in formats.items():
        if own != usual:
            config[module] = own.to_config()
    return config


def rotary_tables(header: GGUFHeader) -> dict[str, list[float]]:
    """The values of the file's rotary tables, by tensor name."""
    tables = {}
    for tensor in header.tensors:
        if tensor.name in NOT_WEIGHTS:
            if tensor.type != "F32" or len(tensor.dims) != 1 or tensor.dims[0] > 4096:
                raise CheckpointError(f"{tensor.name} must be a short list of float32")
            values = mapped_rows(header, tensor).view("<f4")[0]
            if not all(0 < value < math.inf for value in values):
                raise CheckpointError(f"{tensor.name} has values that are not above 0")
            tables[tensor.name] = [float(value) for value in values]
    return tables


def mapped_rows(header: GGUFHeader, tensor: GGUFTensor) -> "npt.NDArray[Any]":
    """The bytes of ``tensor`` in the file, mapped: ``[product of leading dims, row bytes]``."""
    import numpy as np

    part = header.parts[tensor.part] if header.parts else header
    mapped = np.memmap(
        part.file,
        dtype=np.uint8,
        mode="r",
        offset=part.data_offset + tensor.offset,
        shape=(tensor.size_bytes,),
    )
    return mapped.reshape(math.prod(tensor.shape[:-1]), -1)


def safetensors_header(conversions: Sequence[Conversion]) -> tuple[bytes, int]:
    """The header of the file that holds ``conversions``, and the bytes of the data after it.

    Format: https://huggingface.co/docs/safetensors, section Format.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    position = 0
    for conversion in conversions:
        for piece in conversion.pieces():
            end = position + piece.size_bytes
            entries[piece.name] = {
                "dtype": tensors.SAFETENSORS_DTYPES[piece.dtype],
                "shape": piece.shape,
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, position


def write_safetensors(
    path: Path,
    header: GGUFHeader,
    conversions: Sequence[Conversion],
    num_heads: Mapping[str, int],
    progress: Progress | None = None,
) -> int:
    """Convert tensor by tensor into ``path``, flushed to the disk, and return its bytes.

    Args:
        num_heads: Heads by ``Change`` of rows.

    Raises:
        InexactBias: With the name of the tensor whose scales need float32.
    """
    head, total = safetensors_header(conversions)
    with open(path, "xb") as file:
        file.write(head)
        begin = len(head)
        for conversion in conversions:
            begin = _write(file, begin, header, conversion, num_heads)
            if progress is not None:
                progress(begin - len(head), total)
        file.flush()
        os.fsync(file.fileno())
    return begin


def _write(
    file: Any, begin: int, header: GGUFHeader, conversion: Conversion, num_heads: Mapping[str, int]
) -> int:
    """Write the arrays of ``conversion`` from byte ``begin`` on; return where the next begins."""
    places = []
    for piece in conversion.pieces():
        places.append(begin)
        begin += piece.size_bytes
    rows = mapped_rows(header, conversion.source)
    heads = num_heads.get(conversion.target.change, 1)
    try:
        for arrays in tensors.converted_chunks(conversion, rows, heads):
            for index, array in enumerate(arrays):
                file.seek(places[index])
                file.write(array.data)
                places[index] += array.nbytes
    except tensors.InexactBias:
        raise tensors.InexactBias(conversion.source.name) from None
    return begin
