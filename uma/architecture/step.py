"""Mixtures of experts by Step, Tencent, Kwai and Spark: gates and norms of their own."""

from uma.architecture.config import Config, Modules
from uma.architecture.dense import LLAMA_NORMS, attention, attention_part, windows
from uma.architecture.experts import is_sparse
from uma.architecture.experts_variants import dense_part, mixed_layers
from uma.architecture.layers import Architecture, Attention, Experts, FeedForward
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
    unquantized,
)

FeedForwardPart = tuple[FeedForward | Experts, Part]


def step_experts(c: Config) -> FeedForwardPart:
    hidden, count, width = c.hidden_size, c.moe_num_experts, c.moe_intermediate_size
    shared = c.share_expert_dim
    part = under(
        "mlp",
        router("gate.gate", count, hidden),
        array("gate.router_bias", count, dtype="float32"),
        switch_glu("switch_mlp", count, hidden, width),
        gated_mlp("share_expert", hidden, shared),
    )
    return Experts(count, c.moe_top_k, width, shared), part


def step_sparse(c: Config) -> list[bool]:
    """Layers with experts: those that ``moe_layers_enum`` names, else all but the first."""
    count = c.num_hidden_layers
    named = c.get("moe_layers_enum")
    chosen = {int(i) for i in named.split(",")} if named else set(range(1, count))
    return [i in chosen for i in range(count)]


def step3p5(c: Config) -> Architecture:
    """Sliding layers may have heads of their own; a gate for each head."""
    hidden, dim, count = c.hidden_size, c.head_dim, c.num_hidden_layers
    kinds = c.layer_types or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(count)
    ]
    other = c.attention_other_setting or {}

    def block(kind: str) -> tuple[Attention, Part]:
        sliding = kind == "sliding_attention"
        own = other if sliding else {}
        heads = own.get("num_attention_heads", c.num_attention_heads)
        kv_heads = own.get("num_attention_groups", c.num_attention_groups)
        part = qkvo("self_attn", hidden, heads, kv_heads, dim)
        part += under("self_attn", norms(dim, "q_norm", "k_norm"))
        part += linear("self_attn.g_proj", heads, hidden) if c.use_head_wise_attn_gate else ()
        window = c.sliding_window if sliding else None
        return Attention(heads, kv_heads, dim, dim, window), part

    layers = mixed_layers(
        [block(kind) for kind in kinds[:count]],
        [step_experts(c) if sparse else dense_part(c) for sparse in step_sparse(c)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=False)


def of_layer(value: int | list[int], index: int) -> int:
    """A number for all layers or one for each."""
    return value[index] if isinstance(value, list) else value


def hunyuan_feed_forward(c: Config, index: int) -> FeedForwardPart:
    hidden, size, count = c.hidden_size, c.intermediate_size, c.num_experts
    if count == 1:
        return dense_part(c)
    width = of_layer(c.moe_intermediate_size or size, index)
    shared = size * of_layer(c.num_shared_expert, index) if c.use_mixed_mlp_moe else 0
    part = under(
        "mlp",
        gated_mlp("shared_mlp", hidden, shared) if shared else (),
        linear("gate.wg", count, hidden),
        switch_glu("switch_mlp", count, hidden, width),
    )
    return Experts(count, of_layer(c.moe_topk, index), width, shared), part


def hunyuan(c: Config) -> Architecture:
    """With ``use_cla`` a layer reads the keys and values of the one before it."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    dim = c.get("head_dim") or hidden // heads
    whole = attention_part(c, dim, c.attention_bias)
    if c.use_qk_norm:
        whole += under("self_attn", norms(dim, "query_layernorm", "key_layernorm"))
    reading = tuple(
        p for p in whole if not p.name.startswith(("self_attn.k_proj", "self_attn.v_proj"))
    )

    def mixer(i: int) -> tuple[Attention, Part]:
        behind = i % c.cla_share_factor if c.use_cla else 0
        source = i - behind if behind else None
        return attention(c, dim, kv_source=source), reading if behind else whole

    count = c.num_hidden_layers
    layers = mixed_layers(
        [mixer(i) for i in range(count)],
        [hunyuan_feed_forward(c, i) for i in range(count)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings)


def klear(c: Config) -> Architecture:
    """Experts and shared ones weighed against each other by two coefficients."""
    hidden, dim = c.hidden_size, c.hidden_size // c.num_attention_heads
    count, width = c.num_experts, c.moe_intermediate_size
    shared = width * c.n_shared_experts
    moe = under(
        "mlp",
        router("gate", count, hidden),
        switch_glu("experts", count, hidden, width),
        gated_mlp("shared_experts", hidden, shared),
        linear("coefficient", 2, hidden, bias=True),
        array("expert_bias", count, dtype="float32"),
    )
    experts = (Experts(count, c.num_experts_per_tok, width, shared), moe)
    mixer = (attention(c, dim), attention_part(c, dim, c.attention_bias, qk_norm="head"))
    layers = mixed_layers(
        [mixer] * c.num_hidden_layers,
        [experts if is_sparse(c, i) else dense_part(c) for i in range(c.num_hidden_layers)],
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=False)


def spark2_5(c: Config) -> Architecture:
    """Queries, keys and values in one matrix, a gate for each head that is never quantized."""
    hidden, dim, heads, bias = c.hidden_size, c.head_dim, c.num_attention_heads, c.attention_bias
    part = under(
        "self_attn",
        linear("q_k_v_proj", (heads + 2 * c.kv_heads) * dim, hidden, bias),
        unquantized(linear("g_proj", heads, hidden, bias)),
        linear("out_proj", hidden, heads * dim, bias),
    )
    pattern = ["sliding_attention"] * 3 + ["full_attention"]
    kinds = c.layer_types or [pattern[i % 4] for i in range(c.num_hidden_layers)]
    layers = mixed_layers(
        [(attention(c, dim, window), part) for window in windows(c, kinds)],
        [dense_part(c, c.mlp_bias)] * len(kinds),
        norms(hidden, *LLAMA_NORMS),
    )
    return decoder(c, layers, tied=c.tie_word_embeddings, embedding="embedding")


def llama4_text(c: Config) -> Architecture:
    """Llama 4 without experts; its head is called ``output``."""
    hidden, size = c.hidden_size, c.intermediate_size_mlp
    part = (
        attention_part(c, c.head_dim)
        + gated_mlp("feed_forward", hidden, size)
        + norms(hidden, *LLAMA_NORMS)
    )
    layers = [
        layer(f"model.layers.{i}", [attention(c, c.head_dim)], [FeedForward(size)], part)
        for i in range(c.num_hidden_layers)
    ]
    return decoder(c, layers, tied=c.tie_word_embeddings, head="output")


MODULES: Modules = {
    "step3p5": (
        step3p5,
        {
            "max_position_embeddings": 262144,
            "sliding_window": 512,
            "layer_types": None,
            "attention_other_setting": None,
            "use_head_wise_attn_gate": True,
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "moe_layers_enum": None,
        },
    ),
    "hunyuan": (hunyuan, {"moe_intermediate_size": None}),
    "Klear": (klear, {}),
    "spark2_5": (
        spark2_5,
        {
            "layer_types": None,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "llama4_text": (llama4_text, {}),
}
