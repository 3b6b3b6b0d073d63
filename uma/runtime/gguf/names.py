"""Which parameter of mlx-lm's module each GGUF tensor is, and what must be done to it.

Names of GGUF tensors: ``gguf-py/gguf/constants.py`` (``TENSOR_NAMES``). What llama.cpp's converter
did to each: ``conversion/{llama,gemma,phi,qwen}.py``, both llama.cpp b11434. Names of parameters:
``mlx_lm/models/*.py``, mlx-lm 0.32.2.
"""

import re
from dataclasses import dataclass
from typing import Literal

from uma.errors import CheckpointError, UnsupportedModel

Change = Literal["none", "query rows", "key rows", "minus one"]
"""``query rows`` and ``key rows``: llama.cpp reorders the rows of each head for its interleaved
rotary embedding. ``minus one``: it stores Gemma's norm weights as 1 + weight."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter of mlx-lm's module, and the change that undoes llama.cpp's."""

    name: str
    change: Change = "none"


ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FEED_FORWARD = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _experts(block: str) -> dict[str, str]:
    return {
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.switch_mlp.gate_proj",
        "ffn_up_exps": f"{block}.switch_mlp.up_proj",
        "ffn_down_exps": f"{block}.switch_mlp.down_proj",
    }


LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": ATTENTION | FEED_FORWARD,
    "mixtral": ATTENTION | _experts("block_sparse_moe"),
    "qwen2": ATTENTION | FEED_FORWARD,
    "qwen3": ATTENTION | HEAD_NORMS | FEED_FORWARD,
    "qwen3_moe": ATTENTION | HEAD_NORMS | _experts("mlp"),
    "gemma2": ATTENTION | FEED_FORWARD | GEMMA_NORMS,
    "gemma3_text": ATTENTION | HEAD_NORMS | FEED_FORWARD | GEMMA_NORMS,
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}
"""By ``model_type`` of mlx-lm: names in ``blk.N.`` and names in ``model.layers.N.``"""

MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tables of the rotary embedding, which ``config`` reads."""

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_MODEL = re.compile(r"(\w+)\.(weight)")


def target(model_type: str, tensor: str, num_hidden_layers: int) -> Target | None:
    """The parameter that ``tensor`` becomes, or ``None`` where it is no weight.

    Raises:
        UnsupportedModel: A tensor that the architecture does not have.
    """
    if tensor in NOT_WEIGHTS:
        return None
    if match := _LAYER.fullmatch(tensor):
        layer, part, kind = match.groups()
        name = LAYER_NAMES[model_type].get(part)
        if name is not None and int(layer) < num_hidden_layers:
            return Target(f"model.layers.{layer}.{name}.{kind}", _change(model_type, part))
    elif match := _MODEL.fullmatch(tensor):
        name = MODEL_NAMES.get(match[1])
        if name is not None:
            return Target(f"{name}.weight", _change(model_type, match[1]))
    raise UnsupportedModel(
        f"GGUF tensor {tensor[:80]!r} is not part of {model_type} as mlx-lm has it; "
        "convert the original model instead"
    )


def _change(model_type: str, part: str) -> Change:
    if model_type in ("llama", "mixtral"):
        changes: dict[str, Change] = {"attn_q": "query rows", "attn_k": "key rows"}
        return changes.get(part, "none")
    if model_type.startswith("gemma") and part.endswith("norm"):
        return "minus one"
    return "none"


def require_all(model_type: str, names: set[str], num_hidden_layers: int) -> None:
    """Check that every weight of every layer is among ``names``; biases are optional.

    Raises:
        CheckpointError: Names the first weight that is missing.
    """
    wanted = ["model.embed_tokens", "model.norm"] + [
        f"model.layers.{layer}.{name}"
        for layer in range(num_hidden_layers)
        for name in LAYER_NAMES[model_type].values()
    ]
    for name in wanted:
        if f"{name}.weight" not in names:
            raise CheckpointError(f"this GGUF file has no tensor for {name}; download it again")
