"""The matrices of a layer by their roles, and the order of ``mlx_lm.models``' modules (0.32.2).

The order in which a module holds its parts is that in which the optimizer's new arrays are
evaluated, and so decides what else of a step is alive.
"""

from functools import lru_cache

# Names of the same matrices in other families, by the roles that a layer is laid out in.
ROLES = {
    "q_proj": ("q_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_q"),
    "k_proj": ("k_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_k"),
    "v_proj": ("v_proj", "qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv", "c_v"),
    "o_proj": ("o_proj", "out_proj", "dense", "c_proj", "wo"),
    "gate_proj": ("gate_proj", "gate_up_proj", "w1", "fc1", "linear_in"),
    "up_proj": ("up_proj", "gate_up_proj", "w3", "w2", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
    "shared_gate_proj": ("gate_proj",),
    "shared_up_proj": ("up_proj",),
    "shared_down_proj": ("down_proj",),
    "in_proj": ("in_proj", "in_proj_qkvz", "in_proj_qkv"),
    "gate": (".gate", ".router"),
}

# Trained parts in the order in which mlx-lm's modules hold them, mixers first.
ORDER = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "embed_q",
    "unembed_out",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_norm",
    "conv1d",
    "in_proj",
    "dt_bias",
    "A_log",
    "D",
    "norm",
    "out_proj",
    "gate",
    "gate_proj",
    "down_proj",
    "up_proj",
    "switch gate_proj",
    "switch up_proj",
    "switch down_proj",
    "shared_gate_proj",
    "shared_down_proj",
    "shared_up_proj",
    "shared_expert_gate",
    "layernorm",
    "other",
)

# Models whose dense layers hold up_proj before down_proj.
_UP_FIRST = """
apertus bailing cohere deepseek dots1 exaone_moe falcon_h1 glm4_moe jamba kimi lfm2_moe llama4
longcat mimo minicpm nemotron olmo_hybrid
"""
UP_FIRST = tuple(_UP_FIRST.split())


def place_of(role: str) -> str:
    """The name of a role in ``ORDER``."""
    role = "in_proj" if role.startswith("in_proj") else role
    return role if role in ORDER else "other"


@lru_cache
def module_order(model_type: str) -> tuple[str, ...]:
    """``ORDER`` as the models of a type have it."""
    order = list(ORDER)
    if model_type.startswith(UP_FIRST):
        for prefix in ("", "shared_"):
            up, down = (order.index(f"{prefix}{name}_proj") for name in ("up", "down"))
            order[up], order[down] = order[down], order[up]
    return tuple(order)
