"""Models that mlx-lm 0.32.2 lacks and that llama.cpp, transformers or vLLM run.

Shapes: the modeling file of each in transformers 5.24.0, unless said otherwise; names are those
that mlx-lm's modules would give. What mlx-lm has under another name is laid out by that module's
function.
"""

from dataclasses import replace

from uma.architecture.config import Config, Modules
from uma.architecture.deepseek_v4 import deepseek_v4
from uma.architecture.dense import (
    LLAMA_DEFAULTS,
    LLAMA_NORMS,
    attention,
    attention_part,
    dense_layers,
    exaone4,
    mlp_part,
)
from uma.architecture.dense_variants import layer_norms
from uma.architecture.experts import mixtral
from uma.architecture.experts_by_layer import MINIMAX_M3_DEFAULTS, minimax_m3
from uma.architecture.experts_variants import dense_part, mixed_layers
from uma.architecture.indexed import glm5_next, mistral_large4, qwen4_exp
from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Mixer,
    Parameter,
    Recurrent,
    State,
)
from uma.architecture.mamba import plain_mlp
from uma.architecture.parts import (
    Part,
    array,
    decoder,
    gated_mlp,
    layer,
    layer_norm,
    linear,
    norms,
    switch_glu,
    under,
)
from uma.architecture.step import hunyuan, step3p5


def arcee(c: Config) -> Architecture:
    """Llama without a gate in the feed-forward part."""
    part = attention_part(c, c.head_width, c.attention_bias)
    mlp = under("mlp", plain_mlp(c.hidden_size, c.intermediate_size, c.mlp_bias))
    layer_norms = norms(c.hidden_size, *LLAMA_NORMS)
    layers = dense_layers(c, part, mlp, layer_norms, c.head_width, gated=False)
    return decoder(c, layers, tied=c.tie_word_embeddings)


def olmo_hf(c: Config) -> Architecture:
    """OLMo 1 in transformers' names: Llama with norms that have no weights."""
    part = attention_part(c, c.head_width, c.attention_bias) + mlp_part(c)
    layers = dense_layers(c, part, (), (), c.head_width)
    return decoder(c, layers, tied=c.tie_word_embeddings, norm=())


def exaone4_5(c: Config) -> Architecture:
    return exaone4(c.named(head_dim=c.head_width))


def step3p7(c: Config) -> Architecture:
    """Step 3.5 with transformers' names."""
    dense, count = c.get("first_k_dense_replace"), c.num_hidden_layers
    named = c.get("moe_layers_enum") or ",".join(map(str, range(dense or 3, count)))
    sliding = {
        "num_attention_heads": c.num_sliding_attention_heads,
        "num_attention_groups": c.num_key_value_heads,
    }
    return step3p5(
        c.named(
            num_attention_groups=c.num_key_value_heads,
            moe_num_experts=c.get("num_experts") or c.n_routed_experts,
            moe_top_k=c.num_experts_per_tok,
            moe_layers_enum=named,
            attention_other_setting=c.get("attention_other_setting") or sliding,
        )
    )


def hunyuan_v1_moe(c: Config) -> Architecture:
    """Hunyuan A13B: the shared expert is as wide as a routed one."""
    width = c.get("moe_intermediate_size") or c.intermediate_size
    return hunyuan(
        c.named(
            intermediate_size=width if isinstance(width, int) else width[0],
            use_mixed_mlp_moe=True,
            num_shared_expert=c.get("num_shared_expert") or 1,
            use_qk_norm=True,
            use_cla=False,
        )
    )


def hy_v3(c: Config) -> Architecture:
    """Hunyuan 3: experts after the first layer, chosen with a bias."""
    hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.num_experts
    shared = width * c.num_shared_experts
    moe = under(
        "mlp",
        array("gate", count, hidden, dtype="float32"),
        array("e_score_correction_bias", count, dtype="float32"),
        switch_glu("switch_mlp", count, hidden, width),
        gated_mlp("shared_experts", hidden, shared, c.mlp_bias),
    )
    experts = (Experts(count, c.num_experts_per_tok, width, shared), moe)
    dense = c.get("first_k_dense_replace") or 1
    mixer = (
        attention(c, c.head_width),
        attention_part(c, c.head_width, c.attention_bias, qk_norm="head"),
    )
    layers = mixed_layers(
        [mixer] * c.num_hidden_layers,
        [dense_part(c, c.mlp_bias) if i < dense else experts for i in range(c.num_hidden_layers)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def grok(c: Config) -> Architecture:
    """Grok 1: Mixtral with two more norms (its ``modeling_grok1.py`` by hpcai-tech)."""
    architecture = mixtral(c.named(num_local_experts=c.num_experts))
    more = norms(c.hidden_size, "post_attn_norm", "post_moe_norm")
    layers = tuple(
        replace(part, parameters=part.parameters + under(f"model.layers.{i}", more))
        for i, part in enumerate(architecture.layers)
    )
    return replace(architecture, layers=layers)


def falcon(c: Config) -> Architecture:
    """Falcon 7B to 180B: one matrix for queries, keys and values; parts side by side."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    dim, size = hidden // heads, c.get("intermediate_size") or c.get("ffn_hidden_size")
    size = size or 4 * hidden
    kv_heads = falcon_kv_heads(c)
    new = c.new_decoder_architecture or kv_heads > 1
    norm_count = c.get("num_ln_in_parallel_attn") or 1 + new
    names = ("ln_attn", "ln_mlp") if norm_count > 1 else ("input_layernorm",)
    if not c.parallel_attn:
        names = ("input_layernorm", "post_attention_layernorm")
    part = (
        linear("self_attention.query_key_value", (heads + 2 * kv_heads) * dim, hidden, c.bias)
        + linear("self_attention.dense", hidden, hidden, c.bias)
        + linear("mlp.dense_h_to_4h", size, hidden, c.bias)
        + linear("mlp.dense_4h_to_h", hidden, size, c.bias)
        + layer_norms(hidden, *names)
    )
    mixer, dense = Attention(heads, kv_heads, dim, dim), FeedForward(size, gated=False)
    layers = [
        layer(f"transformer.h.{i}", [mixer], [dense], part) for i in range(c.num_hidden_layers)
    ]
    return decoder(
        c,
        layers,
        tied=c.tie_word_embeddings,
        prefix="transformer",
        embedding="word_embeddings",
        norm=layer_norm("ln_f", hidden),
    )


def falcon_kv_heads(c: Config) -> int:
    """``num_kv_heads`` of the new decoder, one with ``multi_query``, else those of the queries."""
    named = c.get("num_key_value_heads")
    if named is not None:
        return int(named)
    if c.new_decoder_architecture:
        return int(c.num_kv_heads)
    return 1 if c.multi_query else int(c.num_attention_heads)


def mllama(c: Config) -> Architecture:
    """Llama with layers that attend to an image, whose keys are no cache of the text's."""
    dim, hidden = c.head_width, c.hidden_size
    rows = (c.vocab_size + 8, hidden)
    softmax = attention_part(c, dim) + mlp_part(c) + norms(hidden, *LLAMA_NORMS)
    cross = (
        tuple(
            replace(p, name=p.name.replace("self_attn", "cross_attn"))
            for p in attention_part(c, dim, qk_norm="head")
        )
        + array("cross_attn_attn_gate", 1)
        + array("cross_attn_mlp_gate", 1)
        + mlp_part(c)
        + norms(hidden, *LLAMA_NORMS)
    )
    crossed = c.get("cross_attention_layers") or range(3, c.num_hidden_layers, 5)
    layers = [
        layer(
            f"model.layers.{i}",
            [] if i in crossed else [attention(c, dim)],
            [FeedForward(c.intermediate_size)],
            cross if i in crossed else softmax,
        )
        for i in range(c.num_hidden_layers)
    ]
    architecture = decoder(c, layers, tied=c.tie_word_embeddings)
    embedding = Parameter("model.embed_tokens", rows, "embedding")
    rest = tuple(p for p in architecture.parameters if p.name != embedding.name)
    return replace(architecture, parameters=(embedding, *rest))


def lightning_attention(c: Config, dim: int) -> tuple[Mixer, Part]:
    """Linear attention with a fixed decay a head and a gated, normed output."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    width = heads * dim
    part = under(
        "self_attn",
        linear("qkv_proj", 3 * width, hidden),
        linear("out_proj", hidden, width),
        linear("output_gate", width, hidden),
        array("norm", width),
    )
    state = State("linear", (heads, dim, dim), "float32")
    return Recurrent("linear_attention", (state,), heads, dim, width), part


def minimax_text(c: Config) -> Architecture:
    """MiniMax Text 01 and M1: lightning attention, softmax where ``attn_type_list`` has 1."""
    hidden, dim = c.hidden_size, c.head_width
    kinds = c.get("attn_type_list") or [int(kind == "full_attention") for kind in c.layer_types]
    count, width = c.num_local_experts, c.intermediate_size
    moe = under(
        "block_sparse_moe",
        linear("gate", count, hidden),
        switch_glu("switch_mlp", count, hidden, width),
    )
    experts = Experts(count, c.num_experts_per_tok, width)
    linear_attention = lightning_attention(c, dim)
    softmax: tuple[Mixer, Part] = (attention(c, dim), attention_part(c, dim))
    layers = []
    for i, kind in enumerate(kinds):
        mixer, part = softmax if kind else linear_attention
        layers.append(
            layer(f"model.layers.{i}", [mixer], [experts], part, moe, norms(hidden, *LLAMA_NORMS))
        )
    return decoder(c, layers, tied=c.tie_word_embeddings)


STEP_DEFAULTS = {"layer_types": None, "use_head_wise_attn_gate": True}

MODULES: Modules = {
    "arcee": (arcee, LLAMA_DEFAULTS),
    "deepseek_ref": (deepseek_v4, {"tie_word_embeddings": False}),
    "deepseek_v4": (deepseek_v4, {}),
    "exaone4_5": (exaone4_5, {}),
    "falcon": (falcon, {}),
    "glm5_next": (glm5_next, {}),
    "grok-1": (grok, {}),
    "hunyuan_v1_moe": (hunyuan_v1_moe, {"tie_word_embeddings": True}),
    "hy_v3": (hy_v3, {}),
    "minimax_m1": (minimax_text, {"tie_word_embeddings": False}),
    "minimax_m3": (minimax_m3, MINIMAX_M3_DEFAULTS),
    "minimax_text_01": (minimax_text, {"tie_word_embeddings": False}),
    "mistral_large4": (mistral_large4, {}),
    "mllama": (mllama, {}),
    "olmo_hf": (olmo_hf, {"head_dim": None}),
    "qwen4_exp": (qwen4_exp, {}),
    "step3p7": (step3p7, STEP_DEFAULTS),
}
