"""Adapters of mlx-lm's as Hugging Face's PEFT has them, their logits unchanged."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchLinear

from uma.checkpoint.adapter import CONFIG, WEIGHTS, adapter_header
from uma.errors import CheckpointError, StorageError, UnsupportedModel
from uma.runtime.lora.adapter import reason
from uma.runtime.lora.peft import (
    PEFT_WEIGHTS,
    PREFIX,
    Arrays,
    is_embedding,
    matrix_shape,
    require_untied,
)


def to_peft(folder: Path, model: Any, base_name: str | None) -> tuple[dict[str, Any], Arrays]:
    """An adapter of mlx-lm's as PEFT's: its configuration and tensors, by their names there.

    Raises:
        CheckpointError: If a file is missing or malformed, or does not match the model.
        UnsupportedModel: If PEFT has no such layer, or the published model names it otherwise.
    """
    try:
        adapter_header(folder)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        found: Any = mx.load(str(folder / WEIGHTS))
        kind, settings = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the adapter in {folder} cannot be read: {error}") from error
    if kind == "full":
        raise UnsupportedModel("whole layers were trained, which is no adapter: fuse them")
    if not isinstance(settings, dict) or not {"rank", "scale"} <= settings.keys():
        raise CheckpointError(f"{folder / CONFIG} has no rank and scale in lora_parameters")
    modules = dict(model.named_modules())
    tensors: Arrays = {}
    for name, value in found.items():
        path, _, factor = name.rpartition(".")
        tensors[PREFIX + _peft_name(path, factor, modules, model)] = mx.contiguous(value.T)
    mx.eval(tensors)
    paths = sorted({name.rpartition(".")[0] for name in found})
    return _written_config(settings, kind, paths, base_name), tensors


def _peft_name(path: str, factor: str, modules: Mapping[str, Any], model: Any) -> str:
    module = modules.get(path)
    if module is None:
        raise CheckpointError(f"the adapter is of another model: this one has no {path}")
    if isinstance(module, SwitchLinear) or hasattr(module, "num_experts"):
        raise UnsupportedModel(f"{path} holds all experts in one array, which PEFT has not")
    _require_published_name(path, module, model)
    if is_embedding(module):
        require_untied(path, modules)
        return f"{path}.lora_embedding_{factor[-1].upper()}"
    if factor == "m":
        return f"{path}.lora_magnitude_vector"
    return f"{path}.lora_{factor[-1].upper()}.weight"


def _require_published_name(path: str, module: Any, model: Any) -> None:
    """Refuse where the published model may name or lay out the matrix otherwise."""
    name = f"{path}.weight"
    value = mx.zeros(matrix_shape(module))
    try:
        same = model.sanitize({name: value}) if hasattr(model, "sanitize") else {name: value}
    except Exception:  # it wants others of the model's weights beside it
        same = {}
    if not path.startswith(("model.", "lm_head")) or name not in same:
        raise UnsupportedModel(f"{path} may have another name in the published model")
    if same[name].shape != value.shape:
        raise UnsupportedModel(f"{path} is stored otherwise in the published model")


def _written_config(
    settings: Mapping[str, Any], kind: str, paths: list[str], base_name: str | None
) -> dict[str, Any]:
    alpha = settings["scale"] * settings["rank"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": settings["rank"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": settings.get("dropout", 0.0),
        "use_dora": kind == "dora",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "target_modules": paths,
    }


def save_peft(out: Path, config: Mapping[str, Any], tensors: Arrays) -> None:
    """Write what ``PeftModel.from_pretrained`` reads.

    Raises:
        StorageError: If the folder cannot be written.
    """
    try:
        out.mkdir(parents=True)
        mx.save_safetensors(str(out / PEFT_WEIGHTS), tensors, metadata={"format": "pt"})
        text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
        (out / CONFIG).write_text(text, encoding="utf-8")
    except (OSError, RuntimeError) as error:
        why = reason(error, out)
        shutil.rmtree(out, ignore_errors=True)
        raise StorageError(f"the adapter cannot be written to {out}: {why}") from error
