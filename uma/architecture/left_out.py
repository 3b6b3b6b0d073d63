"""Parts of a published model beside its text decoder: counted and named, not laid out."""

from collections.abc import Iterator, Mapping
from typing import Any

from uma.architecture.defaults import class_defaults
from uma.architecture.layers import Architecture
from uma.architecture.vision import vision_parameters

# Keys for the number of layers for multi-token prediction that a checkpoint carries. MiniMax's
# ``num_mtp_modules`` and ``num_nextn_predict_layers`` name some that were not published.
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "_num_mtp_layers")
WITHOUT_MTP = ("minimax_m2", "minimax_m3", "minimax_m3_vl")

# Prediction layers that are a decoder layer, a projection of two hidden states into one and three
# norms (DeepSeek-V3, technical report, 2.2). DeepSeek's checkpoints repeat embedding and head.
PLAIN_MTP = ("glm4_moe", "glm_moe_dsa", "mimo", "qwen3_5", "qwen3_5_moe")
REPEATED_MTP = ("deepseek_v3", "deepseek_v32")

# How the notes end under MLX, and under other engines: what they do with those parts.
_NOT_LOADED = "not included: mlx-lm does not load it"
_DROPPED = "not included: mlx-lm drops them"
_COUNTED = "counted, not quantized"
ELSEWHERE: dict[str, dict[str, str]] = {
    "llama.cpp": {_NOT_LOADED: "not included: it is a file of its own, given as --mmproj"},
    "transformers": {_NOT_LOADED: _COUNTED},
    "vllm": {_NOT_LOADED: _COUNTED},
}
_SPECULATIVE = "not included: only speculative decoding takes them"


def notes_under(engine: str, architecture: Architecture) -> tuple[str, ...]:
    """``architecture.notes`` in the words of another engine than MLX, without those on mlx-lm."""
    endings = {_DROPPED: _SPECULATIVE, **ELSEWHERE[engine]}
    if architecture.vision_parameters is None:  # no engine's term can have it
        endings[_NOT_LOADED] = "not included"
    found = []
    for note in architecture.notes:
        end = next((words for words in endings if note.endswith(words)), "")
        if not note.startswith("mlx-lm"):
            found.append(note.removesuffix(end) + endings.get(end, ""))
    return tuple(found)


def parts_left_out(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    architecture: Architecture,
    filled: Mapping[str, Any],
) -> dict[str, Any]:
    """``vision_parameters``, ``mtp_parameters`` and ``notes`` for ``architecture``."""
    vision = vision_parameters(config)
    layers = _mtp_layers(config, text)
    mtp = _mtp_parameters(architecture, str(config.get("model_type")), layers)
    notes = (*architecture.notes, *_notes(config, architecture, vision, layers, mtp, filled))
    return {"vision_parameters": vision, "mtp_parameters": mtp, "notes": notes}


def _mtp_layers(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    if config.get("model_type") in WITHOUT_MTP:
        return 0
    found = next((text[key] for key in MTP_KEYS if isinstance(text.get(key), int)), 0)
    return int(found)


def _mtp_parameters(architecture: Architecture, model_type: str, layers: int) -> int | None:
    """Decoder layers like the last one, each with its projection and norms."""
    if not layers:
        return 0
    if model_type not in PLAIN_MTP + REPEATED_MTP:
        return None
    hidden = architecture.hidden_size
    last = sum(p.size for p in architecture.layers[-1].parameters)
    repeated = 2 * hidden * architecture.vocab_size if model_type in REPEATED_MTP else 0
    return layers * (last + 2 * hidden**2 + 3 * hidden + repeated)


def _notes(
    config: Mapping[str, Any],
    architecture: Architecture,
    vision: int | None,
    layers: int,
    mtp: int | None,
    filled: Mapping[str, Any],
) -> Iterator[str]:
    if architecture.module is None:
        yield f"mlx-lm 0.32.2 has no module for {architecture.model_type}"
    if vision != 0:
        yield f"vision tower of {_counted(vision)} {_NOT_LOADED}"
    if layers:
        word = "layer" if layers == 1 else "layers"
        yield f"{layers} {word} for multi-token prediction of {_counted(mtp)} {_DROPPED}"
    if filled:
        _, source = class_defaults(str(config.get("model_type")))
        keys = ", ".join(f"{key} {value}" for key, value in sorted(filled.items()))
        yield f"not in config.json, from {source or 'transformers'}: {keys}"


def _counted(parameters: int | None) -> str:
    return "unknown size" if parameters is None else f"{parameters:,} parameters"
