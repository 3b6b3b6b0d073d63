"""What a safetensors file holds, from its header: names, dtypes, shapes, places. No data is read.

The format is that of https://github.com/huggingface/safetensors (README, "Format"): eight bytes of
header length, a JSON header, then the data, which the tensors cover without holes or overlaps.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from uma.checkpoint.bounded_json import MAX_BYTES, load_object, loads, shown
from uma.errors import CheckpointError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"  # what mlx-lm 0.32.2 loads (utils.py, load_model)
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
LENGTH_BYTES = 8
MAX_TENSORS = 1 << 17
MAX_DIMS = 16

# safetensors 0.8.0, tensor.rs, Dtype::bitsize
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored array; ``begin`` and ``end`` count bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """All of a file but its data, which starts at byte ``data_offset``."""

    file: str
    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    data_offset: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def header_length(first: bytes, file_bytes: int, what: str) -> int:
    """The length of the JSON header, from the first eight bytes of a file of ``file_bytes``.

    Raises:
        CheckpointError: If the file cannot hold it, or no honest header is so long.
    """
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{what}: cut, or not a safetensors file: {file_bytes:,} bytes cannot hold "
            f"a header of {length:,}; download it again"
        )
    if length > MAX_BYTES:
        raise CheckpointError(f"{what}: a header of {length:,} bytes is above {MAX_BYTES:,}")
    return length


def parse_header(raw: bytes, file_bytes: int, what: str) -> Header:
    """The header whose JSON text is ``raw``, of a file of ``file_bytes``.

    Raises:
        CheckpointError: If it breaks any rule of the format.
    """
    entries = loads(raw, what)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{what}: the header is not a JSON object")
    metadata = _metadata(entries.pop("__metadata__", {}), what)
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(f"{what}: {len(entries):,} tensors are above {MAX_TENSORS:,}")
    tensors = tuple(_tensor(name, entry, what) for name, entry in entries.items())
    data_offset = LENGTH_BYTES + len(raw)
    _check_layout(tensors, file_bytes - data_offset, what)
    return Header(what, tensors, metadata, data_offset)


def read_header(source: str | Path | BinaryIO) -> Header:
    """The header of a file, given by its path or opened for reading bytes.

    Raises:
        CheckpointError: If it is missing, cut, or breaks any rule of the format.
    """
    if not isinstance(source, str | Path):
        return _read_header(source, getattr(source, "name", "safetensors"))
    try:
        with open(source, "rb") as file:
            return _read_header(file, str(source))
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from None


def _read_header(file: BinaryIO, what: str) -> Header:
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = header_length(file.read(LENGTH_BYTES), file_bytes, what)
    return parse_header(file.read(length), file_bytes, what)


def _metadata(value: Any, what: str) -> dict[str, str]:
    if value is None:  # written by mlx 0.32.4, save_safetensors, without metadata
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(f"{what}: __metadata__ must map strings to strings")
    return value


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # a bool is no number here


def _tensor(name: str, entry: Any, what: str) -> Tensor:
    """One entry of the header, checked by itself."""
    try:
        name.encode()
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        begin, end = offsets
        known = len(shape) <= MAX_DIMS and all(map(_natural, (begin, end, *shape)))
    except (KeyError, TypeError, ValueError):
        known = False
    if not known or not isinstance(shape, list) or not isinstance(offsets, list):
        raise CheckpointError(f"{what}: the entry of tensor {shown(name)} is malformed")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{what}: tensor {shown(name)} has dtype {shown(str(dtype))}; "
            f"known: {', '.join(DTYPE_BITS)}"
        )
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{what}: tensor {shown(name)} has {end - begin:,} bytes, "
            f"which is not what {dtype} of {shown(str(shape))} takes"
        )
    return Tensor(name, dtype, tuple(shape), begin, end)


def _check_layout(tensors: Iterable[Tensor], data_bytes: int, what: str) -> None:
    """Each tensor begins where the one before it ends, and the last ends with the file."""
    position = 0
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.end > data_bytes:
            raise CheckpointError(
                f"{what}: cut: tensor {shown(tensor.name)} ends at byte {tensor.end:,} "
                f"of {data_bytes:,}; download it again"
            )
        if tensor.begin != position:
            kind = "overlaps another" if tensor.begin < position else "leaves a hole before it"
            raise CheckpointError(f"{what}: tensor {shown(tensor.name)} {kind}")
        position = tensor.end
    if position != data_bytes:
        raise CheckpointError(f"{what}: {data_bytes - position:,} bytes belong to no tensor")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of the model in ``folder``: what its index names, else ``WEIGHTS``.

    Raises:
        CheckpointError: If there are none, or shards are missing.
    """
    index = folder / INDEX
    if index.is_file():
        names = indexed_files(load_object(index), str(index))
    else:
        names = _all_shards(sorted(path.name for path in folder.glob(WEIGHTS)))
    if not names:
        raise CheckpointError(_no_weights(folder))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; download them"
        )
    return tuple(folder / name for name in names)


def _all_shards(found: list[str]) -> tuple[str, ...]:
    """``found``, or all files of the set that its numbered ones say they belong to."""
    match = _SHARD.fullmatch(found[0]) if found else None
    if match is None:
        return tuple(found)
    return tuple(
        f"{match[1]}-{i:05}-of-{match[3]}.safetensors" for i in range(1, int(match[3]) + 1)
    )


def indexed_files(index: dict[str, Any], what: str) -> tuple[str, ...]:
    """File names in the ``weight_map`` of an index, sorted; each must be a plain name.

    Raises:
        CheckpointError: If the map is malformed or names something outside the folder.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{what}: has no weight_map")
    names = {name if isinstance(name, str) else "" for name in weight_map.values()}
    for name in names:
        if not name.endswith(".safetensors") or not name.isprintable() or set(name) & set("/\\:"):
            raise CheckpointError(f"{what}: {shown(name)} is not the name of a safetensors file")
    return tuple(sorted(names))


def _no_weights(folder: Path) -> str:
    def first(*patterns: str) -> Path | None:
        return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)

    other = first("*.safetensors")
    if other is not None:
        return f"{folder}: has no {WEIGHTS} but {other.name}; use the Hugging Face or MLX layout"
    other = first("*.gguf")
    if other is not None:
        return f"{folder}: has no {WEIGHTS} but GGUF files; give one of them: {other}"
    other = first("*.bin", "*.pt", "*.pth", "*.pkl")
    if other is not None:
        return (
            f"{folder}: has only {other.name}, a format that can run code when it is read; "
            "use a repository with safetensors, or save the model as safetensors"
        )
    return f"{folder}: has no {WEIGHTS}; download the weights"


def headers_of_folder(folder: Path) -> tuple[Header, ...]:
    """The headers of all weight files of the model in ``folder``.

    Raises:
        CheckpointError: If a file is missing or malformed, or two files hold the same tensor.
    """
    headers = tuple(read_header(path) for path in weight_files(folder))
    seen: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in seen:
                raise CheckpointError(
                    f"tensor {shown(tensor.name)} is in both {seen[tensor.name]} "
                    f"and {header.file}; keep one set of weights in the folder"
                )
            seen[tensor.name] = header.file
    return headers
