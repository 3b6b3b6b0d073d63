"""``config.json`` in mlx-lm's terms from the metadata of a GGUF file.

Keys: gguf-py/gguf/constants.py. Defaults and constants of each architecture:
src/models/*.cpp and src/llama-model.cpp of llama.cpp b11434. Fields: the ``ModelArgs`` of
mlx_lm/models/*.py, mlx-lm 0.32.2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uma.errors import CheckpointError, UnsupportedModel
from uma.runtime.gguf.metadata import Metadata

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""By ``general.architecture``: the class of transformers. Mistral and Mixtral are ``llama``."""

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B models scale queries by hidden_size / heads, not by head_dim: only the number of layers
tells them (llama.cpp, src/models/gemma2.cpp and gemma3.cpp)."""

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of ``config.json``, and what a reader should be told about them."""

    fields: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.fields["model_type"])


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata under the prefix of the architecture."""

    metadata: Metadata
    prefix: str

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(f"{self.prefix}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        return self.metadata.count(f"{self.prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(f"{self.prefix}.{key}", default)

    def positive(self, key: str, default: float | None = None) -> float:
        return self.metadata.positive(f"{self.prefix}.{key}", default)

    def text(self, key: str, default: str | None = None) -> str:
        return self.metadata.text(f"{self.prefix}.{key}", default)


def model_config(
    metadata: Metadata,
    shapes: Mapping[str, Sequence[int]],
    tables: Mapping[str, Sequence[float]],
) -> ModelConfig:
    """The ``config.json`` of a GGUF file, without quantization and token ids.

    Args:
        shapes: Shape of each tensor in numpy's order, by name.
        tables: Values of the rotary tables that the file has, by tensor name.

    Raises:
        UnsupportedModel: An architecture, or a setting of one, that is not converted.
        CheckpointError: A key is missing, or contradicts a tensor.
    """
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture[:40]!r} is not converted; known: "
            f"{', '.join(ARCHITECTURES)} (Mistral and Mixtral are llama)"
        )
    keys = _Keys(metadata, architecture)
    fields = _common(keys, architecture, shapes)
    notes: list[str] = []
    rope = _rope(keys, tables, fields)
    match architecture:
        case "llama":
            _llama(keys, shapes, fields)
        case "qwen2":
            _require_plain_heads(fields, architecture)
        case "qwen3moe":
            _qwen3_moe(keys, fields)
        case "gemma2":
            _gemma2(keys, fields, notes)
        case "gemma3":
            _gemma3(keys, fields)
        case "phi3":
            _phi3(keys, fields)
    _add_rope(rope, fields, notes)
    return ModelConfig(fields, tuple(notes))


def _common(keys: _Keys, architecture: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What every architecture has."""
    embedding = shapes.get("token_embd.weight", ())
    hidden_size = keys.count("embedding_length")
    if len(embedding) != 2 or embedding[1] != hidden_size:
        raise CheckpointError(
            f"token_embd.weight has shape {tuple(embedding)}; {hidden_size} columns expected"
        )
    heads = keys.count("attention.head_count")
    layers = keys.count("block_count")
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{layers:,} layers are not a model; at most {MAX_LAYERS:,} are read")
    head_dim = keys.count("attention.key_length", hidden_size // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("keys and values of different head dimension are not converted")
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.positive("rope.freq_base", 10000.0),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _llama(keys: _Keys, shapes: Mapping[str, Sequence[int]], fields: dict[str, Any]) -> None:
    if keys.integer("expert_count", 0):
        _require_plain_heads(fields, "mixtral")
        fields |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": keys.count("expert_count"),
            "num_experts_per_tok": keys.count("expert_used_count"),
        }
        return
    fields["attention_bias"] = _biases(
        shapes, "attn_", ("attn_q", "attn_k", "attn_v", "attn_output")
    )
    fields["mlp_bias"] = _biases(shapes, "ffn_", ("ffn_gate", "ffn_up", "ffn_down"))


def _biases(shapes: Mapping[str, Sequence[int]], prefix: str, parts: Sequence[str]) -> bool:
    """Whether the layers have biases: mlx-lm's llama has them on all of ``parts`` or on none."""
    found = [f"blk.0.{part}.bias" in shapes for part in parts]
    if any(found) and not all(found):
        raise UnsupportedModel(f"biases on some of the {prefix} matrices only are not converted")
    return all(found)


def _require_plain_heads(fields: dict[str, Any], model_type: str) -> None:
    """Those modules of mlx-lm have no ``head_dim`` of their own."""
    if fields["head_dim"] * fields["num_attention_heads"] != fields["hidden_size"]:
        raise UnsupportedModel(
            f"{model_type} with head dimension {fields['head_dim']} is not hidden_size / heads, "
            "which mlx-lm needs"
        )


def _qwen3_moe(keys: _Keys, fields: dict[str, Any]) -> None:
    """llama.cpp always normalizes the weights of the chosen experts (src/models/qwen3moe.cpp)."""
    fields |= {
        "model_type": "qwen3_moe",
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _query_pre_attn_scalar(fields: dict[str, Any]) -> int:
    if fields["num_hidden_layers"] == GEMMA_27B_LAYERS[fields["model_type"]]:
        return int(fields["hidden_size"] // fields["num_attention_heads"])
    return int(fields["head_dim"])


def _gemma2(keys: _Keys, fields: dict[str, Any], notes: list[str]) -> None:
    fields |= {
        "query_pre_attn_scalar": _query_pre_attn_scalar(fields),
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if fields["max_position_embeddings"] > fields["sliding_window"]:
        notes.append(
            f"mlx-lm attends to the whole context in every layer of gemma2; beyond "
            f"{fields['sliding_window']} tokens its answers differ from llama.cpp's"
        )


def _gemma3(keys: _Keys, fields: dict[str, Any]) -> None:
    if keys.number("final_logit_softcapping", 0.0):
        raise UnsupportedModel("gemma3 with final_logit_softcapping is not in mlx-lm")
    window = keys.integer("attention.sliding_window", 0)
    pattern = keys.count("attention.sliding_window_pattern", 6) if window else 1
    fields |= {
        "query_pre_attn_scalar": _query_pre_attn_scalar(fields),
        "sliding_window": window or fields["max_position_embeddings"],
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma3_text",
    }


def _phi3(keys: _Keys, fields: dict[str, Any]) -> None:
    _require_plain_heads(fields, "phi3")
    rotated, head_dim = keys.count("rope.dimension_count", fields["head_dim"]), fields["head_dim"]
    fraction = rotated / head_dim
    if int(head_dim * fraction) != rotated or rotated > head_dim:
        raise UnsupportedModel(f"phi3 with {rotated} of {head_dim} rotated dimensions")
    fields["partial_rotary_factor"] = fraction
    fields["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", fields["max_position_embeddings"]
    )


def _rope(
    keys: _Keys, tables: Mapping[str, Sequence[float]], fields: dict[str, Any]
) -> dict[str, Any] | None:
    """``rope_scaling`` of ``config.json``, or ``None`` where positions are not scaled."""
    head_dim = fields["head_dim"]
    if keys.prefix != "phi3" and keys.count("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{keys.prefix} that rotates a part of the head is not converted")
    context = fields["max_position_embeddings"]
    original = keys.count("rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in tables:
        return _longrope(keys, tables, context, original)
    if "rope_freqs.weight" in tables:
        return llama3_scaling(tables["rope_freqs.weight"], fields["rope_theta"], head_dim)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(keys, factor, original)
    raise UnsupportedModel(f"rope scaling {kind[:40]!r} is not converted; known: linear, yarn")


def _yarn(keys: _Keys, factor: float, original: int) -> dict[str, Any]:
    """YaRN; mlx-lm derives the attention factor from ``factor`` as llama.cpp does."""
    for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        if keys.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise UnsupportedModel(f"YaRN with {key} other than 1 is not converted")
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        "mscale": 1.0,
        "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0),
    }


def _longrope(
    keys: _Keys, tables: Mapping[str, Sequence[float]], context: int, original: int
) -> dict[str, Any]:
    """LongRoPE; mlx-lm derives the factor on queries and keys from the two lengths."""
    scale = context / original if original > 1 else 1.0  # one position has no logarithm
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if not math.isclose(keys.number("rope.scaling.attn_factor", 1.0), expected, rel_tol=1e-4):
        raise UnsupportedModel(f"LongRoPE whose attn_factor is not {expected:.4f} is not converted")
    return {
        "rope_type": "longrope",
        "type": "longrope",
        "factor": scale,
        "original_max_position_embeddings": original,
        "short_factor": list(tables.get("rope_factors_short.weight", ())),
        "long_factor": list(tables["rope_factors_long.weight"]),
    }


def llama3_scaling(
    factors: Sequence[float], rope_theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The four numbers behind Llama 3's frequency factors, which a GGUF file does not keep.

    ``factors`` holds one divisor per frequency: 1 for short waves, ``factor`` for long ones,
    between them interpolated (llama.cpp, conversion/llama.py, ``generate_extra_tensors``). Llama
    3.1 to 3.3 all have low 1, high 4 and 8,192 positions; the factor is the largest divisor. The
    result is checked against every divisor.

    Raises:
        UnsupportedModel: Other factors than these.
    """
    factor = max(factors, default=1.0)
    if all(value == 1.0 for value in factors):
        return None
    low, high, original = 1.0, 4.0, 8192
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * rope_theta ** (2 * index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise UnsupportedModel("rope_freqs.weight does not follow Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _add_rope(rope: dict[str, Any] | None, fields: dict[str, Any], notes: list[str]) -> None:
    """Put ``rope_scaling`` where the module of mlx-lm reads it."""
    if rope is None:
        return
    model_type = fields["model_type"]
    if model_type in ("qwen3_moe", "mixtral", "gemma2"):
        original = rope.get("original_max_position_embeddings")
        if rope["rope_type"] != "yarn" or not original:
            raise UnsupportedModel(f"mlx-lm's {model_type} has no rope scaling")
        fields["max_position_embeddings"] = original
        notes.append(f"mlx-lm's {model_type} has no YaRN: the context is the original {original}")
        return
    if model_type == "phi3" and rope["rope_type"] not in ("longrope", "linear"):
        raise UnsupportedModel(f"mlx-lm's phi3 has no rope scaling {rope['rope_type']}")
    fields["rope_scaling"] = rope
