"""A GGUF file to an MLX model folder: all of it or nothing."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uma.checkpoint import Progress
from uma.checkpoint.gguf import GGUFHeader
from uma.checkpoint.gguf_split import files_of_model, read_model
from uma.checkpoint.lock import locked
from uma.errors import CheckpointError, StorageError, UsageError
from uma.quantization import Quantization
from uma.runtime.gguf.config import ModelConfig, model_config
from uma.runtime.gguf.metadata import Metadata
from uma.runtime.gguf.shapes import require_shapes
from uma.runtime.gguf.tensors import FLOAT_TYPES, Conversion, InexactBias
from uma.runtime.gguf.tokenizer import write_tokenizer
from uma.runtime.gguf.vocabulary import Vocabulary, read_vocabulary
from uma.runtime.gguf.weights import (
    model_dtype,
    plan,
    quantization_config,
    rotary_tables,
    safetensors_header,
    write_safetensors,
)

CONVERSION_VERSION = 1
"""Part of the cache key: raise it when the same file would give another folder."""

SPARE_BYTES = 64 << 20
"""Left free on the disk beside the weights: tokenizer files, and room for others."""


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What ``convert`` wrote: the folder, the bytes of its weights, and what to tell the user."""

    folder: Path
    model_type: str
    dtype: str
    size_bytes: int
    num_tensors: int
    num_exact: int
    notes: tuple[str, ...]


def convert(
    gguf_path: Path,
    out_dir: Path,
    *,
    quantization: Quantization | None = None,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the model of a GGUF file to ``out_dir`` as mlx-lm loads it.

    It is made in a hidden folder beside ``out_dir``, which only a killed process leaves behind.

    Args:
        quantization: See ``weights.plan``.
        progress: Called with the bytes of weights written and to be written.

    Raises:
        UsageError: ``out_dir`` exists.
        CheckpointError, UnsupportedModel: The file is broken, or not of a kind that is converted.
        StorageError: The folder cannot be written, or the disk has no room for it.
    """
    if os.path.exists(out_dir):  # unlike Path.exists, false for a name that no file can have
        raise UsageError(f"{out_dir} exists; give a folder that does not")
    header = read_model(gguf_path)
    with _storage_errors(out_dir):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = out_dir.parent / f".{out_dir.name[:80]}.{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            report = _write_folder(header, temporary, out_dir, quantization, progress)
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            os.rename(temporary, out_dir)
            _sync(out_dir.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return report


def planned_config(
    header: GGUFHeader, quantization: Quantization | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config.json`` of the folder that ``convert`` would write, from the header alone; notes."""
    config = _model_config(header)
    dtype = model_dtype(header, config.model_type)
    layers = config.fields["num_hidden_layers"]
    conversions = plan(header, config.model_type, layers, dtype, quantization)
    fields = config.fields | {"torch_dtype": dtype}
    if (stored := quantization_config(conversions)) is not None:
        fields["quantization"] = stored
    return fields, (*config.notes, *_notes(conversions, dtype, quantization))


def _model_config(header: GGUFHeader) -> ModelConfig:
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    return model_config(Metadata(header.metadata), shapes, rotary_tables(header))


def _write_folder(
    header: GGUFHeader,
    folder: Path,
    out_dir: Path,
    quantization: Quantization | None,
    progress: Progress | None,
) -> ConversionReport:
    config = _model_config(header)
    require_shapes(header, config.fields)
    vocabulary = read_vocabulary(header, Metadata(header.metadata))
    if len(vocabulary.tokens) > config.fields["vocab_size"]:
        raise CheckpointError(
            f"{len(vocabulary.tokens)} tokens for {config.fields['vocab_size']} embeddings"
        )
    dtype = model_dtype(header, config.model_type)
    conversions, size = _write_weights(header, folder, config, dtype, quantization, progress)
    _write_json(folder / "config.json", _config_fields(config, vocabulary, conversions, dtype))
    _write_json(folder / "generation_config.json", _token_ids(vocabulary))
    write_tokenizer(vocabulary, folder, config.fields["max_position_embeddings"])
    return ConversionReport(
        folder=out_dir,
        model_type=config.model_type,
        dtype=dtype,
        size_bytes=size,
        num_tensors=len(conversions),
        num_exact=sum(conversion.form == "exact" for conversion in conversions),
        notes=(*config.notes, *_notes(conversions, dtype, quantization)),
    )


def _write_weights(
    header: GGUFHeader,
    folder: Path,
    config: ModelConfig,
    dtype: str,
    quantization: Quantization | None,
    progress: Progress | None,
) -> tuple[tuple[Conversion, ...], int]:
    """``model.safetensors``, begun again when a tensor turns out to need float32 scales."""
    fields = config.fields
    heads = {
        "query rows": fields["num_attention_heads"],
        "key rows": fields["num_key_value_heads"],
    }
    wide: frozenset[str] = frozenset()
    while True:
        layers = fields["num_hidden_layers"]
        conversions = plan(header, config.model_type, layers, dtype, quantization, wide)
        _require_space(folder, safetensors_header(conversions)[1])
        path = folder / "model.safetensors"
        try:
            return conversions, write_safetensors(path, header, conversions, heads, progress)
        except InexactBias as error:
            wide |= {str(error)}
            path.unlink()


def _require_space(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size_bytes + SPARE_BYTES:
        raise StorageError(
            f"the converted model needs {size_bytes:,} bytes and {free:,} are free in "
            f"{folder.parent}; free some, or give another folder"
        )


def _config_fields(
    config: ModelConfig, vocabulary: Vocabulary, conversions: tuple[Conversion, ...], dtype: str
) -> dict[str, Any]:
    fields = config.fields | _token_ids(vocabulary) | {"torch_dtype": dtype}
    if (quantization := quantization_config(conversions)) is not None:
        fields["quantization"] = quantization
    return fields


def _token_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    ids: dict[str, Any] = {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": list(vocabulary.stop_ids),
        "pad_token_id": vocabulary.pad_id,
    }
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _notes(
    conversions: tuple[Conversion, ...], dtype: str, asked: Quantization | None
) -> list[str]:
    """What was not kept exactly, or was in spite of what was asked: a line for each form."""
    notes = []
    if asked is not None:
        other = [
            c for c in conversions if c.form == "exact" and c.quantization not in (None, asked)
        ]
        if other:
            why = "more bits would add nothing" if _bits(other[0]) < asked.bits else "without loss"
            notes.append(f"{len(other)} matrices kept as {other[0].quantization}: {why}")
    for form, verb in (("quantized", "dequantized, then quantized to"), ("float", "stored as")):
        changed: dict[tuple[str, str], int] = {}
        for c in conversions:
            kept = FLOAT_TYPES.get(c.source.type) == c.dtype and c.quantization is None
            if c.form == form and len(c.source.dims) > 1 and not kept:
                q = c.quantization
                what = f"{q.mode} {q.bits} bits, groups of {q.group_size}" if q else dtype
                changed[c.source.type, what] = changed.get((c.source.type, what), 0) + 1
        for (source, what), count in changed.items():
            notes.append(f"{count} matrices of {source} {verb} {what}")
    return notes


def _bits(conversion: Conversion) -> int:
    return conversion.quantization.bits if conversion.quantization else 16


def converted_folder(
    gguf_path: Path,
    cache_dir: Path,
    *,
    quantization: Quantization | None = None,
    progress: Progress | None = None,
) -> Path:
    """The model of a GGUF file as a folder in ``cache_dir``, converted if it is not there yet.

    A folder that exists is complete, for it was renamed into place after all of it was on the
    disk. Of two processes one converts and the other waits; what a killed one left is removed.

    Raises:
        See ``convert``.
    """
    name = _cache_name(gguf_path, quantization)
    folder = cache_dir / name
    if folder.is_dir():
        return folder
    with locked(cache_dir / f".{name}.lock"):
        if not folder.is_dir():
            for left in cache_dir.glob(f".{name}.*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
            convert(gguf_path, folder, quantization=quantization, progress=progress)
    return folder


def _cache_name(gguf_path: Path, quantization: Quantization | None) -> str:
    """A name that changes with the files' sizes, times or first MiB, the format asked, our code."""
    digest = hashlib.sha256()
    try:
        for path in files_of_model(gguf_path):
            status = path.stat()
            with open(path, "rb") as file:
                digest.update(file.read(1 << 20))
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    except OSError as error:
        raise CheckpointError(f"{gguf_path} cannot be read: {error.strerror}") from None
    digest.update(f"{quantization} {CONVERSION_VERSION}".encode())
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", gguf_path.stem)[:60].lstrip(".")
    return f"{stem}-{digest.hexdigest()[:16]}"


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
