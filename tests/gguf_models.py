"""Tiny random models of each architecture, as mlx-lm's module and as a GGUF file.

Written as llama.cpp's converter writes (conversion/*.py, b11434), which the logits of llama.cpp
itself confirm: tests/data/gguf_logits.json.
"""

import importlib
import math
from pathlib import Path

import gguf
import numpy as np

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 256 + len(WORDS) + 1

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": False, "rope_theta": 10000.0}),
    "llama-3": ("llama", "llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-linear": ("llama", "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", "llama", {"head_dim": 32, "tie_word_embeddings": False}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2",
        "qwen2",
        {"rope_theta": 1e6, "rope_scaling": YARN, "tie_word_embeddings": False},
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 32, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 32,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32.0, "rms_norm_eps": 1e-6},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32.0,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": (
        "phi3",
        "phi3",
        {"tie_word_embeddings": False, "original_max_position_embeddings": 128},
    ),
    "phi3-longrope": (
        "phi3",
        "phi3",
        {"rope_scaling": LONG, "original_max_position_embeddings": 32, "tie_word_embeddings": True},
    ),
}
"""By name: architecture in GGUF, ``model_type`` of mlx-lm, fields beside ``SIZES``."""

PROMPT = [(7 * i * i + 3 * i + 11) % 256 for i in range(40)]


def original(name: str):
    """mlx-lm's own module with random float32 weights, the same every time."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    _, model_type, fields = MODELS[name]
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    args = module.ModelArgs.from_dict({"model_type": model_type, **SIZES, **fields})
    model = module.Model(args)
    random = np.random.default_rng(len(name))
    weights = []
    for path, array in sorted(tree_flatten(model.parameters())):
        if path == "lm_head.weight" and name == "gemma3":
            continue
        norm = "norm" in path
        center = (0.0 if "gemma" in name else 1.0) if norm else 0.0
        width = 0.3 if norm else 0.6 / math.sqrt(array.shape[-1]) * 3
        values = random.normal(center, width, array.shape).astype(np.float32)
        weights.append((path, mx.array(values)))
    if hasattr(model, "sanitize"):
        weights = list(model.sanitize(dict(weights)).items())
    model.load_weights(weights)
    return model


def byte_tokens() -> list[str]:
    """GPT-2's printable character of each byte, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Bytes, one merge, and three control tokens."""
    tokens = [*byte_tokens(), "he", *WORDS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * len(WORDS))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write_gguf(
    path: Path,
    name: str,
    model=None,
    quantize: dict[str, str] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    split_max_tensors: int = 0,
) -> None:
    """The GGUF file of the tiny model ``name``.

    ``quantize`` maps endings of GGUF tensor names to the type they are stored in; ``shapes``
    gives tensors another shape than they should have; ``split_max_tensors`` writes several files.
    """
    from mlx.utils import tree_flatten

    architecture, model_type, fields = MODELS[name]
    model = model or original(name)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    add_metadata(writer, model_type, {**SIZES, **fields})
    add_vocabulary(writer)
    for path_in_model, array in tree_flatten(model.parameters()):
        tensor, values = gguf_tensor(architecture, model_type, path_in_model, np.array(array))
        if tensor in (shapes or {}):
            values = np.zeros((shapes or {})[tensor], dtype=np.float32)
        kind = next((k for end, k in (quantize or {}).items() if tensor.endswith(end)), "F32")
        kind = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor, gguf.quantize(values, kind), raw_dtype=kind)
    add_rope(writer, model_type, {**SIZES, **fields})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, model_type: str, fields: dict) -> None:
    """The keys that conversion/base.py and the converter of the architecture write."""
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])
    if "head_dim" in fields:
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    if "rope_theta" in fields:
        writer.add_rope_freq_base(fields["rope_theta"])
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        writer.add_sliding_window(4096)
    if model_type == "gemma3_text":
        writer.add_rope_freq_base(1e6)
        writer.add_sliding_window(fields["sliding_window"])
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
    if experts := fields.get("num_experts") or fields.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(fields["num_experts_per_tok"])
    if model_type == "mixtral":
        writer.add_rope_freq_base(1e6)


def add_rope(writer: gguf.GGUFWriter, model_type: str, fields: dict) -> None:
    """Rotary keys and tables."""
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    scaling = fields.get("rope_scaling") or {}
    kind = scaling.get("type") or scaling.get("rope_type")
    writer.add_rope_dimension_count(head_dim)
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif kind == "llama3":
        writer.add_tensor(
            "rope_freqs.weight", llama3_factors(scaling, fields["rope_theta"], head_dim)
        )
    if model_type == "phi3":
        original_length = fields["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original_length)
        writer.add_sliding_window(0)
        if kind == "longrope":
            scale = fields["max_position_embeddings"] / original_length
            factor = math.sqrt(1 + math.log(scale) / math.log(original_length))
            writer.add_rope_scaling_attn_factors(factor)
            for length in ("long", "short"):
                table = np.array(scaling[f"{length}_factor"], dtype=np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", table)


def llama3_factors(scaling: dict, theta: float, head_dim: int) -> np.ndarray:
    """One divisor per frequency (conversion/llama.py, ``generate_extra_tensors``)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original_length / high:
            factors.append(1.0)
        elif wavelength > original_length / low:
            factors.append(factor)
        else:
            smooth = (original_length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "switch_mlp.gate_proj": "ffn_gate_exps",
    "switch_mlp.up_proj": "ffn_up_exps",
    "switch_mlp.down_proj": "ffn_down_exps",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_tensor(
    architecture: str, model_type: str, path: str, values: np.ndarray
) -> tuple[str, np.ndarray]:
    """Name and values that llama.cpp's converter gives the parameter at ``path``."""
    module, _, kind = path.rpartition(".")
    prefix = ""
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        prefix = f"blk.{layer}."
        module = module.removeprefix("block_sparse_moe.")
        module = (
            module.removeprefix("mlp.") if "switch" in module or module == "mlp.gate" else module
        )
    names = NAMES | (GEMMA if architecture.startswith("gemma") else {})
    if architecture.startswith("gemma") and "norm" in module:
        values = values + 1
    if architecture == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        query = module == "self_attn.q_proj"
        heads = SIZES["num_attention_heads" if query else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return f"{prefix}{names[module]}.{kind}", np.ascontiguousarray(values)
