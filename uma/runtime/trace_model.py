"""mlx-lm's own class for a configuration, quantized, with nothing evaluated."""

import copy
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from uma.architecture import WRAPPERS, module_of, text_config
from uma.architecture.defaults import class_defaults
from uma.architecture.families import NAMES, module_named
from uma.errors import CheckpointError, UnsupportedModel
from uma.quantization import Quantization, StoredQuantization
from uma.runtime.load import cast_parameters

Format = Quantization | StoredQuantization | None

# Modules whose files hold no head: ``sanitize`` ties it to the embedding (mlx-lm 0.32.2,
# gemma3_text.py).
TIED_BY_SANITIZE = frozenset({"gemma3_text", "gemma3"})

# Keys that mlx-lm requires, that transformers has no default for, and that no shape depends on.
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


def lazy_model(config: Mapping[str, Any], quantization: Format, dtype: str) -> nn.Module:
    """The model that mlx-lm would run, its weights in ``dtype`` or ``quantization``.

    Raises:
        UnsupportedModel: If mlx-lm has no such module.
        CheckpointError: If it cannot be built from ``config``.
    """
    module = _module(config)
    values = completed(config)
    try:
        model = module.Model(module.ModelArgs.from_dict(values))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"mlx-lm cannot build model_type {config.get('model_type')!r} from config.json: {error}"
        ) from error
    if module_of(config) in TIED_BY_SANITIZE:
        text = getattr(model, "language_model", model)
        text.tie_word_embeddings = True
        text.pop("lm_head", None)
    cast_parameters(model, dtype)
    if quantization is not None:
        _quantize(model, quantization)
    return model


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the keys that it lacks.

    They are transformers' class defaults (``uma/data/config_defaults.csv`` names the classes), then
    those of ``uma.architecture``, then values that no shape depends on.
    """
    values = copy.deepcopy(dict(config))
    values.pop("quantization_config", None)
    values.pop("quantization", None)
    module = module_of(config)
    if module in WRAPPERS:
        text = dict(text_config(values))
        name = WRAPPERS[module][0]
        if module == "mistral3" and text.get("model_type") in ("ministral3", "mistral4"):
            name = str(text["model_type"])
        if "tie_word_embeddings" in values:
            text.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
        values["text_config"] = _filled(text, name)
    values = _filled(values, module)
    if module == "afmoe" and values.get("layer_types") is None:
        # transformers 5.24.0, AfmoeConfig
        every = values.get("global_attn_every_n_layers") or 4
        values["layer_types"] = [
            "sliding_attention" if (i + 1) % every else "full_attention"
            for i in range(values["num_hidden_layers"])
        ]
    if module == "dbrx":  # no shape depends on these
        values["attn_config"] = {"clip_qkv": 8, "rope_theta": 5e5, **values["attn_config"]}
    if module == "deepseek_v2" and not values.get("rope_scaling"):
        values["rope_scaling"] = {"factor": 1, "type": "yarn"}
    return values


def _filled(values: dict[str, Any], module: str) -> dict[str, Any]:
    required, optional = _keys(module)
    ours = module_named(module)[1] if module in NAMES else {}
    classes = class_defaults(str(values.get("model_type")))[0]
    known = {key: value for key, value in SHAPELESS.items() if key in required}
    known |= {k: v for k, v in ours.items() if k in required and v is not None}
    known |= {
        key: value
        for key, value in classes.items()
        if value is not None and key in required | optional and key not in ours
    }
    known["rope_theta"] = values.get("rope_theta") or known.get("rope_theta") or 10000.0
    return {**known, **values, "rope_theta": known["rope_theta"]}


def _keys(module: str) -> tuple[set[str], set[str]]:
    """The keys that the argument classes of a module require, and those that they know."""
    try:
        source = importlib.import_module(f"mlx_lm.models.{module}")
    except (ImportError, SystemExit):
        return set(), set()
    classes = (getattr(source, name, None) for name in ("ModelArgs", "TextArgs", "TextConfig"))
    keys = {
        key: parameter.default is inspect.Parameter.empty
        for found in classes
        if found is not None
        for key, parameter in inspect.signature(found).parameters.items()
    }
    required = {key for key, without in keys.items() if without}
    return required, keys.keys() - required


def _module(config: Mapping[str, Any]) -> Any:
    try:
        return importlib.import_module(f"mlx_lm.models.{module_of(config)}")
    except (ImportError, SystemExit) as error:  # olmo.py exits where a package is missing
        raise UnsupportedModel(
            f"mlx-lm cannot import a module for model_type {config.get('model_type')!r}, so it "
            f"cannot be traced ({error!r}); leave out --exact"
        ) from error


def _quantize(model: nn.Module, quantization: Quantization | StoredQuantization) -> None:
    """Quantize what ``mlx_lm.utils.quantize_model`` would, or what the file says is quantized."""
    predicate = getattr(model, "quant_predicate", None)

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        if isinstance(quantization, StoredQuantization):
            stored = quantization.of(path)
            fits = stored is not None and module.weight.shape[-1] % stored.group_size == 0
            return stored.to_config() if fits and stored is not None else False
        if module.weight.shape[-1] % quantization.group_size:
            return False
        verdict: bool | dict[str, Any] = True if predicate is None else predicate(path, module)
        return verdict

    default = quantization if isinstance(quantization, Quantization) else quantization.default
    nn.quantize(model, **default.to_config(), class_predicate=chosen)
