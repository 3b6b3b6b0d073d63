"""Bytes of a model's weights in each of llama.cpp's quantization mixes.

``llama-quantize`` gives every tensor a type of its own: by its role, its layer, the number of
experts and of heads that share keys. The rules here are those of ``llama_tensor_get_type_impl``
and ``tensor_allows_quantization`` (llama.cpp b11434, ``src/llama-quant.cpp``), without an
importance matrix, on tensors named as mlx-lm names them. Metadata of the file is not counted.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    LatentAttention,
    Parameter,
)
from uma.architecture.remembered import remembered
from uma.errors import UnknownName
from uma.quantization import GGUF_TYPES, gguf_bytes

# Default type of each mix: llama_ftype_get_default_type. IQ2_S and IQ2_M really start one below.
MIXES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q5_1": "Q5_1",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q4_1": "Q4_1",
    "Q4_0": "Q4_0",
    "MXFP4_MOE": "MXFP4",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "Q3_K_L": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "IQ3_M": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
    "IQ2_M": "IQ2_S",
    "IQ2_S": "IQ2_XS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_XXS": "IQ2_XXS",
    "TQ2_0": "TQ2_0",
    "TQ1_0": "TQ1_0",
    "IQ1_M": "IQ1_M",
    "IQ1_S": "IQ1_S",
    "Q1_0": "Q1_0",
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

LOW_BITS = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})
EXPERTS_OUTPUT = frozenset(
    {"Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M"}
    | {"IQ3_XS", "IQ3_XXS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS"}
)
# tensor_type_fallback: what a matrix gets whose rows are not whole blocks.
FALLBACK = {
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
    ),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
MODULES_70B = frozenset({"llama", "mistral", "qwen2", "nemotron-nas", "olmo"})

# Roles of mlx-lm's names; the first that matches counts. What none matches is "other".
ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(^|\.)(embed_tokens(_per_layer)?|embeddings|word_embeddings|wte)$", "token_embd"),
        (r"(^|\.)lm_head$", "output"),
        (r"(^|\.)(router|shared_expert_gate|tid2eid|conv1d|conv|A_log)(\.|$)", "unquantized"),
        (r"(mlp|feed_forward|block_sparse_moe|mixer|ffn)\.gate(\.|$)", "unquantized"),
        (r"\b(q|k)_norm$|modality_router|_coefs$", "unquantized"),
        (r"altup|laurel|per_layer_model_projection", "kept"),
        (r"(qkv_proj|Wqkv|query_key_value|in_proj_qkvz?)$", "attn_qkv"),
        (r"\.v_proj$", "attn_v"),
        (r"\.k_proj$", "attn_k"),
        (r"\.q_proj$", "attn_q"),
        (r"(linear_attn|mamba|conv)\.out_proj$", "other"),
        (r"(attn|attention)\.(o_proj|out_proj|dense)$", "attn_output"),
        (r"mixer\.o_proj$", "attn_output"),
        (r"self_attn\.gate_proj$", "other"),
        (r"(down_proj|\.w2|fc2|dense_4h_to_h|output_linear)$", "ffn_down"),
        (r"(up_proj|\.w3|\.v1|fc1|dense_h_to_4h|input_linear)$", "ffn_up"),
        (r"(gate_proj|\.w1)$", "ffn_gate"),
    )
)
NUMBERS = re.compile(r"\.\d+\.")  # of layers, so that names of all layers are one


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a GGUF file: mlx-lm's name, role, block if in one, shape with rows last."""

    name: str
    role: str
    layer: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the rules ask of a model."""

    num_layers: int
    num_attention_v: int
    num_experts: int
    queries_per_key: int
    is_70b: bool
    tied: bool
    mxfp4_experts: bool


def formats() -> tuple[str, ...]:
    """The mixes of ``llama-quantize`` by name, widest first."""
    return tuple(MIXES)


def mix_named(quant: str) -> str:
    """The mix that ``quant`` names in any case, such as ``q4_k_m``; aliases as in llama.cpp.

    Raises:
        UnknownName: If llama.cpp has no such mix.
    """
    name = quant.upper()
    name = ALIASES.get(name, name)
    if name not in MIXES:
        raise UnknownName(f"llama.cpp has no quantization {quant!r}; it has {', '.join(MIXES)}")
    return name


def tensors(architecture: Architecture) -> Iterator[Tensor]:
    """Every tensor of the GGUF file of ``architecture``."""
    for parameter in architecture.parameters:
        yield from _converted(parameter, None, None)
    for index, layer in enumerate(architecture.layers):
        latent = next((m for m in layer.mixers if isinstance(m, LatentAttention)), None)
        for parameter in layer.parameters:
            yield from _converted(parameter, index, latent)


def _converted(
    parameter: Parameter, layer: int | None, latent: LatentAttention | None
) -> Iterator[Tensor]:
    """The tensors that ``convert_hf_to_gguf.py`` makes of a parameter: one, or two of a pair."""
    name, shape = parameter.name, parameter.shape
    if name.endswith("kv_b_proj") and latent is not None:
        heads, rank = latent.num_attention_heads, latent.kv_lora_rank
        stem = name.removesuffix("kv_b_proj")
        yield Tensor(f"{stem}embed_q", "other", layer, (heads, rank, latent.qk_nope_head_dim))
        yield Tensor(f"{stem}unembed_out", "other", layer, (heads, latent.v_head_dim, rank))
        return
    yield Tensor(name, role(parameter), layer, shape)


def role(parameter: Parameter) -> str:
    """What llama-quantize takes a parameter for; one-dimensional ones stay in 32 bits."""
    if parameter.kind == "other" or len(parameter.shape) < 2:
        return "unquantized"
    return _role_of_name(NUMBERS.sub(".", parameter.name))


@lru_cache(maxsize=4096)
def _role_of_name(name: str) -> str:
    return next((role for pattern, role in ROLES if pattern.search(name)), "other")


def weight_bytes(architecture: Architecture, quant: str) -> int:
    """Bytes of all tensors in the mix ``quant``."""
    return sum(size for _, size in tensor_bytes(architecture, quant))


def device_weight_bytes(architecture: Architecture, quant: str) -> int:
    """Bytes in the device's model buffer when every layer is offloaded.

    A tied head is loaded a second time, for the device (``TENSOR_DUPLICATED``).
    """
    sizes = tensor_bytes(architecture, quant)
    size = sum(size for tensor, size in sizes if tensor.role != "token_embd")
    if architecture.tie_word_embeddings:
        size += next((size for tensor, size in sizes if tensor.role == "token_embd"), 0)
    return size


@remembered
def tensor_bytes(architecture: Architecture, quant: str) -> list[tuple[Tensor, int]]:
    """Every tensor and its bytes in the mix ``quant``."""
    types = tensor_types(architecture, quant)
    return [(tensor, gguf_bytes(gguf_type, tensor.shape)) for tensor, gguf_type in types]


@remembered
def tensor_types(architecture: Architecture, quant: str) -> list[tuple[Tensor, str]]:
    """Every tensor and the GGUF type that the mix ``quant`` gives it."""
    mix = mix_named(quant)
    found = list(tensors(architecture))
    traits, seen = _traits(architecture, found), Counter[str]()
    return [(tensor, _tensor_type(tensor, mix, traits, seen)) for tensor in found]


def _traits(architecture: Architecture, found: list[Tensor]) -> _Traits:
    experts = (p for part in architecture.layers for p in part.feed_forward)
    return _Traits(
        num_layers=architecture.num_hidden_layers,
        num_attention_v=sum(tensor.role in ("attn_v", "attn_qkv") for tensor in found),
        num_experts=next((p.num_experts for p in experts if isinstance(p, Experts)), 0),
        queries_per_key=_queries_per_key(architecture),
        is_70b=architecture.num_hidden_layers == 80 and architecture.module in MODULES_70B,
        tied=not any(tensor.role == "output" for tensor in found),
        mxfp4_experts=architecture.module == "gpt_oss",
    )


def _queries_per_key(architecture: Architecture) -> int:
    """``n_gqa`` of the first layer; where heads are listed by layer, a recurrent one has none."""
    by_layer = not (architecture.module or "").startswith("qwen3")
    for layer in architecture.layers:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                return mixer.num_attention_heads // mixer.num_key_value_heads
            if isinstance(mixer, LatentAttention):
                return mixer.num_attention_heads
        if by_layer:
            break
    return 0


def _tensor_type(tensor: Tensor, mix: str, traits: _Traits, seen: Counter[str]) -> str:
    if tensor.role == "unquantized":
        return "F32"
    if tensor.role == "kept":
        return "F32" if mix == "F32" else "F16"
    if traits.mxfp4_experts and len(tensor.shape) > 2:
        return "MXFP4"  # as published; llama-quantize refuses to quantize these again
    default = MIXES[mix]
    if default in ("F32", "F16", "BF16"):
        return default
    chosen = _mixed(tensor, mix, default, traits, seen)
    if tensor.shape[-1] % GGUF_TYPES[chosen][0]:
        chosen = FALLBACK.get(chosen, chosen)
    return "F16" if tensor.shape[-1] % GGUF_TYPES[chosen][0] else chosen


def _mixed(tensor: Tensor, mix: str, default: str, traits: _Traits, seen: Counter[str]) -> str:
    """The type by role: ``llama_tensor_get_type_impl``, branch by branch."""
    role = tensor.role
    if role == "output" or (role == "token_embd" and traits.tied):
        return _output_type(tensor, mix, default)
    if mix == "MXFP4_MOE":
        return "MXFP4" if len(tensor.shape) > 2 else "Q8_0"
    if role == "token_embd":
        return _embedding_type(mix, default)
    if mix in LOW_BITS:
        return _low_bits_type(role, mix, default, traits, seen)
    if role in ("attn_v", "attn_qkv"):
        return _value_type(mix, default, traits, seen)
    if role in ("attn_k", "attn_q"):
        if role == "attn_k" and traits.num_experts == 8:
            return "Q8_0"
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(mix, default)
    if role == "attn_output":
        return _attention_output_type(mix, default, traits)
    if role == "ffn_down":
        return _down_type(tensor, mix, default, traits, seen)
    if role in ("ffn_gate", "ffn_up") and mix == "IQ3_XS":
        layer = _layer(tensor, role, traits, seen)
        middle = traits.num_layers // 8 <= layer < 7 * traits.num_layers // 8
        return "IQ3_XXS" if middle else default
    return default


def _output_type(tensor: Tensor, mix: str, default: str) -> str:
    if mix == "MXFP4_MOE" or tensor.shape[-1] % GGUF_TYPES[default][0]:
        return "Q8_0"
    if mix in LOW_BITS or mix == "IQ3_XXS":
        return "Q5_K"
    return default if default == "Q8_0" else "Q6_K"


def _embedding_type(mix: str, default: str) -> str:
    if mix in ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"):
        return "Q2_K"
    if mix in ("IQ2_S", "IQ2_M", "IQ3_XXS"):
        return "IQ3_S"
    return "Q4_K" if mix in ("TQ1_0", "TQ2_0") else default


def _low_bits_type(role: str, mix: str, default: str, traits: _Traits, seen: Counter[str]) -> str:
    better = "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else "Q2_K"
    if role in ("attn_v", "attn_qkv"):
        return "Q4_K" if traits.queries_per_key >= 4 or traits.num_experts >= 4 else better
    if role == "attn_k" and traits.num_experts == 8:
        return "Q4_K"
    if role == "ffn_down":
        seen[role] += 1
        return better if seen[role] - 1 < traits.num_layers // 8 else default
    if role == "attn_output":
        if traits.num_experts == 8:
            return "Q5_K"
        if mix in ("IQ1_S", "IQ1_M"):
            return "IQ2_XXS"
        return "IQ3_S" if mix in ("IQ2_S", "IQ2_M") else default
    return default


def _value_type(mix: str, default: str, traits: _Traits, seen: Counter[str]) -> str:
    index, shared = seen["attn_v"], traits.queries_per_key >= 4
    seen["attn_v"] += 1
    chosen = default
    if mix == "Q2_K":
        chosen = "Q4_K" if shared else "Q3_K"
    elif mix == "IQ3_XXS":
        chosen = "Q4_K" if shared else "IQ3_S"
    elif mix == "IQ3_M" or (shared and mix in ("Q2_K_S", "IQ3_XS", "IQ3_S")):
        chosen = "Q4_K"
    elif mix == "Q3_K_M":
        chosen = "Q5_K" if index < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (shared and mix in ("IQ4_NL", "IQ4_XS")):
        chosen = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(index, traits.num_attention_v):
        chosen = "Q6_K"
    elif mix == "Q4_K_S" and index < 4:
        chosen = "Q5_K"
    if traits.is_70b and chosen in ("Q3_K", "Q4_K"):
        chosen = "Q5_K"
    return "Q8_0" if traits.num_experts == 8 else chosen


def _attention_output_type(mix: str, default: str, traits: _Traits) -> str:
    if traits.num_experts == 8:
        return "Q5_K" if mix in EXPERTS_OUTPUT else default
    better = {
        "Q2_K": "Q3_K",
        "IQ3_XXS": "IQ3_S",
        "Q3_K_M": "Q4_K",
        "Q3_K_L": "Q5_K",
        "IQ3_M": "Q4_K",
    }
    return better.get(mix, default)


def _down_type(tensor: Tensor, mix: str, default: str, traits: _Traits, seen: Counter[str]) -> str:
    layer, layers = _layer(tensor, "ffn_down", traits, seen), traits.num_layers
    early, more = layer < layers // 8, _more_bits(layer, layers)
    if mix in ("Q2_K", "IQ3_XXS"):
        return "Q4_K" if mix == "IQ3_XXS" and early else "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix == "Q3_K_L":
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if more else default
    if mix == "IQ3_M":
        return "Q4_K" if early or (traits.num_experts == 8 and more) else default
    if early and mix in ("IQ4_NL", "IQ4_XS", "Q4_K_S"):
        return "Q5_K"
    return "Q4_K" if early and mix == "Q2_K_S" else default


def _layer(tensor: Tensor, role: str, traits: _Traits, seen: Counter[str]) -> int:
    """The layer that the rule sees: tensors counted, with experts the block's own number."""
    seen[role] += 1
    if traits.num_experts > 1 and tensor.layer is not None:
        return tensor.layer
    return seen[role] - 1


def _more_bits(index: int, count: int) -> bool:
    """``use_more_bits``: the first and last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
