"""Hybrids of softmax attention with short convolutions (LFM2) and with Mamba-1 (Jamba)."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import attention, attention_part
from uma.architecture.layers import (
    Architecture,
    Experts,
    FeedForward,
    Mixer,
    Recurrent,
    State,
)
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    linear,
    norms,
    qkvo,
    router,
    switch_glu,
    under,
)


def lfm2(c: Config) -> Architecture:
    """Short convolutions with softmax attention in some layers. The head is tied."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    full = full_layers(c)
    size = lfm2_intermediate_size(c)
    mlp = under(
        "feed_forward",
        linear("w1", size, hidden),
        linear("w3", size, hidden),
        linear("w2", hidden, size),
    )
    layer_norms = norms(hidden, "operator_norm", "ffn_norm")
    softmax: tuple[Mixer, Part] = (attention(c, head_dim), lfm2_attention(c, head_dim))
    layers = []
    for i in range(c.num_hidden_layers):
        mixer, part = softmax if i in full else lfm2_convolution(c)
        feed_forward = [FeedForward(size)]
        layers.append(layer(f"model.layers.{i}", [mixer], feed_forward, part, mlp, layer_norms))
    return decoder(c, layers, tied=True, norm="embedding_norm")


def full_layers(c: Config) -> list[int]:
    """Layers with softmax attention."""
    named: list[int] | None = c.full_attn_idxs
    if named is not None:
        return named
    return [i for i, kind in enumerate(c.layer_types) if kind == "full_attention"]


def lfm2_moe(c: Config) -> Architecture:
    """LFM2 with experts after the first ``num_dense_layers``."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    moe = under(
        "feed_forward",
        router("gate", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, c.moe_intermediate_size),
        array("expert_bias", c.num_experts, dtype="float32") if c.use_expert_bias else (),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    dense = (
        FeedForward(c.intermediate_size),
        gated_mlp("feed_forward", hidden, c.intermediate_size),
    )
    softmax: tuple[Mixer, Part] = (attention(c, head_dim), lfm2_attention(c, head_dim))
    layer_norms = norms(hidden, "operator_norm", "ffn_norm")
    layers = []
    for i in range(c.num_hidden_layers):
        mixer, part = softmax if i in full_layers(c) else lfm2_convolution(c)
        feed_forward, mlp = dense if i < c.num_dense_layers else (experts, moe)
        layers.append(layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms))
    return decoder(c, layers, tied=True, norm="embedding_norm")


def lfm2_attention(c: Config, head_dim: int) -> Part:
    heads, hidden = c.num_attention_heads, c.hidden_size
    part = qkvo("self_attn", hidden, heads, c.kv_heads, head_dim, o_name="out_proj")
    return part + under("self_attn", norms(head_dim, "q_layernorm", "k_layernorm"))


def lfm2_convolution(c: Config) -> tuple[Recurrent, Part]:
    hidden, kernel, bias = c.hidden_size, c.conv_L_cache, c.conv_bias
    part = under(
        "conv",
        array("conv", hidden, kernel, 1),
        array("conv.bias", hidden) if bias else (),
        linear("in_proj", 3 * hidden, hidden, bias),
        linear("out_proj", hidden, hidden, bias),
    )
    state = State("conv", (kernel - 1, hidden), "model", hidden)
    return Recurrent("short_conv", (state,), inner_size=hidden), part


def lfm2_intermediate_size(c: Config) -> int:
    """``block_ff_dim``, taken to two thirds and rounded up where the config says so."""
    size = int(c.block_ff_dim or c.intermediate_size)
    if not c.block_auto_adjust_ff_dim:
        return size
    multiple = c.block_multiple_of
    size = int(c.block_ffn_dim_multiplier * int(2 * size / 3))
    return int(multiple * ((size + multiple - 1) // multiple))


def mamba1_mixer(inner: int, state: int, kernel: int, view: bool) -> Recurrent:
    """``view``: the state is cut from an array that holds it for every token of a call."""
    states = (
        State("conv", (kernel - 1, inner), "model", inner),
        State("ssm", (inner, state), "model", inner * state if view else 0),
    )
    return Recurrent("mamba", states, 1, inner, inner)


def mamba1_part(
    name: str, hidden: int, inner: int, state: int, kernel: int, rank: int, bias: bool, conv: bool
) -> Part:
    return under(
        name,
        linear("in_proj", 2 * inner, hidden, bias),
        array("conv1d", inner, kernel, 1),
        array("conv1d.bias", inner) if conv else (),
        linear("x_proj", rank + 2 * state, inner),
        linear("dt_proj", inner, rank, bias=True),
        array("A_log", inner, state),
        array("D", inner),
        linear("out_proj", hidden, inner, bias),
    )


def time_step_rank(c: Config, key: str) -> int:
    """The rank of the time step; ``auto`` is a sixteenth of the width, rounded up."""
    rank = getattr(c, key)
    return -(-c.hidden_size // 16) if rank == "auto" else int(rank)


def mamba(c: Config) -> Architecture:
    hidden, inner, state, kernel = c.hidden_size, c.intermediate_size, c.state_size, c.conv_kernel
    rank = time_step_rank(c, "time_step_rank")
    part = mamba1_part(
        "mixer", hidden, inner, state, kernel, rank, c.use_bias, c.use_conv_bias
    ) + array("norm", hidden)
    mixer = mamba1_mixer(inner, state, kernel, view=False)
    layers = [layer(f"backbone.layers.{i}", [mixer], [], part) for i in range(c.num_hidden_layers)]
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        prefix="backbone",
        embedding="embeddings",
        norm="norm_f",
    )


def jamba(c: Config) -> Architecture:
    """Mamba-1 with attention in every ``attn_layer_period``-th layer, experts in some."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    inner, state, kernel = c.mamba_expand * hidden, c.mamba_d_state, c.mamba_d_conv
    rank = time_step_rank(c, "mamba_dt_rank")
    recurrent: tuple[Mixer, Part] = (
        mamba1_mixer(inner, state, kernel, view=True),
        mamba1_part(
            "mamba", hidden, inner, state, kernel, rank, c.mamba_proj_bias, c.mamba_conv_bias
        )
        + array("mamba.dt_layernorm", rank)
        + array("mamba.b_layernorm", state)
        + array("mamba.c_layernorm", state),
    )
    softmax: tuple[Mixer, Part] = (attention(c, head_dim), attention_part(c, head_dim))
    moe = under(
        "feed_forward",
        router("router", c.num_experts, hidden),
        switch_glu("switch_mlp", c.num_experts, hidden, c.intermediate_size),
    )
    experts = Experts(c.num_experts, c.num_experts_per_tok, c.intermediate_size)
    dense = (
        FeedForward(c.intermediate_size),
        gated_mlp("feed_forward", hidden, c.intermediate_size),
    )
    layer_norms = norms(hidden, "input_layernorm", "pre_ff_layernorm")
    layers = []
    for i, kind in enumerate(jamba_blocks(c)):
        mixer, part = softmax if kind == "attention" else recurrent
        sparse = c.num_experts > 1 and (i + c.expert_layer_offset) % c.expert_layer_period == 0
        feed_forward, mlp = (experts, moe) if sparse else dense
        layers.append(layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms))
    return decoder(c, layers, tied=c.tie_word_embeddings, norm="final_layernorm")


def jamba_blocks(c: Config) -> list[str]:
    named: list[str] | None = c.layers_block_type
    if named is not None:
        return named
    return [
        "attention" if i % c.attn_layer_period == c.attn_layer_offset else "mamba"
        for i in range(c.num_hidden_layers)
    ]


MODULES: Modules = {
    "lfm2": (lfm2, {"block_ff_dim": None, "full_attn_idxs": None}),
    "lfm2_moe": (lfm2_moe, {"full_attn_idxs": None}),
    "mamba": (mamba, {"tie_word_embeddings": True}),
    "jamba": (
        jamba,
        {
            "mamba_dt_rank": "auto",
            "mamba_proj_bias": False,
            "mamba_conv_bias": True,
            "layers_block_type": None,
            "tie_word_embeddings": True,
        },
    ),
}
