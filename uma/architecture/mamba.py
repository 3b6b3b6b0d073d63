"""State-space models and their hybrids with softmax attention: Mamba-2, Falcon-H1, Nemotron-H."""

from dataclasses import dataclass

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, attention_part
from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Layer,
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
    switch_mlp,
    under,
)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer, which every config names in its own way."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    inner: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, and B and C of every group."""
        return self.inner + 2 * self.groups * self.state

    def mixer(self) -> Recurrent:
        states = (
            State("conv", (self.kernel - 1, self.channels), "model", self.channels),
            State("ssm", (self.heads, self.head_dim, self.state), "float32"),
        )
        return Recurrent("mamba2", states, self.heads, self.head_dim, self.inner)

    def part(
        self,
        name: str,
        hidden_size: int,
        *,
        in_bias: bool,
        conv_bias: bool,
        out_bias: bool,
        norm: bool = True,
        log_dtype: str = "model",
    ) -> Part:
        return under(
            name,
            array("conv1d", self.channels, self.kernel, 1),
            array("conv1d.bias", self.channels) if conv_bias else (),
            linear("in_proj", self.inner + self.channels + self.heads, hidden_size, in_bias),
            array("dt_bias", self.heads),
            array("A_log", self.heads, dtype="float32" if log_dtype == "float32" else "model"),
            array("D", self.heads),
            array("norm", self.inner) if norm else (),
            linear("out_proj", hidden_size, self.inner, out_bias),
        )


def mamba2(c: Config) -> Architecture:
    state = c.get("ssm_state_size") or c.state_size
    sizes = Mamba2(
        c.num_heads, c.head_dim, c.n_groups, state, c.conv_kernel, c.num_heads * c.head_dim
    )
    part = sizes.part(
        "mixer", c.hidden_size, in_bias=c.use_bias, conv_bias=c.use_conv_bias, out_bias=c.use_bias
    ) + array("norm", c.hidden_size)
    layers = [
        layer(f"backbone.layers.{i}", [sizes.mixer()], [], part) for i in range(c.num_hidden_layers)
    ]
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        prefix="backbone",
        embedding="embeddings",
        norm="norm_f",
    )


def falcon_h1(c: Config) -> Architecture:
    """Mamba-2 and attention side by side in every layer."""
    hidden = c.hidden_size
    sizes = Mamba2(
        c.mamba_n_heads,
        c.mamba_d_head,
        c.mamba_n_groups,
        c.mamba_d_state,
        c.mamba_d_conv,
        c.mamba_d_ssm,
    )
    part = (
        sizes.part(
            "mamba",
            hidden,
            in_bias=c.mamba_proj_bias,
            conv_bias=c.mamba_conv_bias,
            out_bias=c.projectors_bias,
            norm=c.mamba_rms_norm,
        )
        + attention_part(c, c.head_dim, c.attention_bias)
        + gated_mlp("feed_forward", hidden, c.intermediate_size, c.mlp_bias)
        + norms(hidden, "input_layernorm", "pre_ff_layernorm")
    )
    mixers: list[Mixer] = [sizes.mixer(), attention(c, c.head_dim)]
    layers = [
        layer(f"model.layers.{i}", mixers, [FeedForward(c.intermediate_size)], part)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings, norm="final_layernorm")


def granitemoehybrid(c: Config) -> Architecture:
    """Mamba-2 or attention by ``layer_types``; experts if there are any."""
    hidden, head_dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    sparse = bool(c.get("num_local_experts"))
    feed_forward, mlp = granite_experts(c) if sparse else granite_mlp(c)
    softmax: tuple[Mixer, Part] = (
        attention(c, head_dim),
        attention_part(c, head_dim, c.attention_bias),
    )

    def block(i: int, kind: str) -> Layer:
        mixer, part = softmax if kind in ("attention", "full_attention") else granite_mamba(c)
        layer_norms = norms(hidden, *LLAMA_NORMS)
        return layer(f"model.layers.{i}", [mixer], [feed_forward], part, mlp, layer_norms)

    # IBM's own have attention at 5, 15, 25, ...; transformers' class would have none at all.
    kinds = c.get("layer_types") or [
        "attention" if i % 10 == 5 else "mamba" for i in range(c.num_hidden_layers)
    ]
    layers = [block(i, kind) for i, kind in enumerate(kinds)]
    return decoder(c, layers, tied=c.tie_word_embeddings)


def granite_mamba(c: Config) -> tuple[Recurrent, Part]:
    sizes = Mamba2(
        c.mamba_n_heads,
        c.mamba_d_head,
        c.mamba_n_groups,
        c.mamba_d_state,
        c.mamba_d_conv,
        c.mamba_n_heads * c.mamba_d_head,
    )
    bias = bool(c.mamba_proj_bias)
    part = sizes.part(
        "mamba", c.hidden_size, in_bias=bias, conv_bias=bool(c.mamba_conv_bias), out_bias=bias
    )
    return sizes.mixer(), part


def granite_mlp(c: Config) -> tuple[FeedForward, Part]:
    return (
        FeedForward(c.intermediate_size),
        gated_mlp("mlp", c.hidden_size, c.intermediate_size, c.mlp_bias),
    )


def granite_experts(c: Config) -> tuple[Experts, Part]:
    hidden, count, shared = c.hidden_size, c.num_local_experts, c.shared_intermediate_size
    part = (
        linear("shared_mlp.input_linear", 2 * shared, hidden)
        + linear("shared_mlp.output_linear", hidden, shared)
        + switch_glu("block_sparse_moe.switch_mlp", count, hidden, c.intermediate_size)
        + router("block_sparse_moe.router.layer", count, hidden)
    )
    return Experts(count, c.num_experts_per_tok, c.intermediate_size, shared), part


# mlx-lm 0.32.2, nemotron_h.py: names of layers_block_type.
BLOCK_TYPES = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "conv": "M",
    "moe": "E",
    "mlp": "-",
}


def nemotron_h(c: Config) -> Architecture:
    """One part a layer, by a pattern of M (Mamba-2), * (attention), - (dense) and E (experts)."""
    kinds = c.layers_block_type or c.layer_types or ()
    pattern = c.hybrid_override_pattern or [BLOCK_TYPES[kind] for kind in kinds]
    blocks = {
        "M": nemotron_mamba,
        "*": nemotron_attention,
        "-": nemotron_mlp,
        "E": nemotron_experts,
    }
    norm = array("norm", c.hidden_size)
    layers = []
    for i, kind in enumerate(pattern):
        mixers, feed_forward, part = blocks[kind](c)
        prefix = f"backbone.layers.{i}"
        layers.append(layer(prefix, mixers, feed_forward, part, norm))
    return decoder(c, layers, tied=False, prefix="backbone", embedding="embeddings", norm="norm_f")


Block = tuple[list[Mixer], list[FeedForward | Experts], Part]


def nemotron_mamba(c: Config) -> Block:
    sizes = Mamba2(
        c.mamba_num_heads,
        c.mamba_head_dim,
        c.n_groups,
        c.ssm_state_size,
        c.conv_kernel,
        c.mamba_num_heads * c.mamba_head_dim,
    )
    part = sizes.part(
        "mixer",
        c.hidden_size,
        in_bias=c.mamba_proj_bias,
        conv_bias=c.use_conv_bias,
        out_bias=c.mamba_proj_bias,
        log_dtype="float32",
    )
    return [sizes.mixer()], [], part


def nemotron_attention(c: Config) -> Block:
    dim = c.head_width
    part = qkvo("mixer", c.hidden_size, c.num_attention_heads, c.kv_heads, dim, c.attention_bias)
    return [Attention(c.num_attention_heads, c.kv_heads, dim, dim)], [], part


def nemotron_mlp(c: Config) -> Block:
    part = plain_mlp(c.hidden_size, c.intermediate_size, c.mlp_bias)
    return [], [FeedForward(c.intermediate_size, gated=False)], under("mixer", part)


def nemotron_experts(c: Config) -> Block:
    """Experts without gates, in a latent space if ``moe_latent_size`` is given."""
    hidden, count, latent = c.hidden_size, c.n_routed_experts, c.moe_latent_size
    shared = c.moe_shared_expert_intermediate_size if c.n_shared_experts is not None else 0
    part = (
        switch_mlp("switch_mlp", count, latent or hidden, c.moe_intermediate_size)
        + array("gate", count, hidden)
        + array("gate.e_score_correction_bias", count, dtype="float32")
    )
    if shared:
        part += under("shared_experts", plain_mlp(hidden, shared, c.mlp_bias))
    if latent:
        part += linear("fc1_latent_proj", latent, hidden, c.mlp_bias)
        part += linear("fc2_latent_proj", hidden, latent, c.mlp_bias)
    experts = Experts(count, c.num_experts_per_tok, c.moe_intermediate_size, shared, gated=False)
    return [], [experts], under("mixer", part)


def plain_mlp(hidden_size: int, intermediate_size: int, bias: bool) -> Part:
    """An up and a down projection."""
    return linear("up_proj", intermediate_size, hidden_size, bias) + linear(
        "down_proj", hidden_size, intermediate_size, bias
    )


MODULES: Modules = {
    "mamba2": (mamba2, {}),
    "falcon_h1": (
        falcon_h1,
        {
            "attention_bias": False,
            "head_dim": 64,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1536,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
            "mamba_proj_bias": False,
            "mamba_rms_norm": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 8,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "projectors_bias": False,
            "vocab_size": 32784,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid": (
        granitemoehybrid,
        {
            "num_local_experts": None,
            "mamba_proj_bias": None,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        nemotron_h,
        {
            "num_hidden_layers": 1,
            "hybrid_override_pattern": None,
            "layers_block_type": None,
            "layer_types": None,
            "head_dim": None,
            "moe_latent_size": None,
            "n_shared_experts": None,
        },
    ),
}
