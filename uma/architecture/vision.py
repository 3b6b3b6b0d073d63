"""Parameters of vision towers and their projectors, for those that the config decides.

Shapes: modeling files of transformers 5.24.0.
"""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def vision_parameters(config: Json) -> int | None:
    """Elements of the towers for images and sound, and their projectors; 0 without any.

    ``None`` where the config does not tell.
    """
    towers = [
        config[key]
        for key in ("vision_config", "audio_config")
        if isinstance(config.get(key), Mapping)
    ]
    if config.get("model_type") == "muse_spark" or not towers:
        return 0
    text = config.get("text_config") or config
    names = [str(config.get("model_type"))]
    names += [str(tower.get("model_type")) for tower in towers[1:]]
    try:
        return sum(TOWERS[name](tower, text) for name, tower in zip(names, towers, strict=True))
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


def qwen2_vl(vision: Json, text: Json) -> int:
    """Blocks with norms of two vectors and a plain feed-forward part of four times the width."""
    width = vision["embed_dim"]
    block = (4 * width + 4) * width + (8 * width + 5) * width + 4 * width
    return int(_qwen2_tower(vision, width, block, vision["hidden_size"]) + width)


def qwen2_5_vl(vision: Json, text: Json) -> int:
    """Blocks with norms of one vector and a gated feed-forward part with biases."""
    width, size = vision["hidden_size"], vision["intermediate_size"]
    block = (4 * width + 4) * width + 3 * width * size + 2 * size + width + 2 * width
    return _qwen2_tower(vision, width, block, vision["out_hidden_size"])


def _qwen2_tower(vision: Json, width: int, block: int, out: int) -> int:
    """Patches without bias, blocks, and a merger whose norm is one vector."""
    merged = width * vision["spatial_merge_size"] ** 2
    patches = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merge = width + merged * (merged + 1) + out * (merged + 1)
    return int(width * patches + vision["depth"] * block + merge)


def siglip(width: int, size: int, layers: int, patch: int, positions: int) -> int:
    """Blocks with biases, a learned place for each patch, a norm at the end."""
    block = 4 * width * (width + 1) + 2 * width * size + size + width + 4 * width
    return width * (3 * patch**2 + 1) + positions * width + layers * block + 2 * width


def gemma3(vision: Json, text: Json) -> int:
    """SigLIP, a norm and a matrix into the text model's width."""
    width, patch = vision["hidden_size"], vision["patch_size"]
    tower = siglip(
        width,
        vision["intermediate_size"],
        vision["num_hidden_layers"],
        patch,
        (vision["image_size"] // patch) ** 2,
    )
    return int(tower + width * (text["hidden_size"] + 1))


def moonvit(vision: Json, text: Json) -> int:
    """MoonViT (Kimi's ``modeling_kimi_k25.py``): a SigLIP and a merger of its patches."""
    width = vision["vt_hidden_size"]
    rows, columns = vision["merge_kernel_size"]
    merged = width * rows * columns
    tower = siglip(
        width,
        vision["vt_intermediate_size"],
        vision["vt_num_hidden_layers"],
        vision["patch_size"],
        vision["init_pos_emb_height"] * vision["init_pos_emb_width"],
    )
    return int(tower + 2 * width + (merged + 1) * (merged + vision["text_hidden_size"]))


def gemma4(vision: Json, text: Json) -> int:
    """Blocks with four norms and gates; places by row and by column; a matrix into the text."""
    width, dim = vision["hidden_size"], vision["head_dim"]
    heads = vision["num_attention_heads"] + vision["num_key_value_heads"]
    block = 2 * width * dim * heads + 3 * width * vision["intermediate_size"] + 4 * width + 2 * dim
    block += 7 * CLIP_BOUNDS * bool(vision.get("use_clipped_linears"))
    patches = 3 * vision["patch_size"] ** 2 + 2 * vision["position_embedding_size"]
    standard = 2 * bool(vision.get("standardize")) + text["hidden_size"]
    return int(width * (patches + standard) + vision["num_hidden_layers"] * block)


def gemma4_audio(audio: Json, text: Json) -> int:
    """Conformer blocks: two feed-forward parts, attention with relative places, a convolution."""
    width, out = audio["hidden_size"], audio["output_proj_dims"]
    first, second = audio["subsampling_conv_channels"]
    matrices = 16 + 5 + 3  # feed-forward parts, attention, convolution
    block = matrices * width**2 + (audio["conv_kernel_size"] + 9) * width
    block += width // audio["num_attention_heads"]
    block += 10 * CLIP_BOUNDS * bool(audio.get("use_clipped_linears"))
    convolutions = (9 + 1) * first + (9 * first + 1) * second + first // 4 * second * width
    last = (width + 1 + text["hidden_size"]) * out
    return int(convolutions + audio["num_hidden_layers"] * block + last)


CLIP_BOUNDS = 4  # Gemma4ClippableLinear: bounds of its input and output, in a checkpoint

TOWERS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "mistral3": pixtral,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_audio": gemma4_audio,
    "kimi_k25": moonvit,
    "kimi_vl": moonvit,
}
