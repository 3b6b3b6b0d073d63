"""A tiny Llama whose weights two programs make alike, and adapters that mlx-lm and PEFT compare on.

Nothing here needs MLX or PyTorch: ``scripts/peft_golden.py`` runs it in an environment of its own.
"""

from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TOKENS = [3, 60, 7, 7, 19, 42, 0, 33, 5]

_LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}

PEFT: dict[str, dict[str, Any]] = {
    "square": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
    },
    "rslora": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 12},
        "target_modules": ["q_proj", "v_proj", "up_proj"],
    },
    "dora": {"r": 3, "lora_alpha": 3, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "embedding": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
    },
    "one_layer": {
        "r": 4,
        "lora_alpha": 8,
        "layers_to_transform": [1],
        "target_modules": ["q_proj", "v_proj"],
    },
}
"""Adapters made by PEFT, by what ``LoraConfig`` was given."""

MLX: dict[str, dict[str, Any]] = {
    "lora": {"num_layers": 2, "rank": 4, "scale": 2.5},
    "dora": {
        "method": "dora",
        "num_layers": 3,
        "rank": 2,
        "scale": 1.5,
        "keys": ("self_attn.q_proj", "mlp.up_proj"),
    },
    "embedding": {
        "num_layers": 1,
        "rank": 4,
        "scale": 2.0,
        "keys": ("self_attn.o_proj", "model.embed_tokens", "lm_head"),
    },
}
"""Adapters made by mlx-lm, by what ``Adapter`` was given."""


def weights() -> dict[str, np.ndarray]:
    """Every weight by its name in the published model; the same on every machine."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (64, 32), "lm_head": (64, 32)}
    for n in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in _LAYER.items()}
    random = np.random.default_rng(5)
    found = {
        f"{name}.weight": (random.standard_normal(shape) * 0.2).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = [
        f"model.layers.{n}.{k}_layernorm" for n in range(3) for k in ("input", "post_attention")
    ]
    return found | {f"{name}.weight": np.ones(32, np.float32) for name in [*norms, "model.norm"]}


def factor(name: str, value: np.ndarray) -> np.ndarray:
    """A trained array of an adapter: random, or a magnitude between 0.8 and 1.2 of its own."""
    random = np.random.default_rng(list(name.encode()))
    if "magnitude" in name or name.endswith(".m"):
        return (value * random.uniform(0.8, 1.2, value.shape)).astype(np.float32)
    return (random.standard_normal(value.shape) * 0.3).astype(np.float32)
