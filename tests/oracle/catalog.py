"""The shipped configurations of real models, with the keys that a transcription lacks."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import uma
from uma.architecture import WRAPPERS, architecture_from_config, module_of
from uma.errors import CheckpointError, UnsupportedModel

MODELS = Path(uma.__file__).parent / "data" / "models"

# Keys that mlx-lm requires and that no shape depends on.
SHAPELESS: dict[str, Any] = {
    "activation_sparsity_pattern": None,
    "attention_multiplier": 1.0,
    "decoder_sparse_step": 1,
    "dim_model_base": 256,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": 30.0,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "logits_scaling": 1.0,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "n_group": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rotary_dim": 64,
    "routed_scaling_factor": 1.0,
    "scale_depth": 1.4,
    "scale_emb": 12.0,
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "topk_group": 1,
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def supported() -> list[str]:
    """Names of the shipped configurations that we lay out."""
    names = []
    for path in sorted(MODELS.glob("*.json")):
        try:
            architecture_from_config(config_of(path.stem))
        except (CheckpointError, UnsupportedModel):
            continue
        names.append(path.stem)
    return names


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with every key that mlx-lm insists on, nested as it expects."""
    module = module_of(config)
    if module in WRAPPERS:
        text = dict(config.get("text_config") or config)
        text_module = module if module == "gemma3n" else WRAPPERS[module][0]
        if module in ("qwen3_vl", "qwen3_vl_moe"):
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        config = {**config, "text_config": _filled(text, text_module)}
    config = _filled(dict(config), module)
    if module == "afmoe" and "layer_types" not in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if module == "deepseek_v2":
        config["rope_scaling"] = config.get("rope_scaling") or {"factor": 40, "type": "yarn"}
    return config


def _filled(config: dict[str, Any], module: str) -> dict[str, Any]:
    config["rope_theta"] = config.get("rope_theta") or 10000.0
    required = _required(module)
    return {k: v for k, v in SHAPELESS.items() if k in required} | config


def _required(module: str) -> set[str]:
    """Keys without a default in the argument classes of an mlx-lm module."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    classes = [getattr(source, name, None) for name in ("ModelArgs", "TextArgs", "TextConfig")]
    return {
        name
        for cls in classes
        if cls is not None
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
