"""What a measured training row asks, and models that the catalog does not have.

Each model is checked by its published number of parameters when it is looked up.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.engines.torch_model import Settings
from uma.memory.loss import TRANSFORMERS
from uma.memory.term import MemoryTerm
from uma.plan.training.stack import Stack
from uma.plan.training.stacks import settings_for
from uma.workload import TrainingWorkload

from .rows import MODEL, Skipped, known_model

# stablelm-base-alpha-3b as litgpt's config.py has it; Baichuan2-7B has the shapes of Llama 2 with a
# vocabulary of 125,696, and so has the 13B but for its feed-forward part; chatglm3-6b is a Llama in
# sizes (modeling_chatglm.py); ibm/PowerLM-3b (3.51 B, tied) and bigcode/gpt_bigcode-santacoder
# (1.12 B, tied; the defaults of fms-extras' PagedGPTBigCodeConfig name its shapes) by their cards.
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
    "stabilityai/stablelm-base-alpha-3b": (
        3.638e9,
        {
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "intermediate_size": 16384,
            "vocab_size": 50688,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-05,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
    ),
    "ibm-granite/granite-3.0-3b-a800m-instruct": (
        3.3e9,
        {
            "model_type": "granitemoe",
            "hidden_size": 1536,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "intermediate_size": 512,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "vocab_size": 49155,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
    ),
    "THUDM/chatglm3-6b": (
        6.244e9,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 28,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "intermediate_size": 13696,
            "vocab_size": 65024,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    ),
    "baichuan-inc/Baichuan2-13B-Chat": (
        13.897e9,
        {
            "model_type": "llama",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "intermediate_size": 13696,
            "vocab_size": 125696,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    ),
    "baichuan-inc/Baichuan2-7B-Chat": (
        7.506e9,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 125696,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What a row asks; ``weights`` are those of MLX, whose engine it is then.

    ``stack`` is what options of ``uma estimate --train`` say, ``facts`` those settings of the
    engine that none says: of an old version, or of that one program. ``bound`` says that the length
    is only a cap.
    """

    architecture: Architecture
    workload: TrainingWorkload
    stack: Stack = field(default_factory=Stack)
    facts: Mapping[str, Any] = field(default_factory=dict)
    weights: MemoryTerm | None = None
    bound: bool = False

    @property
    def settings(self) -> Settings:
        return replace(settings_for(self.stack, self.workload, self.architecture), **self.facts)

    @property
    def as_commanded(self) -> "Case":
        """The same as options say it: the loss, attention and what is counted, by name."""
        copies, workload = self.facts.get("copies", TRANSFORMERS), self.workload
        if copies.slices > 1:
            workload = replace(workload, loss="sliced")
        elif copies.in_place:
            workload = replace(workload, loss="fused")
        if self.facts.get("kernel") == "eager":
            workload = replace(workload, attention="materialised")
        if "empties_cache" in self.facts:
            workload = replace(workload, mem_kind="allocated")
        return replace(self, workload=workload, facts={})


# Names in the rows, of models and their shapes: ms-swift's own, or of the same shapes.
ALIASES = (
    (r"^qwen1half-", "Qwen1.5-"),
    (r"^THUDM/chatglm3-6b-(32k|128k)$", "THUDM/chatglm3-6b"),
    (r"^ibm/PowerMoE-3b$", "ibm-granite/granite-3.0-3b-a800m-instruct"),
)


@cache
def architecture_named(name: str) -> Architecture:
    """The layers of a model by its name in the rows."""
    for pattern, other in ALIASES:
        name = re.sub(pattern, other, name)
    if name not in SHAPES:
        return known_model(name)[1]
    published, config = SHAPES[name]
    architecture = architecture_from_config(config)
    if abs(architecture.num_parameters / published - 1) > 0.02:
        raise Skipped(MODEL)
    return architecture
