"""Parameters of vision towers and their projectors, for those that the config decides.

Shapes: modeling files of transformers 5.24.0.
"""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def vision_parameters(config: Json) -> int | None:
    """Elements of the tower and its projector; 0 without one, ``None`` where it is not known."""
    vision = config.get("vision_config")
    if config.get("model_type") == "muse_spark" or not isinstance(vision, Mapping):
        return 0
    text = config.get("text_config") or config
    count = TOWERS.get(str(config.get("model_type")))
    try:
        return count(vision, text) if count else None
    except (KeyError, TypeError):
        return None


def qwen3_vl(vision: Json, text: Json) -> int:
    """Blocks with biases, a learned grid of positions, a merger, and one for each deep layer."""
    width, size, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    patches = vision["in_channels"] * vision["temporal_patch_size"] * patch**2
    block = 4 * width * (width + 1) + 2 * width * size + size + width + 4 * width
    out = vision["out_hidden_size"]
    merge = merged * (merged + 1) + out * (merged + 1)
    deep = len(vision.get("deepstack_visual_indexes") or ())
    return int(
        width * (patches + 1)
        + vision["num_position_embeddings"] * width
        + vision["depth"] * block
        + merge
        + 2 * width
        + deep * (merge + 2 * merged)
    )


def pixtral(vision: Json, text: Json) -> int:
    """Llama-like blocks; a merger of patches and two matrices into the text model's width."""
    width, size, hidden = vision["hidden_size"], vision["intermediate_size"], text["hidden_size"]
    block = 4 * width**2 + 3 * width * size + 2 * width
    tower = width * 3 * vision["patch_size"] ** 2 + width + vision["num_hidden_layers"] * block
    merge = MISTRAL_MERGE**2 * width * width + width
    return int(tower + merge + hidden * width + hidden**2)


MISTRAL_MERGE = 2  # Mistral3Config.spatial_merge_size

TOWERS = {
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "mistral3": pixtral,
}
