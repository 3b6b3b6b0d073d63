"""What a model is made of: ``config.json`` to layers and parameters, as mlx-lm builds them.

One module a family; each has a table from the name of a file of ``mlx_lm.models`` to the function
that lays it out and the defaults of its ``ModelArgs`` (mlx-lm 0.32.2).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from uma.architecture import (
    bailing,
    convolution,
    dense,
    dense_variants,
    experts,
    experts_by_layer,
    experts_variants,
    gemma,
    gpt,
    kimi,
    latent,
    linear_attention,
    mamba,
)
from uma.architecture.config import Config, Modules
from uma.architecture.layers import Architecture, parameters
from uma.architecture.parts import under
from uma.errors import CheckpointError, UnsupportedModel

MODULES: Modules = (
    bailing.MODULES
    | convolution.MODULES
    | dense.MODULES
    | dense_variants.MODULES
    | gemma.MODULES
    | gpt.MODULES
    | kimi.MODULES
    | experts.MODULES
    | experts_by_layer.MODULES
    | experts_variants.MODULES
    | latent.MODULES
    | linear_attention.MODULES
    | mamba.MODULES
)

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

# Modules that hold the text model of a multimodal one: its module, where they put it, and the
# defaults that they give it.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        "language_model",
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3n": ("gemma3n", "", {}),
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
    "minimax_m3_vl": ("minimax_m3_vl", "language_model", {}),
    "mistral3": ("llama", "language_model", {"tie_word_embeddings": False}),
    "pixtral": ("llama", "language_model", {"num_attention_heads": 32}),
    "qwen2_vl": ("qwen2", "language_model", {}),
    "qwen3_5": ("qwen3_5", "language_model", {}),
    "qwen3_5_moe": ("qwen3_5", "language_model", {}),
    "qwen3_vl": ("qwen3", "language_model", {}),
    "qwen3_vl_moe": ("qwen3_moe", "language_model", {}),
}

# Sizes that are looped over are bounded well above those of any model, the others against
# numbers that are none.
MAX_SIZE = 1 << 32
LIMITS = (
    (re.compile(r"^(num_hidden|num|n)_layers?$"), 1_000),
    (re.compile(r"^num_|_(heads?|experts|inputs)$"), 10_000),
)
SIZES = re.compile(r"^(num|n)_|_(size|heads|dim|dims|layers|experts|inputs|rank|per_tok|kernel)$")
NESTED_SIZES = ("attn_config", "ffn_config", "linear_attn_config", "sparse_attention_config")
NOT_SIZES = frozenset(
    {
        "full_attn_layers",
        "intermediate_size",
        "kda_layers",
        "mamba_dt_rank",
        "mlp_only_layers",
        "no_rope_layers",
        "num_attention_heads_per_layer",
        "pruned_heads",
        "time_step_rank",
    }
)
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError)


def module_of(config: Mapping[str, Any]) -> str:
    """The file of ``mlx_lm.models`` that runs ``config``."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'")
    return REMAPPING.get(model_type, model_type)


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Layers, token mixers and parameters of the text model that ``config`` describes.

    A quantization in it is ignored (``uma.quantization.quantization_of_config`` reads that), and
    so are vision towers and layers for multi-token prediction, which mlx-lm drops.

    Raises:
        UnsupportedModel: If no module of that ``model_type`` is known.
        CheckpointError: If a key is missing or malformed.
    """
    module = module_of(config)
    text_module, fixed = _text_module(config, module)
    if text_module not in MODULES:
        known = ", ".join(sorted(MODULES | WRAPPERS | REMAPPING))
        raise UnsupportedModel(
            f"model_type {config['model_type']!r} is not supported; supported are {known}"
        )
    builder, defaults = MODULES[text_module]
    text = text_config(config) if module in WRAPPERS else config
    try:
        architecture = builder(Config(_checked({**text, **fixed}), defaults, config))
    except _MALFORMED as error:
        raise CheckpointError(
            f"config.json of model_type {config['model_type']!r} is malformed: {error}"
        ) from error
    _check_shapes(architecture)
    return _finished(architecture, config, module)


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
    for key, value in values.items():
        if key in NESTED_SIZES and isinstance(value, Mapping):
            _checked(value)
        if value is None or key in NOT_SIZES or not SIZES.search(key):
            continue
        limit = next((most for keys, most in LIMITS if keys.search(key)), MAX_SIZE)
        if not isinstance(value, (int, float)) or not 0 <= value <= limit:
            raise CheckpointError(
                f"config.json has {key} {value!r}, which is not a size up to {limit:,}"
            )
    return values


def _check_shapes(architecture: Architecture) -> None:
    for parameter in parameters(architecture):
        if not all(type(dim) is int and dim > 0 for dim in parameter.shape):
            raise CheckpointError(f"config.json gives {parameter.name} the shape {parameter.shape}")
    if not architecture.layers:
        raise CheckpointError("config.json describes a model without layers")


def _finished(architecture: Architecture, config: Mapping[str, Any], module: str) -> Architecture:
    architecture = replace(
        architecture,
        model_type=config["model_type"],
        module=module,
        dtype=_dtype(config),
    )
    prefix = WRAPPERS[module][1] if module in WRAPPERS else ""
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
