"""The shape that each tensor of a GGUF file must have, from its ``config.json``.

Shapes: ``load_arch_tensors`` of src/models/*.cpp, llama.cpp b11434, in numpy's order.
"""

from collections.abc import Mapping
from typing import Any

from uma.checkpoint.gguf import GGUFHeader
from uma.errors import CheckpointError

MATRICES = {
    "token_embd": "vocab hidden",
    "output": "vocab hidden",
    "attn_q": "queries hidden",
    "attn_k": "keys hidden",
    "attn_v": "keys hidden",
    "attn_qkv": "queries+2*keys hidden",
    "attn_output": "hidden queries",
    "ffn_gate": "inner hidden",
    "ffn_up": "inner hidden",
    "ffn_down": "hidden inner",
    "ffn_gate_inp": "experts hidden",
    "ffn_gate_exps": "experts expert_inner hidden",
    "ffn_up_exps": "experts expert_inner hidden",
    "ffn_down_exps": "experts hidden expert_inner",
    "attn_q_norm": "head",
    "attn_k_norm": "head",
}
"""By the part of a tensor's name; a norm that is not here spans the hidden size."""


def require_shapes(header: GGUFHeader, fields: Mapping[str, Any]) -> None:
    """Check the tensors of ``header`` against the fields of ``config.json``.

    Raises:
        CheckpointError: Names the first tensor of another shape.
    """
    sizes = _sizes(fields)
    for tensor in header.tensors:
        *_, part, kind = ("", *tensor.name.split("."))[-3:]
        names = MATRICES.get(part, "hidden" if part.endswith("norm") else "")
        if not names:
            continue
        expected = tuple(sizes[name] for name in names.split())
        if part == "ffn_up" and fields["model_type"] == "phi3":  # gate and up in one
            expected = (2 * expected[0], expected[1])
        if kind == "bias":
            expected = expected[:-1]
        if tensor.shape != expected:
            raise CheckpointError(
                f"GGUF tensor {tensor.name[:80]} has shape {tensor.shape}; "
                f"its metadata asks for {expected}"
            )


def _sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    queries = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    return {
        "vocab": fields["vocab_size"],
        "hidden": fields["hidden_size"],
        "inner": fields["intermediate_size"],
        "head": fields["head_dim"],
        "queries": queries,
        "keys": keys,
        "queries+2*keys": queries + 2 * keys,
        "experts": fields.get("num_experts", fields.get("num_local_experts", 0)),
        "expert_inner": fields.get("moe_intermediate_size", fields["intermediate_size"]),
    }
