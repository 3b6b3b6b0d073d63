"""Which parameters train: mlx-lm's LoRA and DoRA layers, or whole layers; read and written."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.checkpoint.adapter import CONFIG, WEIGHTS
from uma.errors import CheckpointError, StorageError, UnsupportedModel, UsageError
from uma.measurement.run_folder import unwritable, write_json
from uma.runtime.forms import leaves, to_float32
from uma.runtime.load import open_model

Method = Literal["lora", "dora", "full"]
_PROBE = 1 << 20
"""Bytes that are tried where MLX could not write."""

_LEAVES = {"lora": {"lora_a", "lora_b"}, "dora": {"lora_a", "lora_b", "m"}}


@dataclass(frozen=True, slots=True)
class Adapter:
    """What to train of the last ``num_layers`` layers; -1 for all. ``keys`` as in mlx-lm.

    ``scale`` multiplies the product of the two factors (PEFT's alpha / rank).
    """

    method: Method = "lora"
    num_layers: int = 16
    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None

    def config(self) -> dict[str, Any]:
        """The part of ``adapter_config.json`` from which mlx-lm builds the layers again."""
        parameters: dict[str, Any] = {
            "rank": self.rank,
            "scale": self.scale,
            "dropout": self.dropout,
        }
        if self.keys is not None:
            parameters["keys"] = list(self.keys)
        return {
            "fine_tune_type": self.method,
            "num_layers": self.num_layers,
            "lora_parameters": None if self.method == "full" else parameters,
        }


def put_adapter(model: nn.Module, adapter: Adapter) -> dict[str, mx.array]:
    """Freeze ``model`` and make trainable what ``adapter`` names; the trainable parameters.

    Raises:
        UsageError: If a number is out of range, or no layer has one of the keys.
        UnsupportedModel: If the layers cannot take the adapter.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    count = len(model.layers)
    layers = count if adapter.num_layers == -1 else adapter.num_layers
    if not 1 <= layers <= count:
        raise UsageError(f"--num-layers {layers}: the model has {count}; give 1 to {count}, or -1")
    _require_known_widths(model, adapter)
    _require_dense(model, adapter)
    _require_known_keys(model, model.layers[-layers:], adapter)
    model.freeze()
    if adapter.method == "full":
        for layer in model.layers[-layers:]:
            layer.unfreeze()
    else:
        settings = adapter.config()["lora_parameters"]
        try:
            linear_to_lora_layers(model, layers, settings, adapter.method == "dora")
        except ValueError as error:
            raise UnsupportedModel(f"the model cannot take a {adapter.method}: {error}") from None
    trained = dict(tree_flatten(model.trainable_parameters()))
    require_only_adapter(trained, adapter)
    _require_wide(trained)
    return trained


def adapted(folder: Path, adapter: Adapter, *, float32: bool) -> dict[str, mx.array]:
    """What ``put_adapter`` would make trainable, unevaluated: no weights are read.

    Raises:
        CheckpointError, UnsupportedModel, UsageError: As ``load`` and ``put_adapter`` would.
    """
    model, _ = open_model(folder)
    _require_dense(model, adapter)
    if float32:
        dense = [(path, to_float32(path, module)) for path, module in leaves(model)]
        model.update_modules(tree_unflatten(dense))
    return put_adapter(model, adapter)


def require_only_adapter(trained: Mapping[str, mx.array], adapter: Adapter) -> None:
    """Stop if anything but the adapter would be trained.

    Raises:
        UnsupportedModel: With the first name that is not part of an adapter.
    """
    allowed = _LEAVES.get(adapter.method)
    other = [name for name in trained if allowed and name.rsplit(".", 1)[-1] not in allowed]
    if other:
        raise UnsupportedModel(
            f"{other[0]} would be trained with the adapter, and is no part of it"
        )


def _require_dense(model: nn.Module, adapter: Adapter) -> None:
    """Integers do not train, and mlx_lm would not load what their float32 copies became."""
    if adapter.method == "full" and any(hasattr(m, "bits") for _, m in leaves(model)):
        raise UnsupportedModel(
            "whole layers of a quantized model do not train; use --fine-tune-type lora or dora, or "
            "a base in 16 bits"
        )


def _require_wide(trained: Mapping[str, mx.array]) -> None:
    """In float16 the 1e-8 that Adam divides by at least is 0, and so are squares below 6e-8."""
    if narrow := [name for name, value in trained.items() if value.dtype == mx.float16]:
        raise UnsupportedModel(
            f"{narrow[0]} would train in float16, which the averages of an optimizer do not "
            "survive; use --fine-tune-type lora or dora, whose adapters are float32, or a base in "
            "bfloat16 (mlx_lm.convert --dtype bfloat16)"
        )


def _require_known_keys(model: nn.Module, layers: Sequence[nn.Module], adapter: Adapter) -> None:
    """mlx-lm passes over keys that neither a layer has nor, by its whole name, the model."""
    if adapter.method == "full" or adapter.keys is None:
        return
    modules = {name: m for layer in layers for name, m in layer.named_modules()}
    whole = dict(model.named_modules())
    if unknown := [key for key in adapter.keys if key not in modules and key not in whole]:
        # Matrices, and not the vectors of norms.
        known = sorted(n for n, m in modules.items() if "weight" in m and m.weight.ndim > 1)
        raise UsageError(
            f"no layer is named {' or '.join(unknown)}; give --keys of {', '.join(known)}"
        )


def _require_known_widths(model: nn.Module, adapter: Adapter) -> None:
    """mlx-lm 0.32.2 takes ``32 // bits`` weights a word for DoRA (``dora.py``): wrong for these."""
    if adapter.method != "dora":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear) and module.bits in (3, 5, 6):
            raise UnsupportedModel(
                f"DoRA cannot be put on {name}, which has {module.bits} bits: mlx-lm takes 2, 4, 8 "
                "or 16; use --fine-tune-type lora"
            )


def save_adapter(folder: Path, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Write what ``mlx_lm.load(..., adapter_path=folder)`` reads; each file replaced at once.

    Raises:
        StorageError: If the disk is full or the folder cannot be written.
    """
    partial = folder / f".{WEIGHTS}.partial.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(partial), dict(weights))
        sync(partial)
        os.replace(partial, folder / WEIGHTS)
        write_json(folder / CONFIG, config)
    except (OSError, RuntimeError) as error:
        why = reason(error, folder)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"the adapter cannot be written to {folder}: {why}") from error


def reason(error: Exception, folder: Path) -> str:
    """Why a file could not be written: MLX does not say (0.32.4, ``io/load.h``, ``FileWriter``)."""
    try:
        if isinstance(error, RuntimeError):
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_PROBE))
    except OSError as found:
        error = found
    return getattr(error, "strerror", None) or str(error).removeprefix("[write] ").rstrip(".")


def require_writable(folder: Path) -> None:
    """Refuse a folder, where there is one, in which no file can be made.

    Raises:
        StorageError: With the reason.
    """
    try:
        if os.path.lexists(folder):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise unwritable(folder, error) from None


def load_adapter(weights_file: Path, trained: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The arrays of a file that has exactly the trained names and shapes.

    Raises:
        CheckpointError: With what is missing, superfluous or of another shape.
    """
    try:
        found: Any = mx.load(str(weights_file))
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{weights_file} cannot be read: {error}") from error
    wrong = [f"{name} is missing" for name in trained if name not in found]
    for name, value in found.items():
        if name not in trained:
            wrong.append(f"{name} is no part of this adapter")
        elif value.shape != trained[name].shape:
            wrong.append(f"{name} is {value.shape} instead of {trained[name].shape}")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{weights_file} is an adapter of other settings: {'; '.join(wrong[:3])}{more}"
        )
    return dict(found)


def sync(path: Path) -> None:
    """Bring a file to the disk before its name is relied on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
