"""Tiny random models of every cache kind, built and saved by mlx-lm's own classes.

``saved_model(kind, folder)`` writes an MLX folder (config, weights, tokenizer) that ``mlx_lm.load``
reads; ``CONFIGS`` holds the configurations, a few hundred thousand parameters each. The default
dtype is float32 because MLX's CPU backend multiplies stacked experts in no other
(mlx 0.32.4, "[GatherMM::eval] Currently only supports float32").
"""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "head_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "full": _COMMON | {"model_type": "llama", "tie_word_embeddings": False},
    "moe": _COMMON | _EXPERTS | {"model_type": "qwen3_moe", "tie_word_embeddings": False},
    "sliding": _COMMON
    | {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 32,
    },
    "sinks": _COMMON
    | {
        "model_type": "gpt_oss",
        "sliding_window": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "chunked": {
        "model_type": "llama4",
        "eos_token_id": 2,
        "text_config": _COMMON
        | {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "latent": _COMMON
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "expanded": _COMMON
    | {
        "model_type": "minicpm3",
        "num_key_value_heads": 4,
        "dim_model_base": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 4096,
            "long_factor": [1.0] * 16,
            "short_factor": [1.0] * 16,
        },
        "scale_depth": 1.0,
        "scale_emb": 1.0,
    },
    "hybrid": _COMMON
    | _EXPERTS
    | {
        "model_type": "qwen3_next",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "side_by_side": _COMMON
    | {
        "model_type": "falcon_h1",
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
    },
    "recurrent": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "eos_token_id": 2,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the "
    "capital of France, and the river there is the Seine. Memory that the processor and the "
    "graphics share is called unified memory; weights, caches and activations live in it."
)


def save_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write a byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens, trained on three sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(chat_template)


def build_model(config: dict[str, Any], *, seed: int = 0, dtype: str = "float32") -> Any:
    """mlx-lm's own module for ``config``, with random weights of ``dtype``."""
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})  # ties the head, as for the published files, which hold none
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def saved_model(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    quantization: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model of ``kind`` with a tokenizer into ``folder`` and return the folder.

    ``quantization`` such as ``{"bits": 4, "group_size": 32, "mode": "affine"}`` quantizes it with
    ``mlx_lm.utils.quantize_model`` before saving.
    """
    from mlx_lm.utils import quantize_model, save_config, save_model

    config = CONFIGS[kind] | {"torch_dtype": dtype} | overrides
    model = build_model(config, seed=seed, dtype=dtype)
    if quantization is not None:
        q = quantization
        model, config = quantize_model(
            model, config, q.get("group_size"), q.get("bits"), mode=q.get("mode", "affine")
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    save_tokenizer(folder)
    return folder
