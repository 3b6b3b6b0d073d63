"""Blocks of GGUF tensors as MLX arrays: bit for bit where MLX has the format, else requantized.

Block layouts: ggml-common.h of llama.cpp b11434 (``block_q4_0``, ``block_q4_1``, ``block_q8_0``),
the same as gguf.quants of gguf 0.19. MLX's affine format: ``w = scale * q + bias`` with q unsigned
and packed into uint32 from the lowest bits (mlx 0.32.4, ``mx.quantize``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from uma.checkpoint.gguf import GGUFTensor
from uma.quantization import DTYPE_BYTES, Quantization
from uma.runtime.gguf.names import Change, Target

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

GROUP_SIZE = 32
LOSSLESS_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""GGUF types that are an affine MLX format of group size 32, and the bits of it."""
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "uint8": "U8",
}
CHUNK_ELEMENTS = 1 << 23
"""Elements converted at a time: 32 MiB in float32, whatever the size of the tensor."""

Form = Literal["exact", "quantized", "float"]


class InexactBias(Exception):
    """A bias that float16 cannot hold: the tensor named needs float32 scales."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One array to be written: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        size = (DTYPE_BYTES | {"uint32": 4, "uint8": 1})[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one GGUF tensor becomes a parameter.

    ``exact`` keeps the blocks' integers and scales, ``quantized`` dequantizes and quantizes
    again, ``float`` dequantizes. ``dtype`` is that of the scales, or of the values.
    """

    source: GGUFTensor
    target: Target
    form: Form
    dtype: str
    quantization: Quantization | None = None

    @property
    def module(self) -> str:
        """Path of the module that owns the parameter."""
        return self.target.name.rpartition(".")[0]

    def pieces(self) -> tuple[Piece, ...]:
        """The arrays that this conversion yields, in order."""
        shape = self.source.shape
        if self.quantization is None:
            return (Piece(self.target.name, self.dtype, shape),)
        bits, group = self.quantization.bits, self.quantization.group_size
        affine, groups = self.quantization.mode == "affine", (*shape[:-1], shape[-1] // group)
        pieces = [
            Piece(self.target.name, "uint32", (*shape[:-1], shape[-1] * bits // 32)),
            Piece(f"{self.module}.scales", self.dtype if affine else "uint8", groups),
        ]
        if affine:
            pieces.append(Piece(f"{self.module}.biases", self.dtype, groups))
        return tuple(pieces)


def row_order(change: Change, num_rows: int, num_heads: int) -> "Array | None":
    """The GGUF row that each row of the parameter is, or ``None`` where rows keep their place.

    llama.cpp stores a head's rows (j, i), j of two halves, as (i, j), so that the two numbers
    that are rotated together lie side by side (conversion/llama.py, ``LlamaModel.permute``).
    """
    import numpy as np

    if change not in ("query rows", "key rows"):
        return None
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def exact_blocks(
    blocks: "Array", type_name: str, dtype: str = "float16"
) -> tuple["Array", "Array", "Array"]:
    """Packed integers, scales and biases of ``blocks``, shape ``[..., block bytes]`` of uint8.

    Q4_0 is ``d * (q - 8)``, Q4_1 ``d * q + m``, Q8_0 ``d * q`` with q signed: the biases are
    -8 d, m, and -128 d, which are powers of two times d and so exact unless they overflow.

    Raises:
        InexactBias: A float16 bias overflows.
    """
    import numpy as np

    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(dtype)
    if type_name == "Q4_1":
        biases = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(dtype)
    else:
        factor = {"Q4_0": -8, "Q8_0": -128}[type_name]
        with np.errstate(over="ignore"):
            biases = scales * scales.dtype.type(factor)
        if (np.isinf(biases) & ~np.isinf(scales)).any():
            raise InexactBias
    if type_name == "Q8_0":
        packed = np.ascontiguousarray(blocks[..., 2:]) ^ np.uint8(128)
    else:
        packed = _adjacent_nibbles(blocks[..., -16:])
    return packed.view("<u4"), scales, biases


def _adjacent_nibbles(quants: "Array") -> "Array":
    """Nibbles of 16 bytes in MLX's order: byte k holds elements 2k and 2k + 1.

    ggml holds element j in the low and element j + 16 in the high half of byte j.
    """
    import numpy as np

    even, odd = quants[..., 0::2], quants[..., 1::2]
    low = (even & 15) | (odd << 4)
    high = (even >> 4) | (odd & 240)
    return np.concatenate([low, high], axis=-1)


def converted_chunks(
    conversion: Conversion, rows: "Array", num_heads: int
) -> Iterator[tuple["Array", ...]]:
    """The arrays of ``conversion``, a few rows at a time and flattened to bytes.

    Args:
        rows: The tensor's bytes, shape ``[product of leading dims, bytes of a row]``.
        num_heads: Heads of queries or keys, for the change of their rows.

    Raises:
        InexactBias: See ``exact_blocks``.
    """
    columns = conversion.source.shape[-1]
    vector = len(conversion.source.shape) == 1
    order = row_order(conversion.target.change, columns if vector else rows.shape[0], num_heads)
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, rows.shape[0], step):
        if order is None or vector:
            chunk = rows[start : start + step]
        else:
            chunk = rows[order[start : start + step]]
        if conversion.form == "exact":
            name = conversion.source.type
            blocks = chunk.reshape(chunk.shape[0], columns // GROUP_SIZE, -1)
            yield exact_blocks(blocks, name, conversion.dtype)
            continue
        values = dequantized(chunk, conversion.source.type)
        if order is not None and vector:
            values = values[:, order]
        if conversion.target.change == "minus one":
            values = values - 1
        yield _stored(values, conversion)


def dequantized(rows: "Array", type_name: str) -> "Array":
    """``rows`` of bytes in float32, by the gguf package."""
    import gguf
    import numpy as np

    values = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return np.asarray(values, dtype=np.float32)


def _stored(values: "Array", conversion: Conversion) -> tuple["Array", ...]:
    """float32 ``values`` in the dtype of ``conversion``, quantized where it says so."""
    import mlx.core as mx
    import numpy as np

    array = mx.array(values).astype(getattr(mx, conversion.dtype))
    parts: list[Any] = [array]
    if (asked := conversion.quantization) is not None:
        parts = list(mx.quantize(array, asked.group_size, asked.bits, mode=asked.mode))
    views = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}  # numpy has no bfloat16
    return tuple(np.array(part.view(views[part.dtype.size])) for part in parts)
