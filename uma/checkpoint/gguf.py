"""What a GGUF file holds, from its header: metadata, tensors, places. No tensor data is read.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little endian. Headers of strangers
have crashed or stalled other readers (llama.cpp #18674, #25378, #26690; ggml #1516; ollama #17042),
so every count and length is checked against the file and against a ceiling before it is used.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from uma.checkpoint.bounded_json import shown
from uma.errors import CheckpointError
from uma.quantization import GGUF_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # ggml, gguf.h, GGUF_DEFAULT_ALIGNMENT
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4  # ggml.h, GGML_MAX_DIMS

# Ceilings far above real files (Gemma 4: 262,144 tokens, 514,906 merges, a header of 16 MB).
MAX_HEADER_BYTES = 128 << 20
MAX_TEXT_BYTES = 32 << 20  # of all names and plain strings together
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 21  # in all arrays together

# ggml's type number (gguf 0.19, constants.py, GGMLQuantizationType)
TENSOR_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

STRING = 8
ARRAY = 9
_LENGTH = struct.Struct("<Q")
# number of a metadata type: name, letter of ``struct``
VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    STRING: ("string", ""),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array of the metadata, left in the file: ``read`` fetches its elements."""

    file: str
    key: str
    element_type: str
    length: int
    offset: int
    end: int

    def __len__(self) -> int:
        return self.length

    def read(self) -> list[Any]:
        """The elements: ``int``, ``float``, ``bool`` or ``str``.

        Raises:
            CheckpointError: If a string is not UTF-8, or the file changed meanwhile.
        """
        if self.length > MAX_STRINGS:
            raise CheckpointError(
                f"{self.file}: {shown(self.key)} has {self.length:,} elements, "
                f"more than the {MAX_STRINGS:,} that are read"
            )
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset)
                raw = file.read(self.end - self.offset)
            if self.element_type == "string":
                return [str(raw[a:b], "utf-8") for a, b in _string_spans(raw, self.length)]
            letter = next(c for name, c in VALUE_TYPES.values() if name == self.element_type)
            return list(struct.unpack(f"<{self.length}{letter}", raw))
        except (OSError, UnicodeDecodeError, struct.error) as error:
            raise CheckpointError(f"{self.file}: {shown(self.key)}: {error}") from None


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One stored array; ``dims`` are in ggml's order, the fastest first.

    ``offset`` counts from the start of the data; ``part`` numbers the file of a split model.
    """

    name: str
    dims: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int
    part: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """``dims`` in the order of numpy and MLX: the slowest first."""
        return self.dims[::-1]


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All of a file but its tensor data, which starts at byte ``data_offset``.

    ``parts`` are the headers of the files of a split model, of which this is the sum.
    """

    file: str
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: tuple[GGUFTensor, ...] = field(repr=False)
    alignment: int
    data_offset: int
    parts: "tuple[GGUFHeader, ...]" = field(default=(), repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, padding not counted."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def strings(self, key: str) -> list[str]:
        """The elements of the array of strings ``key``.

        Raises:
            CheckpointError: If there is none, or it has another type of element.
        """
        return self._array(key, "string")

    def integers(self, key: str) -> list[int]:
        """The elements of the array of integers ``key``, of any width.

        Raises:
            CheckpointError: If there is none, or it has another type of element.
        """
        return self._array(key, "int", "uint")

    def floats(self, key: str) -> list[float]:
        """The elements of the array of floats ``key``, of either width.

        Raises:
            CheckpointError: If there is none, or it has another type of element.
        """
        return self._array(key, "float")

    def _array(self, key: str, *prefixes: str) -> list[Any]:
        value = self.metadata.get(key)
        if isinstance(value, GGUFArray) and value.element_type.startswith(prefixes):
            return value.read()
        found = value.element_type if isinstance(value, GGUFArray) else type(value).__name__
        wanted = " or ".join(prefixes)
        raise CheckpointError(f"{self.file}: {key} must be an array of {wanted}, not {found}")


def read_header(path: str | Path) -> GGUFHeader:
    """The header of the GGUF file at ``path``.

    Raises:
        CheckpointError: If it is missing, cut, or breaks any rule of the format.
    """
    try:
        with open(path, "rb") as file:
            return _read_header(_Cursor(file, str(path)))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _string_spans(raw: bytes, count: int) -> Iterator[tuple[int, int]]:
    """Begin and end in ``raw`` of ``count`` strings, each after its length of eight bytes."""
    position = 0
    for _ in range(count):
        begin = position + 8
        position = begin + int.from_bytes(raw[position:begin], "little")
        yield begin, position


class _Cursor:
    """A place in the header of a file, and how much text it has read already."""

    def __init__(self, file: BinaryIO, what: str) -> None:
        self.file = file
        self.what = what
        self.file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.raw = bytearray()
        self.position = 0
        self.text_bytes = 0
        self.strings = 0

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.what}: {text}")

    def fill(self, end: int) -> None:
        """Have the file up to byte ``end`` in ``raw``."""
        if end > self.file_bytes:
            raise self.error("cut in the header, or not a GGUF file; download it again")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"a header above {MAX_HEADER_BYTES:,} bytes is not read")
        if end > len(self.raw):
            self.raw += self.file.read(max(end - len(self.raw), 1 << 20))
        if end > len(self.raw):
            raise self.error("the file became shorter while it was read")

    def number(self, letter: str) -> Any:
        """The next number, of the type that ``letter`` is in ``struct``."""
        end = self.position + struct.calcsize(f"<{letter}")
        self.fill(end)
        (value,) = struct.unpack_from(f"<{letter}", self.raw, self.position)
        self.position = end
        return value

    def text(self, errors: str = "strict") -> str:
        """The next string; with ``errors`` of ``replace`` it need not be UTF-8."""
        length = self.number("Q")
        self.text_bytes += length
        if self.text_bytes > MAX_TEXT_BYTES:
            raise self.error(f"more than {MAX_TEXT_BYTES:,} bytes of names and text")
        end = self.position + length
        self.fill(end)
        begin, self.position = self.position, end
        try:
            return self.raw[begin:end].decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.error(f"a name is not UTF-8: {error.reason}") from None

    def skip_strings(self, count: int) -> None:
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.error(f"more than {MAX_STRINGS:,} strings in arrays")
        position = self.position
        for _ in range(count):
            if position + 8 > len(self.raw):
                self.fill(position + 8)
            position += 8 + _LENGTH.unpack_from(self.raw, position)[0]
        self.fill(position)
        self.position = position


def _read_header(cursor: _Cursor) -> GGUFHeader:
    cursor.fill(4)
    if cursor.raw[:4] != MAGIC:
        raise cursor.error("not a GGUF file: it does not start with GGUF")
    cursor.position = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise cursor.error(f"a {kind} GGUF; versions 2 and 3, little endian, are read")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
        raise cursor.error(
            f"{num_tensors:,} tensors and {num_keys:,} keys; "
            f"at most {MAX_TENSORS:,} and {MAX_KEYS:,} are read"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise cursor.error(f"the key {shown(key)} occurs twice")
        metadata[key] = _value(cursor, key)
    tensors = tuple(_tensor(cursor) for _ in range(num_tensors))
    alignment = _alignment(cursor, metadata)
    data_offset = -(-cursor.position // alignment) * alignment
    _check_layout(cursor, tensors, alignment, data_offset)
    return GGUFHeader(cursor.what, version, metadata, tensors, alignment, data_offset)


def _value(cursor: _Cursor, key: str) -> Any:
    """The value of ``key``: a number, a string, or a ``GGUFArray``."""
    number = cursor.number("I")
    if number == STRING:
        return cursor.text("replace")
    if number == ARRAY:
        return _array(cursor, key)
    if number not in VALUE_TYPES:
        raise cursor.error(f"{shown(key)} has the unknown type {number}")
    return cursor.number(VALUE_TYPES[number][1])


def _array(cursor: _Cursor, key: str) -> GGUFArray:
    number, length = cursor.number("I"), cursor.number("Q")
    if number not in VALUE_TYPES:
        kind = "arrays" if number == ARRAY else f"the unknown type {number}"
        raise cursor.error(f"{shown(key)} is an array of {kind}")
    name, letter = VALUE_TYPES[number]
    offset = cursor.position
    if number == STRING:
        cursor.skip_strings(length)
    else:
        cursor.position += length * struct.calcsize(f"<{letter}")
        cursor.fill(cursor.position)
    return GGUFArray(cursor.what, key, name, length, offset, cursor.position)


def _tensor(cursor: _Cursor) -> GGUFTensor:
    """One entry of the list of tensors, checked by itself."""
    name = cursor.text()
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {shown(name)} has {num_dims} dimensions; 1 to {MAX_DIMS}")
    dims = tuple(cursor.number("Q") for _ in range(num_dims))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in TENSOR_TYPES:
        known = ", ".join(TENSOR_TYPES.values())
        raise cursor.error(f"tensor {shown(name)} has the unknown type {number}; known: {known}")
    type_name = TENSOR_TYPES[number]
    block, block_bytes = GGUF_TYPES[type_name]
    if not all(dims) or dims[0] % block:
        raise cursor.error(f"tensor {shown(name)} of type {type_name} cannot have dims {dims}")
    return GGUFTensor(name, dims, type_name, offset, prod(dims) // block * block_bytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment is {shown(str(alignment))}; "
            f"it must be a power of two up to {MAX_ALIGNMENT:,}"
        )
    return int(alignment)


def _check_layout(
    cursor: _Cursor, tensors: tuple[GGUFTensor, ...], alignment: int, data_offset: int
) -> None:
    """Names are unique; places are aligned, inside the file, and do not overlap."""
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise cursor.error("two tensors have the same name")
    data_bytes = cursor.file_bytes - data_offset
    position = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        end = tensor.offset + tensor.size_bytes
        if tensor.offset % alignment or tensor.offset < position:
            raise cursor.error(f"tensor {shown(tensor.name)} overlaps another, or is not aligned")
        if end > data_bytes:
            raise cursor.error(
                f"cut: tensor {shown(tensor.name)} ends at byte {end:,} of {data_bytes:,}; "
                "download it again"
            )
        position = end
