"""The shipped configurations of real models, with the keys that a transcription lacks."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import uma
from uma.architecture import WRAPPERS, architecture_from_config, module_of
from uma.architecture.defaults import class_defaults
from uma.architecture.families import MODULES, module_named

MODELS = Path(uma.__file__).parent / "data" / "models"

# Keys that mlx-lm requires and that no shape depends on.
SHAPELESS: dict[str, Any] = {
    "activation_sparsity_pattern": None,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "attention_multiplier": 1.0,
    "decoder_sparse_step": 1,
    "dim_model_base": 256,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "intermediate_size": 0,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "logits_scaling": 1.0,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "model_max_length": 4096,
    "n_group": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "post_norm": False,
    "qk_norm": True,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_local_base_freq": 10000.0,
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
    """Names of the shipped configurations that mlx-lm has a module for."""
    names = [path.stem for path in sorted(MODELS.glob("*.json"))]
    return [name for name in names if architecture_from_config(config_of(name)).module]


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with every key that mlx-lm insists on, nested as it expects."""
    module = module_of(config)
    if module in WRAPPERS:
        text = dict(config.get("text_config") or config)
        text_module = module if module == "gemma3n" else WRAPPERS[module][0]
        if module == "mistral3" and text.get("model_type") in ("ministral3", "mistral4"):
            text_module = text["model_type"]
        if module in ("qwen3_vl", "qwen3_vl_moe"):
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        config = {**config, "text_config": _filled(text, text_module)}
    config = _filled(dict(config), module)
    if module == "afmoe" and "layer_types" not in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if module == "dbrx":
        config["attn_config"] = {"clip_qkv": 8, "rope_theta": 5e5, **config["attn_config"]}
    if module == "deepseek_v2":
        config["rope_scaling"] = config.get("rope_scaling") or {"factor": 40, "type": "yarn"}
    return config


def _filled(config: dict[str, Any], module: str) -> dict[str, Any]:
    """The keys that mlx-lm requires, and those for which its default is not the model's."""
    config["rope_theta"] = config.get("rope_theta") or 10000.0
    required, optional = _arguments(module)
    ours = module_named(module)[1] if module in MODULES else {}
    classes = class_defaults(str(config.get("model_type")))[0]
    known = {k: v for k, v in SHAPELESS.items() if k in required}
    known |= {k: v for k, v in ours.items() if k in required and v is not None}
    known |= {
        k: v
        for k, v in classes.items()
        if v is not None and k in required | optional and k not in ours
    }
    return known | config


def _arguments(module: str) -> tuple[set[str], set[str]]:
    """Keys without and with a default in the argument classes of an mlx-lm module."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    classes = [getattr(source, name, None) for name in ("ModelArgs", "TextArgs", "TextConfig")]
    keys = [
        (name, parameter.default is inspect.Parameter.empty)
        for cls in classes
        if cls is not None
        for name, parameter in inspect.signature(cls).parameters.items()
    ]
    required = {name for name, without in keys if without}
    return required, {name for name, _ in keys} - required
