"""What a model is made of: ``config.json`` to layers and parameters, as mlx-lm builds them.

One file a family (``families``); each has a table from the name of a file of ``mlx_lm.models`` to
the function that lays it out and the defaults of its ``ModelArgs`` (mlx-lm 0.32.2). ``elsewhere``
has what mlx-lm lacks. Keys that a file lacks are those of transformers' configuration classes.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from uma.architecture.config import Config, Module
from uma.architecture.families import ELSEWHERE, NAMES, module_named
from uma.architecture.layers import Architecture, parameters
from uma.architecture.left_out import parts_left_out
from uma.architecture.parts import under
from uma.errors import CheckpointError, UnsupportedModel

# mlx-lm 0.32.2, utils.py, MODEL_REMAPPING.
REMAPPING = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}

# mlx-lm 0.32.2, utils.py, MODEL_ARCHITECTURE_REMAPPING.
ARCHITECTURE_REMAPPING = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}

# Files of ``mlx_lm.models`` that no config alone describes, and why.
NOT_UNDERSTOOD = {
    "prism_hadamard_qwen35": "its file names the layers that are packed in 2 bits one by one",
}

# Files without a ``model_type`` name it by the class that runs them.
MODEL_TYPES = {"MiniMaxText01ForCausalLM": "minimax_text_01"}

# Modules that hold the text model of a multimodal one: its module, where they put it, and the
# defaults that they give it.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        "language_model",
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3n": ("gemma3n", "", {}),
    "deepseek_v41": ("deepseek_v41", "", {}),
    "gemma4": (
        "gemma4_text",
        "language_model",
        {"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "kimi_k25": ("deepseek_v3", "language_model", {}),
    "kimi_k3": ("kimi_k3", "language_model", {}),
    "kimi_vl": ("deepseek_v3", "language_model", {}),
    "lfm2-vl": ("lfm2", "language_model", {}),
    "llama4": ("llama4", "language_model", {}),
    "muse_glimmer": ("muse_glimmer", "", {}),
    "muse_spark": ("muse_spark", "", {}),
    "minimax_m3_vl": ("minimax_m3_vl", "language_model", {}),
    "mistral3": ("llama", "language_model", {"tie_word_embeddings": False}),
    "pixtral": ("llama", "language_model", {"num_attention_heads": 32}),
    "qwen2_vl": ("qwen2", "language_model", {}),
    "qwen3_5": ("qwen3_5", "language_model", {}),
    "qwen3_5_moe": ("qwen3_5", "language_model", {}),
    "qwen3_vl": ("qwen3", "language_model", {}),
    "qwen3_vl_moe": ("qwen3_moe", "language_model", {}),
}

LONGEST_NAME = 80  # of a model_type: more is no name, and would be shown whole

# Sizes that are looped over are bounded well above those of any model, the others against
# numbers that are none.
MAX_SIZE = 1 << 32
MAX_LAYERS = 1_000
MAX_OF_LAYER = 10_000
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "num_hidden_layer", "num_layer", "n_layer")
OF_LAYER = ("_head", "_heads", "_experts", "_inputs")
# How the names of sizes begin and end; those of counts are never true.
BEGINNINGS = ("num_", "n_")
COUNTS = ("_size", "_heads", "_rank", "_per_tok")
SIZES = (*COUNTS, "_dim", "_dims", "_layers", "_experts", "_inputs", "_kernel")
NUMBERS = ("rope_theta", "max_position_embeddings")
EPSILONS = ("_eps", "_epsilon")
NESTED_SIZES = ("attn_config", "ffn_config", "linear_attn_config", "sparse_attention_config")
NOT_SIZES = frozenset(
    {
        "cross_attention_layers",
        "full_attn_layers",
        "intermediate_size",
        "kda_layers",
        "mamba_dt_rank",
        "mlp_only_layers",
        "no_rope_layers",
        "num_attention_heads_per_layer",
        "num_kv_heads",
        "num_query_heads",
        "pruned_heads",
        "sliding_window_layers",
        "time_step_rank",
    }
)
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError)


def model_type_of(config: Mapping[str, Any]) -> str:
    """``model_type``, else by the first of ``architectures``.

    Raises:
        CheckpointError: If there is neither.
    """
    model_type = config.get("model_type")
    if model_type is None:
        model_type = MODEL_TYPES.get(_architectures(config)[0])
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'")
    if len(model_type) > LONGEST_NAME:
        raise CheckpointError(
            f"config.json has a 'model_type' of {len(model_type):,} characters: "
            f"{model_type[:LONGEST_NAME]!r}..."
        )
    return model_type


def module_of(config: Mapping[str, Any]) -> str:
    """The file of ``mlx_lm.models`` that mlx-lm would take for ``config``, if it has one."""
    model_type = model_type_of(config)
    for name in _architectures(config):
        if (model_type, name) in ARCHITECTURE_REMAPPING:
            return ARCHITECTURE_REMAPPING[model_type, name]
    return REMAPPING.get(model_type, model_type)


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures") or ("",)
    return (names,) if isinstance(names, str) else tuple(map(str, names))


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Layers, token mixers and parameters of the text model that ``config`` describes.

    A quantization in it is ignored (``uma.quantization.quantization_of_config`` reads that).
    Vision towers and layers for multi-token prediction are counted, not laid out.

    Raises:
        UnsupportedModel: If that ``model_type`` is not known.
        CheckpointError: If a key is missing or malformed.
    """
    module = module_of(config)
    text = text_config(config)
    found, fixed = _builder(config, text, module)
    if found is None:
        return _nested(config, text)
    (builder, defaults), runs = found
    model_type = str(text.get("model_type") or model_type_of(config))
    values = {**text, **fixed, "model_type": model_type}
    keys = Config(_checked(values), defaults, config)
    try:
        architecture = builder(keys)
        _check_shapes(architecture)
        architecture = _finished(architecture, config, module if runs else None)
        return replace(architecture, **parts_left_out(config, text, architecture, keys.filled))
    except _MALFORMED as error:
        raise CheckpointError(
            f"config.json of model_type {model_type_of(config)!r} is malformed: {error}"
        ) from error


def _builder(
    config: Mapping[str, Any], text: Mapping[str, Any], module: str
) -> tuple[tuple[Module, bool] | None, dict[str, Any]]:
    """The function for ``module`` and whether mlx-lm runs it, and the keys its wrapper sets."""
    text_module, fixed = _text_module(config, module)
    name = _told_apart(text, text_module)
    found = (module_named(name), name not in ELSEWHERE) if name in NAMES else None
    return found, fixed


def _told_apart(text: Mapping[str, Any], module: str) -> str:
    """The name of another model where two share a ``model_type`` and mlx-lm has one of them."""
    if module == "minimax" and (
        0 in (text.get("attn_type_list") or ())
        or "linear_attention" in (text.get("layer_types") or ())
    ):
        return "minimax_text_01"
    if module == "olmo" and "d_model" not in text:
        return "olmo_hf"
    return module


def _nested(config: Mapping[str, Any], text: Mapping[str, Any]) -> Architecture:
    """The text model of a multimodal one that mlx-lm lacks, if that is known itself.

    Raises:
        UnsupportedModel: If it is not.
    """
    model_type = model_type_of(config)
    inner = str(text.get("model_type"))
    for name in (inner, inner.removesuffix("_text"), inner.removesuffix("_text_model")):
        if text is not config and REMAPPING.get(name, name) in NAMES:
            architecture = architecture_from_config({**text, "model_type": name})
            left_out = parts_left_out(config, text, architecture, {})
            return replace(architecture, model_type=model_type, module=None, **left_out)
    reason = NOT_UNDERSTOOD.get(model_type)
    known = ", ".join(sorted(NAMES | WRAPPERS | REMAPPING))
    raise UnsupportedModel(
        f"model_type {model_type!r} is not supported"
        + (f": {reason}" if reason else f"; supported are {known}")
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text model: those nested for it, or all where nothing is nested."""
    for key in ("text_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            nested: Mapping[str, Any] = config[key]
            return nested
    return config


def _text_module(config: Mapping[str, Any], module: str) -> tuple[str, dict[str, Any]]:
    """The module of the text model, and the keys that its wrapper sets."""
    text = text_config(config)
    text_module, _, defaults = WRAPPERS.get(module, (module, "", {}))
    if module == "mistral3" and text.get("model_type") in ("ministral3", "mistral4"):
        text_module = str(text["model_type"])
    outer = config if module in ("gemma3", "gemma4") else {}
    keys = {
        key: outer.get(key, default) if key == "vocab_size" else text.get(key, default)
        for key, default in defaults.items()
    }
    return text_module, keys


def _checked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` if its sizes are numbers that a model can have, before they are multiplied."""
    _check_types(values)
    for key, value in values.items():
        if key in NESTED_SIZES and isinstance(value, Mapping):
            _checked(value)
        number = key in NUMBERS or key.endswith(EPSILONS)
        if number and value is not None and not _is_positive(value):
            raise CheckpointError(f"config.json has {key} {value!r}, which is no positive number")
        counted = key.startswith(BEGINNINGS)
        if value is None or key in NOT_SIZES or not (counted or key.endswith(SIZES)):
            continue
        limit = _largest(key)
        flag = isinstance(value, bool) and (counted or key.endswith(COUNTS) or key == "head_dim")
        if flag or not isinstance(value, (int, float)) or not 0 <= value <= limit:
            raise CheckpointError(
                f"config.json has {key} {value!r}, which is not a size up to {limit:,}"
            )
    return values


def _largest(key: str) -> int:
    """The most that the size of that name can be."""
    if key in LAYERS:
        return MAX_LAYERS
    return MAX_OF_LAYER if key.startswith("num_") or key.endswith(OF_LAYER) else MAX_SIZE


def _check_types(values: Mapping[str, Any]) -> None:
    """Keys whose wrong type would be taken for another layout: a text is true, and has letters."""
    kinds = values.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json has layer_types {kinds!r:.80}, which is no list of names"
        )
    tied = values.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise CheckpointError(
            f"config.json has tie_word_embeddings {tied!r:.80}, which is neither true nor false"
        )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _check_shapes(architecture: Architecture) -> None:
    for parameter in parameters(architecture):
        if not all(type(dim) is int and dim > 0 for dim in parameter.shape):
            raise CheckpointError(f"config.json gives {parameter.name} the shape {parameter.shape}")
    if not architecture.layers:
        raise CheckpointError("config.json describes a model without layers")


def _finished(
    architecture: Architecture, config: Mapping[str, Any], module: str | None
) -> Architecture:
    architecture = replace(
        architecture,
        model_type=model_type_of(config),
        module=module,
        dtype=_dtype(config),
    )
    prefix = WRAPPERS.get(module or "", ("", "", {}))[1]
    if not prefix:
        return architecture
    layers = tuple(
        replace(part, parameters=under(prefix, part.parameters)) for part in architecture.layers
    )
    return replace(architecture, layers=layers, parameters=under(prefix, architecture.parameters))


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype that mlx_lm.convert keeps: ``torch_dtype`` or ``dtype``, else bfloat16."""
    text = text_config(config)
    dtype = text.get("torch_dtype") or text.get("dtype")
    return dtype if dtype in ("float16", "bfloat16", "float32") else "bfloat16"
