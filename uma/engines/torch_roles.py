"""The roles that the matrices of a layer have where it is laid out as torch runs it."""

from uma.architecture.layers import Parameter

_QKV, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_MIXED = ("in_proj", "in_proj_z")
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")
ALL = (*_QKV, *_LATENT, "o_proj", *_GATED, "down_proj", *_MIXED, "out_proj")
# By the names that they have in families of models, the last parts.
ROLES: dict[str, tuple[str, ...]] = {
    **{role: (role,) for role in ALL},
    "q_a_proj": ("q_proj",),
    "q_b_proj": ("q_proj",),
    "kv_proj": ("k_proj", "v_proj"),
    **dict.fromkeys(("qkv_proj", "c_attn", "query_key_value", "wqkv", "Wqkv"), _QKV),
    **dict.fromkeys(("dense", "wo", "o_b_proj"), ("o_proj",)),
    "out_proj": ("o_proj", "out_proj"),
    **dict.fromkeys(("gate_up_proj", "input_linear"), _GATED),
    **dict.fromkeys(("w1", "c_fc_0"), ("gate_proj",)),
    **dict.fromkeys(("w3", "v1", "fc1", "c_fc", "c_fc_1", "dense_h_to_4h"), ("up_proj",)),
    **dict.fromkeys(("fc2", "dense_4h_to_h", "output_linear"), ("down_proj",)),
    **dict.fromkeys(("in_proj", "in_proj_qkvz"), _MIXED),
    "in_proj_qkv": ("in_proj",),
}
# Names of two: one that gives less than it reads is the last of a feed-forward layer.
_EITHER = {"c_proj": ("o_proj", "down_proj"), "w2": ("up_proj", "down_proj")}


def roles_of(parameter: Parameter) -> tuple[str, ...]:
    """Roles of a matrix; none where what it computes is not laid out.

    >>> roles_of(Parameter("layers.0.mlp.c_proj", (1600, 6400), "matrix"))
    ('down_proj',)
    """
    name = parameter.name.rpartition(".")[2]
    if name in _EITHER:
        rows, columns = parameter.shape[-2:]
        return (_EITHER[name][rows < columns],)
    return ROLES.get(name, ())
