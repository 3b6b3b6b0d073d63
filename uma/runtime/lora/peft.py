"""Adapters of Hugging Face's PEFT as mlx-lm's, their logits unchanged.

PEFT's factors are mlx-lm's transposed; its ``lora_alpha / r`` (``lora_alpha / sqrt(r)`` with
``use_rslora``) is mlx-lm's ``scale`` (peft 0.21.2, ``tuners/lora/layer.py``, ``update_layer``).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from uma.checkpoint.adapter import CONFIG
from uma.errors import CheckpointError, UnsupportedModel
from uma.runtime.forms import as_dense
from uma.runtime.lora.adapter import Adapter

PEFT_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
Arrays = dict[str, mx.array]

_TOLD = {
    *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("task_type", "inference_mode", "r", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "loftq_config", "runtime_config", "bias"),
}
"""Settings that are read, or that change nothing in what a trained adapter computes."""

_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Ways to begin that change the base itself (``tuners/lora/layer.py``, ``update_layer``)."""

_FACTORS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
}

_COPY = ".base_layer.weight"
"""The base's own matrix, which PEFT saves with an adapter on embedding or head."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The factors of one module as PEFT has them: ``a`` (r, in), ``b`` (out, r), and its scale."""

    a: mx.array
    b: mx.array
    m: mx.array | None
    scale: float


def from_peft(folder: Path, model: nn.Module) -> tuple[Adapter, Arrays]:
    """An adapter of PEFT's as mlx-lm's for ``model``, whose parameters need not be evaluated.

    Ranks below the highest are padded with zeros, and scales other than the first (that
    is not 0) go into the second factor: mlx-lm has one of each.

    Raises:
        CheckpointError: If a file is missing or malformed, or does not match the model.
        UnsupportedModel: If the adapter does what mlx-lm's layers cannot; it is named.
    """
    config, tensors = _peft_config(folder), _tensors(folder)
    copies = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_COPY)}
    parts = _parts(tensors, config)
    own = {_own_path(path, part, model): part for path, part in sorted(parts.items())}
    for name, value in copies.items():
        _require_copy(name[len(PREFIX) : -len(_COPY)], value, model)
    rank = max(part.a.shape[0] for part in own.values())
    scale = next((part.scale for part in own.values() if part.scale), 0.0)
    arrays: Arrays = {}
    for path, part in own.items():
        more = rank - part.a.shape[0]
        arrays[f"{path}.lora_a"] = mx.pad(part.a, [(0, more), (0, 0)]).T
        b = part.b if part.scale == scale else part.b * (part.scale / scale)
        arrays[f"{path}.lora_b"] = mx.pad(b, [(0, 0), (0, more)]).T
        if part.m is not None:
            arrays[f"{path}.m"] = part.m.reshape(-1)
    arrays = {name: mx.contiguous(value) for name, value in arrays.items()}
    mx.eval(arrays)
    return _adapter(own, model, rank, scale, config), arrays


def _peft_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind is None:
        raise CheckpointError(f"{folder / CONFIG} has no peft_type: it is no adapter of PEFT's")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is PEFT's {kind}; only LORA can be imported")
    begun = str(config.get("init_lora_weights")).lower()
    if begun.startswith(_OWN_BASE):
        raise UnsupportedModel(
            f"the adapter began with {begun}, which changes the base too; in PEFT, save it with "
            "path_initial_model_for_weight_conversion"
        )
    more = {k: v for k, v in config.items() if k not in _TOLD and v}
    if config.get("bias", "none") != "none":
        more["bias"] = config["bias"]
    if more:
        listed = ", ".join(f"{name}={value!r}"[:80] for name, value in more.items())
        raise UnsupportedModel(f"mlx-lm's layers have no {listed}")
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise CheckpointError(f"lora_dropout is {dropout!r}, and no number from 0 to below 1")
    return dict(config)


def _tensors(folder: Path) -> Arrays:
    path = folder / PEFT_WEIGHTS
    if not path.is_file():
        why = "; .bin files can run code when read: save it as safetensors"
        raise CheckpointError(f"{folder} has no {PEFT_WEIGHTS}{why}")
    try:
        found: Any = mx.load(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return dict(found)


def _parts(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, _Part]:
    factors: dict[str, dict[str, mx.array]] = {}
    for name, value in tensors.items():
        path, factor = _split(name)
        factors.setdefault(path, {})[factor] = value
    if not factors:
        raise CheckpointError("the adapter holds no tensors")
    parts = {}
    for path, found in factors.items():
        if not {"a", "b"} <= found.keys() or ("m" in found) is not bool(config.get("use_dora")):
            raise CheckpointError(f"{path} has not the factors that its settings ask for")
        if found["a"].ndim != 2 or found["b"].ndim != 2:
            raise UnsupportedModel(f"{path} is no matrix but a convolution, or holds experts")
        if found["a"].shape[0] != found["b"].shape[1]:
            raise CheckpointError(f"the two factors of {path} have not the same rank")
        for value in found.values():
            _require_numbers(path, value)
        scale = _scale(path, found["a"].shape[0], config)
        parts[path] = _Part(found["a"], found["b"], found.get("m"), scale)
    return parts


def _require_numbers(path: str, value: mx.array) -> None:
    if not mx.issubdtype(value.dtype, mx.floating):
        raise CheckpointError(f"{path} holds {value.dtype} and no floating-point numbers")
    finite: Any = mx.isfinite(value).all().item()
    if not finite:
        raise CheckpointError(f"{path} holds numbers that are not finite")


def _split(name: str) -> tuple[str, str]:
    for suffix, factor in _FACTORS.items():
        if name.startswith(PREFIX) and name.endswith("." + suffix):
            return name[len(PREFIX) : -len(suffix) - 1], factor
    raise UnsupportedModel(f"{name} is no factor of a LoRA layer that mlx-lm has")


def _scale(path: str, rank: int, config: Mapping[str, Any]) -> float:
    """``alpha_pattern`` is matched as ``peft.utils.other.get_pattern_key`` does (0.21.2)."""
    try:
        alphas: Mapping[str, float] = config.get("alpha_pattern") or {}
        own = (a for key, a in alphas.items() if re.match(rf"(.*\.)?({key})$", path))
        alpha = float(next(own, config.get("lora_alpha", 8)))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, re.error) as error:
        raise CheckpointError(
            f"lora_alpha, alpha_pattern and the rank give no scale: {error}"
        ) from None
    if not math.isfinite(scale):
        raise CheckpointError(f"the scale of {path} is {scale}")
    return scale


def _own_path(path: str, part: _Part, model: Any) -> str:
    """The path in mlx-lm's model of a module of the published one, checked by its shape.

    What the model's own ``sanitize`` makes of the name decides where the two differ.
    """
    modules = dict(model.named_modules())
    shape = part.b.shape[0], part.a.shape[1]
    if path not in modules:
        try:
            renamed = model.sanitize({f"{path}.weight": mx.zeros(shape)})
        except Exception:  # it wants others of the model's weights beside it
            renamed = {}
        if len(renamed) == 1:
            path = next(iter(renamed)).removesuffix(".weight")
    module = modules.get(path)
    if module is None or "weight" not in module or isinstance(module, SwitchLinear):
        raise UnsupportedModel(f"{path or 'one'} is no matrix of its own in mlx-lm's model")
    if is_embedding(module):
        require_untied(path, modules)
        shape = shape[::-1]
    own = matrix_shape(module)
    if own != shape:
        raise CheckpointError(f"the adapter is of another model: {path} is {own}, not {shape}")
    return path


def matrix_shape(module: Any) -> tuple[int, ...]:
    """Rows and columns of a matrix, unpacked."""
    *rows, width = module.weight.shape
    return (*rows, width * 32 // module.bits if hasattr(module, "bits") else width)


def is_embedding(module: Any) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding)


def require_untied(path: str, modules: Mapping[str, Any]) -> None:
    """mlx-lm adapts the head with a tied embedding, PEFT does not."""
    if not any(name.endswith("lm_head") for name in modules):
        raise UnsupportedModel(
            f"{path} is the model's head too: there mlx-lm's adapter acts, and PEFT's does not"
        )


def _require_copy(path: str, value: mx.array, model: Any) -> None:
    """A copy of the base's matrix must be one; quantized it is near, trained or resized not."""
    module = as_dense(dict(model.named_modules()).get(path), None)
    same = module is not None and module.weight.shape == value.shape
    if same:
        wide = value.astype(mx.float32)
        distance: Any = mx.linalg.norm(module.weight - wide) / mx.linalg.norm(wide)
        same = distance.item() < 0.2
    if not same:
        raise UnsupportedModel(f"the adapter brings its own {path}, which is not this model's")


def _adapter(
    own: Mapping[str, _Part], model: Any, rank: int, scale: float, config: Mapping[str, Any]
) -> Adapter:
    """The settings under which mlx-lm puts layers on all of these modules."""
    layers = {id(module): n for n, module in enumerate(model.layers)}
    places = {
        f"{path}.": layers[id(module)]
        for path, module in model.named_modules()
        if id(module) in layers
    }
    keys, first = set(), len(layers)
    for path in own:
        inside = next((prefix for prefix in places if path.startswith(prefix)), "")
        keys.add(path[len(inside) :])
        first = min(first, places.get(inside, first))
    return Adapter(
        method="dora" if config.get("use_dora") else "lora",
        num_layers=max(1, len(layers) - first),
        rank=rank,
        scale=scale,
        dropout=float(config.get("lora_dropout") or 0),
        keys=tuple(sorted(keys)),
    )
