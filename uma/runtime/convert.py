"""A Hugging Face folder to an MLX one, quantized matrix by matrix."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from uma.errors import StorageError
from uma.quantization import Quantization
from uma.runtime.load import load, weights_bytes


def convert_folder(
    folder: Path,
    out_dir: Path,
    *,
    quantization: Quantization | None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the model of ``folder`` to ``out_dir``, whole or not at all; what was written.

    The converted model is held in memory until it is written; the source is not.

    Raises:
        StorageError: If the disk has no room, or the folder cannot be written.
    """
    from mlx_lm.utils import save

    loaded = load(folder, quantization=quantization, progress=progress)
    size = weights_bytes(loaded.model)
    config = dict(loaded.config)
    if quantization is not None:
        config["quantization"] = quantization_json(loaded.model, quantization)
    parent = out_dir.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(parent).free < size:
            raise StorageError(f"the converted model needs {size:,} bytes, more than {parent} has")
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=parent))
        try:
            save(temporary, folder, loaded.model, loaded.tokenizer, config, donate_model=True)
            temporary.chmod(0o755)
            temporary.rename(out_dir)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{out_dir} cannot be written: {error}") from error
    return {
        "folder": str(out_dir),
        "model_type": config.get("model_type"),
        "form": loaded.form,
        "size_bytes": size,
        "notes": list(loaded.notes),
    }


def quantization_json(model: nn.Module, quantization: Quantization) -> dict[str, Any]:
    """The ``quantization`` of ``config.json``, with the modules that differ from it."""
    fields: dict[str, Any] = _fields(quantization.bits, quantization.group_size, quantization.mode)
    default = dict(fields)
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    for path, module in leaves:
        if hasattr(module, "bits"):
            own = _fields(module.bits, module.group_size, getattr(module, "mode", "affine"))
            if own != default:
                fields[path] = own
    return fields


def _fields(bits: int, group_size: int, mode: str) -> dict[str, Any]:
    return {"group_size": group_size, "bits": bits, "mode": mode}
