"""Shapes of models that measurements of training use and the catalog does not have.

Each is checked by its published number of parameters when it is looked up.
"""

from typing import Any

# Model cards: ibm/PowerLM-3b (3.51 B, tied), bigcode/gpt_bigcode-santacoder (1.12 B, tied;
# the defaults of fms-extras' PagedGPTBigCodeConfig name its shapes).
SHAPES: dict[str, tuple[float, dict[str, Any]]] = {
    "ibm/PowerLM-3b": (
        3.513e9,
        {
            "model_type": "granite",
            "hidden_size": 2304,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "intermediate_size": 9216,
            "vocab_size": 49152,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "bigcode/gpt_bigcode-santacoder": (
        1.12e9,
        {
            "model_type": "gpt_bigcode",
            "n_embd": 2048,
            "n_layer": 24,
            "n_head": 16,
            "n_positions": 2048,
            "n_inner": 8192,
            "vocab_size": 49280,
            "layer_norm_epsilon": 1e-05,
            "multi_query": True,
            "tie_word_embeddings": True,
        },
    ),
}
