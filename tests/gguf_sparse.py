"""Sparse GGUF files: a real header, a hole for the data, so that llama.cpp can be asked about them.

Names come from the gguf package, keys from the config. Only what llama.cpp needs to count memory is
written; the vocabulary is left out (``no_vocab``).
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uma.architecture.layers import Architecture
from uma.engines.llama_cpp_weights import Tensor, tensor_types
from uma.quantization import gguf_bytes

UINT32, FLOAT32, BOOL, STRING = 4, 6, 7, 8
ALIGNMENT = 32


def write(
    path: Path, name: str, architecture: Architecture, config: Mapping[str, Any], quant: str
) -> None:
    """Write ``architecture`` in the mix ``quant`` under llama.cpp's name of its family."""
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map

    family = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(family, architecture.num_hidden_layers)
    tensors, offset = [], 0
    for tensor, gguf_type in tensor_types(architecture, quant):
        size = gguf_bytes(gguf_type, tensor.shape)
        described = _name(names, tensor), tensor.shape[::-1], int(GGMLQuantizationType[gguf_type])
        tensors.append((*described, offset))
        offset += size + -size % ALIGNMENT
    keys = {"general.architecture": name, "tokenizer.ggml.model": "no_vocab"}
    keys |= {f"{name}.{key}": value for key, value in family_keys(name, config).items()}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    header += b"".join(_string(key) + _value(value) for key, value in keys.items())
    for title, shape, gguf_type, start in tensors:
        header += _string(title) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", gguf_type, start)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + -len(header) % ALIGNMENT + offset)


def _name(names: Any, tensor: Tensor) -> str:
    name = tensor.name.removeprefix("language_model.")
    for theirs, ours in (
        (".switch_mlp.", ".experts."),
        (".embed_q", ".k_b_proj"),
        (".unembed_out", ".v_b_proj"),
        ("block_sparse_moe.", "mlp."),
        (".e_score_correction_bias", ".e_score_correction.bias"),
    ):
        name = name.replace(theirs, ours)
    stem, dot, last = name.rpartition(".")
    known, ending = names.get_name(name), "weight"
    if known is None and dot:
        known, ending = names.get_name(stem), last
    if known is None:
        raise ValueError(f"the gguf package has no name for {tensor.name}")
    return f"{known}.{ending}"


def family_keys(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp reads from a file of the family ``name``."""
    text = config.get("text_config", config)
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_dim = text.get("head_dim") or hidden // heads
    keys = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": text["vocab_size"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    if text.get("sliding_window"):
        keys["attention.sliding_window"] = text["sliding_window"]
    experts = (
        text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    )
    if experts:
        keys |= {
            "expert_count": experts,
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text.get("moe_intermediate_size")
            or text["intermediate_size"],
        }
    return keys | (_latent_keys(text) if text.get("kv_lora_rank") else {})


def _latent_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope, nope = text["kv_lora_rank"], text["qk_rope_head_dim"], text["qk_nope_head_dim"]
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": text["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "leading_dense_block_count": text["first_k_dense_replace"],
        "expert_shared_count": text["n_shared_experts"],
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }
    return keys | (
        {"attention.q_lora_rank": text["q_lora_rank"]} if text.get("q_lora_rank") else {}
    )


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<I", STRING) + _string(value)
