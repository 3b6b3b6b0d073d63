"""A Hugging Face folder to an MLX one, quantized matrix by matrix and written shard by shard."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from uma.checkpoint import Progress
from uma.checkpoint.safetensors import INDEX
from uma.errors import StorageError
from uma.quantization import Quantization, quantization_of_config
from uma.runtime.forms import Convert, form_of, matrix_format, quantizer
from uma.runtime.load import materialize, open_model, open_tokenizer

SHARD_BYTES = 1 << 30
"""Converted matrices are held until they are so many bytes, then written and dropped."""


def convert_folder(
    folder: Path,
    out_dir: Path,
    *,
    quantization: Quantization | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the model of ``folder`` to ``out_dir``, whole or not at all; what was written.

    Without ``quantization`` the numbers stay as they are stored. In memory are at most a shard of
    the result (``SHARD_BYTES``, or one matrix), and one matrix with its source.

    Raises:
        StorageError: If the disk has no room, or the folder cannot be written.
        CheckpointError, UnsupportedModel: As ``uma.runtime.load.load``.
    """
    model, config = open_model(folder)
    stored = None if quantization is None else quantization_of_config(config)
    convert: list[Convert] = [] if quantization is None else [quantizer(model, quantization)]
    parent = out_dir.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name[:80]}.", dir=parent))
        try:
            shards = Shards(temporary)
            materialize(model, folder, [*convert, shards.take], progress)
            shards.finish(model)
            write_others(folder, temporary, model, _config(config, quantization, shards))
            temporary.chmod(0o755)
            temporary.rename(out_dir)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{out_dir} cannot be written: {error.strerror or error}") from error
    return {
        "folder": str(out_dir),
        "model_type": config.get("model_type"),
        "form": form_of(shards.format_bytes),
        "size_bytes": sum(shards.sizes),
        "notes": [] if stored is None else [f"requantized from {stored.default}"],
    }


@dataclass(slots=True)
class Shards:
    """Weight files under provisional names, and what is still to be written."""

    folder: Path
    waiting: dict[str, mx.array] = field(default_factory=dict)
    names: list[list[str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    formats: dict[str, Quantization] = field(default_factory=dict)
    format_bytes: dict[str, int] = field(default_factory=dict)

    def take(self, path: str, module: nn.Module) -> nn.Module:
        """A ``Convert`` that keeps a module's arrays for its file and leaves none in the model."""
        self.add((f"{path}.{name}", value) for name, value in tree_flatten(module.parameters()))
        if (found := matrix_format(module)) is not None:
            name, size = found
            self.format_bytes[name] = self.format_bytes.get(name, 0) + size
        if hasattr(module, "bits"):
            mode = getattr(module, "mode", "affine")
            self.formats[path] = Quantization(module.bits, module.group_size, mode)
        return nn.Identity()

    def add(self, arrays: Any) -> None:
        new = dict(arrays)
        mx.eval(new)
        held, more = (sum(a.nbytes for a in part.values()) for part in (self.waiting, new))
        if held and held + more > SHARD_BYTES:
            self.write()
        self.waiting |= new

    def write(self) -> None:
        size = sum(array.nbytes for array in self.waiting.values())
        if shutil.disk_usage(self.folder).free < size:
            raise StorageError(f"{self.folder.parent} has no room for {size:,} bytes more")
        path = self.folder / f"{len(self.names)}.safetensors"
        try:
            mx.save_safetensors(str(path), self.waiting, metadata={"format": "mlx"})
        except RuntimeError as error:
            raise StorageError(f"{path} cannot be written: {error}") from error
        self.names.append(list(self.waiting))
        self.sizes.append(size)
        self.waiting = {}

    def finish(self, model: nn.Module) -> None:
        """Write the last file, with the arrays outside the leaves; give all their names."""
        self.add(tree_flatten(model.parameters()))
        self.write()
        count = len(self.names)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.names):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else _ONLY_FILE
            os.rename(self.folder / f"{i}.safetensors", self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": sum(self.sizes)}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


_ONLY_FILE = "model.safetensors"


def write_others(folder: Path, out_dir: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Configuration and tokenizer, as ``mlx_lm.utils.save`` (0.32.2) writes them."""
    from mlx_lm.utils import save_config

    vision = "vision_tower" in getattr(model, "model", {})
    save_config(config, config_path=out_dir / "config.json", keep_vision_config=vision)
    open_tokenizer(folder, config).save_pretrained(str(out_dir))
    generation = folder / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, out_dir)


def _config(
    config: dict[str, Any], quantization: Quantization | None, shards: Shards
) -> dict[str, Any]:
    """``config.json`` with its ``quantization``, and in that the modules that differ from it.

    mlx-lm has undone what another tool's ``quantization_config`` said, or made it its own.
    """
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    if quantization is None:
        return config
    own = {path: q.to_config() for path, q in shards.formats.items() if q != quantization}
    return config | {"quantization": quantization.to_config() | own}
