"""GGUF models in several files, as ``llama-gguf-split`` writes them (llama.cpp, gguf-split.cpp)."""

import re
from dataclasses import replace
from pathlib import Path

from uma.checkpoint.gguf import GGUFHeader, read_header
from uma.errors import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def files_of_model(path: Path) -> tuple[Path, ...]:
    """The files of the model that ``path`` is, or is one of, first to last.

    Raises:
        CheckpointError: If some are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    files = tuple(
        path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)
    )
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {count} files are missing: {', '.join(missing[:3])}"
        )
    return files


def read_model(path: Path) -> GGUFHeader:
    """The header of a model, the tensors of all its files in it.

    The metadata is that of the first file; the others have none but their number.

    Raises:
        CheckpointError: If a file is missing, broken, or of another model.
    """
    parts = tuple(read_header(file) for file in files_of_model(path))
    first = parts[0]
    count = first.metadata.get("split.count", 1)
    if count != len(parts) and (count, len(parts)) != (0, 1):
        raise CheckpointError(
            f"{path}: is one of {count} files, but its name says {len(parts)}; "
            "give back the names that the files had, or join them with llama-gguf-split --merge"
        )
    if len(parts) == 1:
        return first
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise CheckpointError(f"{part.file}: is not file {number + 1} of {count}")
    tensors = tuple(
        replace(tensor, part=number) for number, part in enumerate(parts) for tensor in part.tensors
    )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise CheckpointError(f"{path}: a tensor is in more than one of its {count} files")
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{path}: its files hold {len(tensors)} of {total} tensors")
    return replace(first, tensors=tensors, parts=parts)
