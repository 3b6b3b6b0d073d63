"""Number formats of weights in the words of CUDA engines, and the bytes of a model in each.

The formats are rows of ``uma/data/quantization_schemes.csv``, each with its source. All of them
leave embeddings, the head, norms, biases, convolutions and routers in 16 bits.
"""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from uma.architecture.layers import Architecture, LatentAttention, Layer, Parameter
from uma.architecture.remembered import remembered
from uma.errors import UnknownName
from uma.frozen import dataclass
from uma.memory.term import MemoryTerm

SCHEMES = Path(__file__).parent.parent / "data" / "quantization_schemes.csv"

# Names of the same formats in configs and on the hub.
ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "bitsandbytes": "nf4",
    "bnb-4bit": "nf4",
    "nf4-dq": "nf4-double",
    "bnb-8bit": "int8",
    "llm.int8": "int8",
    "gptq-int4": "gptq",
    "awq-int4": "awq",
    "compressed-tensors": "compressed-tensors-w4a16",
    "w4a16": "compressed-tensors-w4a16",
    "w8a8": "compressed-tensors-w8a8",
    "fp8-dynamic": "compressed-tensors-fp8",
    "nvfp4": "compressed-tensors-nvfp4",
}

# Last parts of the names of matrices that choose experts (mlx-lm's modules); in transformers they
# are bare parameters, which no quantizer replaces, and checkpoints list them as not to convert.
ROUTERS = (".gate", ".router", ".router.proj", ".router.gate", ".gate.proj")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix of ``[rows, columns]`` is stored.

    A scale stands for ``group_rows`` rows by ``group_size`` columns, or for ``group_size``
    elements of the flat matrix where ``group_rows`` is 0. With ``nested_group`` the scales have a
    float32 of their own for so many of them. ``row_bytes``, ``column_bytes`` and ``matrix_bytes``
    come once a row, a column, a matrix. What is not converted takes ``rest_bytes`` an element.
    """

    name: str
    bits: int
    group_size: int
    group_rows: int
    scale_bytes: int
    nested_group: int
    zero_bits: int
    row_bytes: int
    column_bytes: int
    matrix_bytes: int
    rest_bytes: int
    parts: frozenset[str]
    source: str

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of one matrix with its scales, zeros and tables; incomplete groups count whole."""
        size = _ceil(rows * columns * self.bits, 8)
        size += rows * self.row_bytes + columns * self.column_bytes + self.matrix_bytes
        if not self.group_size:
            return size
        if self.group_rows:
            groups = _ceil(rows, self.group_rows) * _ceil(columns, self.group_size)
        else:
            groups = _ceil(rows * columns, self.group_size)
        size += groups * self.scale_bytes + _ceil(groups * self.zero_bits, 8)
        return size + (4 * _ceil(groups, self.nested_group) if self.nested_group else 0)


@dataclass(frozen=True, slots=True)
class Matrix:
    """``count`` equal matrices of one parameter, which is a ``linear`` layer or ``experts``."""

    rows: int
    columns: int
    part: str
    count: int = 1


@cache
def schemes() -> dict[str, Scheme]:
    """Every format by name."""
    lines = SCHEMES.read_text(encoding="utf-8").splitlines()
    return {row["scheme"]: _scheme(row) for row in csv.DictReader(lines[1:])}


def _scheme(row: dict[str, str]) -> Scheme:
    sizes = {
        key: int(value or 0)
        for key, value in row.items()
        if key not in ("scheme", "parts", "source")
    }
    return Scheme(
        name=row["scheme"], parts=frozenset(row["parts"].split("|")), source=row["source"], **sizes
    )


def scheme_named(name: str) -> Scheme:
    """The format that ``name`` means, in any case and by any of its names.

    Raises:
        UnknownName: If it is not one of them.

    >>> scheme_named("GPTQ-Int4").bits
    4
    """
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    known = schemes()
    if key not in known:
        raise UnknownName(f"format {name!r} is not known here; known are {', '.join(known)}")
    return known[key]


@remembered
def weight_bytes(
    architecture: Architecture,
    scheme: Scheme,
    *,
    experts: bool = True,
    vocabulary_multiple: int = 1,
) -> int:
    """Bytes of all parameters: converted matrices in ``scheme``, the rest as it is.

    Experts that an engine cannot convert stay with the rest (``experts`` false). Embeddings and
    head have ``vocab_size`` rounded up to ``vocabulary_multiple`` rows.
    """
    parts = scheme.parts if experts else scheme.parts - {"experts"}
    padding = -architecture.vocab_size % vocabulary_multiple
    size = 0
    for parameter in architecture.parameters:
        size += _rest(parameter, scheme)
        if parameter.shape[0] == architecture.vocab_size:
            size += padding * parameter.size // parameter.shape[0] * scheme.rest_bytes
    for layer in architecture.layers:
        for parameter in layer.parameters:
            matrix = matrix_of(parameter, layer)
            if matrix is None or matrix.part not in parts:
                size += _rest(parameter, scheme)
            else:
                size += matrix.count * scheme.bytes_of(matrix.rows, matrix.columns)
    return size


def tower_terms(architecture: Architecture, dtype_bytes: int) -> tuple[MemoryTerm, ...]:
    """The vision tower, which both engines load with the text model and leave unquantized.

    Checkpoints list it as not to convert; formats that are made while loading may convert it.
    """
    size = (architecture.vision_parameters or 0) * dtype_bytes
    return (MemoryTerm("weights", size, "bound", "vision tower, unquantized"),) if size else ()


def _rest(parameter: Parameter, scheme: Scheme) -> int:
    return parameter.size * (4 if parameter.dtype == "float32" else scheme.rest_bytes)


def matrix_of(parameter: Parameter, layer: Layer) -> Matrix | None:
    """The matrix that a quantizer would convert; ``None`` for all that every scheme leaves.

    mlx-lm splits the projection of latents to heads into two stacks of heads (``embed_q``,
    ``unembed_out``); elsewhere its columns are the latent's width.
    """
    if parameter.kind != "matrix" or parameter.name.endswith(ROUTERS):
        return None
    if len(parameter.shape) == 2:
        return Matrix(*parameter.shape, "linear")
    for mixer in layer.mixers:
        if isinstance(mixer, LatentAttention) and ".self_attn." in parameter.name:
            columns = mixer.kv_lora_rank
            return Matrix(parameter.size // columns, columns, "linear")
    count, rows, columns = parameter.shape
    return Matrix(rows, columns, "experts", count)


def latent_matrices(architecture: Architecture) -> Iterator[int]:
    """Elements of each layer's projection from the cached latent to the heads."""
    for layer in architecture.layers:
        for mixer in layer.mixers:
            if isinstance(mixer, LatentAttention):
                heads = mixer.qk_nope_head_dim + mixer.v_head_dim
                yield mixer.kv_lora_rank * mixer.num_attention_heads * heads


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
