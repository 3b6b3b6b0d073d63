"""Folders of published models in their own layout: real headers, holes for the data.

Names, shapes and dtypes of the tensors are written down here from the published checkpoints, not
taken from ``uma.architecture``, so that both can be compared. A model of 641 GiB takes megabytes.
"""

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

Tensor = tuple[str, str, tuple[int, ...]]

WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
SHARD_BYTES = 5 * 10**9
FP8_BLOCK = 128

# The published files as the survey of estimators counted them: parameters (scales of fp8 included)
# and GiB of all tensors.
PUBLISHED = {
    "llama-3-8b": (8_030_261_248, 14.96),
    "llama-3-70b": (70_553_706_496, 131.42),
    "qwen3-30b-a3b": (30_532_122_624, 56.87),
    "deepseek-v3": (684_531_386_000, 641.29),
    "gemma-3-27b": (27_432_406_640, 51.10),
}


def tensors(config: dict[str, Any]) -> list[Tensor]:
    """Every tensor of the checkpoint that ``config`` describes."""
    kind = config["model_type"]
    if kind == "deepseek_v3":
        return list(_deepseek(config))
    if kind == "gemma3":
        return list(_gemma(config.get("text_config", config)))
    return list(_llama(config))


def write(folder: Path, config: dict[str, Any]) -> int:
    """Write the folder, and return the bytes that its tensors would take."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[Tensor]] = [[]]
    size = total = 0
    for tensor in tensors(config):
        bytes_ = _bytes(tensor)
        if size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += bytes_
        total += bytes_
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard)
        places |= {tensor[0]: name for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _bytes(tensor: Tensor) -> int:
    return prod(tensor[2]) * WIDTHS[tensor[1]]


def _write_shard(path: Path, shard: list[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        name, dtype, shape = tensor
        begin, end = end, end + _bytes(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def _all(prefix: str, dtype: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    return ((f"{prefix}{name}.weight", dtype, shape) for name, shape in shapes.items())


def _attention(hidden: int, heads: int, kv_heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    query, key = heads * dim, kv_heads * dim
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
    }


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    up = {f"{prefix}{name}_proj": (width, hidden) for name in ("gate", "up")}
    return up | {f"{prefix}down_proj": (hidden, width)}


def _llama(c: dict[str, Any]) -> Iterator[Tensor]:
    """Llama 3 and Qwen3-MoE."""
    hidden, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    dim = c.get("head_dim") or hidden // heads
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(c["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= _attention(hidden, heads, c["num_key_value_heads"], dim)
        if "num_experts" in c:
            shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
            shapes |= {"mlp.gate": (c["num_experts"], hidden)}
            for expert in range(c["num_experts"]):
                shapes |= _mlp(f"mlp.experts.{expert}.", hidden, c["moe_intermediate_size"])
        else:
            shapes |= _mlp("mlp.", hidden, c["intermediate_size"])
        yield from _all(f"model.layers.{layer}.", "BF16", shapes)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def _fp8(prefix: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Matrices in fp8, with a float32 scale for each block of 128 x 128."""
    for name, (rows, columns) in shapes.items():
        yield f"{prefix}{name}.weight", "F8_E4M3", (rows, columns)
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        yield f"{prefix}{name}.weight_scale_inv", "F32", blocks


def _deepseek(c: dict[str, Any]) -> Iterator[Tensor]:
    """DeepSeek-V3: one layer more than it says, for multi-token prediction."""
    hidden, heads, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    rank, q_rank, rope = c["kv_lora_rank"], c["q_lora_rank"], c["qk_rope_head_dim"]
    nope, values = c["qk_nope_head_dim"], c["v_head_dim"]
    attention = {
        "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
        "self_attn.kv_b_proj": (heads * (nope + values), rank),
        "self_attn.o_proj": (hidden, heads * values),
    }
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(c["num_hidden_layers"] + 1):
        prefix = f"model.layers.{layer}."
        norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        norms |= {"self_attn.q_a_layernorm": (q_rank,), "self_attn.kv_a_layernorm": (rank,)}
        yield from _all(prefix, "BF16", norms)
        yield from _fp8(prefix, attention)
        if layer < c["first_k_dense_replace"]:
            yield from _fp8(prefix, _mlp("mlp.", hidden, c["intermediate_size"]))
        else:
            experts = c["n_routed_experts"]
            yield f"{prefix}mlp.gate.weight", "BF16", (experts, hidden)
            yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", (experts,)
            for part in [*(f"experts.{i}" for i in range(experts)), "shared_experts"]:
                widths = _mlp(f"mlp.{part}.", hidden, c["moe_intermediate_size"])
                yield from _fp8(prefix, widths)
    norms = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
    ends = dict.fromkeys(("embed_tokens", "shared_head.head"), (vocab, hidden))
    yield from _all(prefix, "BF16", norms | ends | {"eh_proj": (hidden, 2 * hidden)})
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def _gemma(c: dict[str, Any]) -> Iterator[Tensor]:
    """Gemma 3 with its vision tower, SigLIP's, in which every matrix has a bias."""
    hidden, dim, vocab = c["hidden_size"], c["head_dim"], c["vocab_size"]
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
    shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    shapes |= _attention(hidden, c["num_attention_heads"], c["num_key_value_heads"], dim)
    shapes |= _mlp("mlp.", hidden, c["intermediate_size"])
    prefix = "language_model.model."
    yield f"{prefix}embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(c["num_hidden_layers"]):
        yield from _all(f"{prefix}layers.{layer}.", "BF16", shapes)
    yield f"{prefix}norm.weight", "BF16", (hidden,)
    width, size = 1152, 4304
    yield "multi_modal_projector.mm_input_projection_weight", "BF16", (width, hidden)
    yield "multi_modal_projector.mm_soft_emb_norm.weight", "BF16", (width,)
    prefix = "vision_tower.vision_model."
    yield f"{prefix}embeddings.patch_embedding.weight", "BF16", (width, 3, 14, 14)
    yield f"{prefix}embeddings.patch_embedding.bias", "BF16", (width,)
    yield f"{prefix}embeddings.position_embedding.weight", "BF16", (4096, width)
    square = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj")}
    block: dict[str, tuple[int, ...]] = square | {"self_attn.out_proj": (width, width)}
    block |= {"mlp.fc1": (size, width), "mlp.fc2": (width, size)}
    block |= {"layer_norm1": (width,), "layer_norm2": (width,)}
    layers = {f"encoder.layers.{i}.{name}": s for i in range(27) for name, s in block.items()}
    for name, shape in (layers | {"post_layernorm": (width,)}).items():
        yield f"{prefix}{name}.weight", "BF16", shape
        yield f"{prefix}{name}.bias", "BF16", shape[:1]
