"""``config.json`` of a GGUF file as an estimate needs it: shapes of caches and layers, no more.

Wider than what is converted (``uma.runtime.gguf``). Keys: gguf-py/gguf/constants.py. What they
stand for: ``set_gguf_parameters`` of conversion/*.py, ``load_arch_hparams`` of src/models/*.cpp,
all of llama.cpp b11434. Checked against what that converter writes for the catalog's models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uma.checkpoint.bounded_json import shown
from uma.checkpoint.gguf import GGUFArray, GGUFHeader
from uma.errors import CheckpointError, UnsupportedModel

MAX_LAYERS = 1_000
MAX_INTEGER = 2**31 - 1

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Keys:
    """Values under the architecture's prefix; of one for every layer, a list."""

    values: Mapping[str, Any]
    prefix: str

    def get(self, key: str, default: Any = None) -> Any:
        """A number, true or false, or a list of them.

        Raises:
            CheckpointError: If the value is none of these.
        """
        value = self.values.get(f"{self.prefix}.{key}", default)
        if isinstance(value, GGUFArray):
            value = value.read() if value.length <= MAX_LAYERS else None
        found = value if isinstance(value, list) else [value]
        if value is not default and not all(isinstance(one, int | float) for one in found):
            raise self._wrong(key, value)
        return value

    def each(self, key: str, layers: int, default: Any = None) -> list[int]:
        """The value of every layer, also where one stands for all."""
        value = self.get(key, default)
        found = value[:layers] if isinstance(value, list) else [value] * layers
        if len(found) < layers or not all(_is_size(one) for one in found):
            raise self._wrong(key, value)
        return found

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list the largest."""
        value = self.get(key, default)
        found = value if isinstance(value, list) else [value]
        if not found or not all(_is_size(one) for one in found):
            raise self._wrong(key, value)
        return max(map(int, found))

    def _wrong(self, key: str, value: Any) -> CheckpointError:
        if value is None:
            return CheckpointError(f"this GGUF file has no key {self.prefix}.{key}")
        return CheckpointError(f"GGUF key {self.prefix}.{key} is {shown(str(value))}, no size")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_INTEGER


def config_of_gguf(header: GGUFHeader) -> Fields:
    """The ``config.json`` that an estimate can be made from.

    Raises:
        UnsupportedModel: An architecture whose keys are not known here.
        CheckpointError: A key is missing, or no size.
    """
    name = header.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"GGUF architecture {shown(str(name))} is not known; known: {', '.join(FAMILIES)}"
        )
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    return fields_of(Keys(header.metadata, str(name)), shapes)


def fields_of(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    """The fields of ``config.json``; ``shapes`` are those of the tensors in numpy's order."""
    model_type, rules = FAMILIES[keys.prefix]
    fields = {"model_type": model_type, **_common(keys, shapes)}
    for rule in rules:
        fields |= rule(keys, fields)
    return fields


def _common(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    """What every architecture has. The last layers may be for multi-token prediction."""
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise CheckpointError("this GGUF file has no token_embd.weight; download it again")
    predicting = keys.size("nextn_predict_layers", 0)
    layers = keys.size("block_count") - predicting
    if not 0 < layers <= MAX_LAYERS:
        raise CheckpointError(f"{layers:,} layers are no model; at most {MAX_LAYERS:,} are read")
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    found = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": keys.size("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "max_position_embeddings": keys.size("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **({"num_nextn_predict_layers": predicting} if predicting else {}),
    }
    width = keys.size("attention.key_length", hidden // heads if heads else 0)
    return found | ({"head_dim": width} if heads else {})


def _experts(keys: Keys, fields: Fields) -> Fields:
    """By all the names that configs have for them; a part of them is read by each family."""
    count, used = keys.size("expert_count", 0), keys.size("expert_used_count", 0)
    inner = keys.size("expert_feed_forward_length", fields["intermediate_size"])
    shared = keys.size("expert_shared_count", 0)
    dense = keys.size("leading_dense_block_count", 0)
    return {
        "num_experts": count,
        "num_local_experts": count,
        "n_routed_experts": count,
        "moe_num_experts": count,
        "num_experts_per_tok": used,
        "moe_k": used,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", 0),
        "shared_intermediate_size": keys.size("expert_shared_feed_forward_length", 0),
        "n_shared_experts": shared,
        "num_shared_experts": shared,
        "moe_num_shared_experts": shared,
        "first_k_dense_replace": dense,
        "num_dense_layers": dense,
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
    }


def _experts_as_wide_as_layers(keys: Keys, fields: Fields) -> Fields:
    """Families whose ``intermediate_size`` is that of an expert."""
    return _experts(keys, fields) | {
        "intermediate_size": keys.size("expert_feed_forward_length", fields["intermediate_size"])
    }


def _mixtral(keys: Keys, fields: Fields) -> Fields:
    if not keys.size("expert_count", 0):
        return {}
    return {"model_type": "mixtral", **_experts(keys, fields)}


def _llama4(keys: Keys, fields: Fields) -> Fields:
    """src/models/llama4.cpp sets chunks of 8,192 itself."""
    return _experts(keys, fields) | {
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size_mlp": fields["intermediate_size"],
        "interleave_moe_layer_step": keys.size("interleave_moe_layer_step"),
        "attention_chunk_size": 8192,
    }


def _from_layer(keys: Keys, fields: Fields) -> Fields:
    """Experts from the first layer that is not led by a dense one, and in each of some."""
    layers, dense = fields["num_hidden_layers"], fields["first_k_dense_replace"]
    step = keys.size("interleave_moe_layer_step", 1)
    return {
        "moe_layer_start_index": dense,
        "moe_layer_end_index": layers - 1,
        "moe_layer_interval": step,
    }


def _latent(keys: Keys, fields: Fields) -> Fields:
    """Widths of the latents; files before the absorbed form have no ``_mla`` keys."""
    rope = keys.size("rope.dimension_count")
    key = keys.size("attention.key_length_mla", keys.size("attention.key_length"))
    value = keys.size("attention.value_length_mla", keys.size("attention.value_length"))
    rank = keys.size("attention.q_lora_rank", 0)
    return {
        "num_key_value_heads": fields["num_attention_heads"],
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "q_lora_rank": rank or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "head_dim": rope,
    }


def _indexer(keys: Keys, fields: Fields) -> Fields:
    return {
        "index_n_heads": keys.size("attention.indexer.head_count"),
        "index_head_dim": keys.size("attention.indexer.key_length"),
        "index_topk": keys.size("attention.indexer.top_k"),
    }


def _windows(every: int | None = None) -> Callable[[Keys, Fields], Fields]:
    """Layers that look back a window: those marked, else all but each ``every``-th."""

    def rule(keys: Keys, fields: Fields) -> Fields:
        layers, window = fields["num_hidden_layers"], keys.size("attention.sliding_window", 0)
        if not window:
            return {}
        period = keys.get("attention.sliding_window_pattern", every)
        if isinstance(period, list):
            sliding = [bool(one) for one in period[:layers]]
        else:
            sliding = [not period or (i + 1) % int(period) != 0 for i in range(layers)]
        types = ["sliding_attention" if one else "full_attention" for one in sliding]
        return {"sliding_window": window, "layer_types": types, "sliding_window_pattern": every}

    return rule


def _olmo3(keys: Keys, fields: Fields) -> Fields:
    return {"model_type": "olmo3"} if "sliding_window" in fields else {}


def _gemma3n(keys: Keys, fields: Fields) -> Fields:
    layers = fields["num_hidden_layers"]
    return {
        "num_kv_shared_layers": keys.size("attention.shared_kv_layers", layers - 20),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": fields["vocab_size"],
        "altup_num_inputs": keys.size("altup.num_inputs"),
        "intermediate_size": keys.each("feed_forward_length", layers),
        "laurel_rank": 64,
    }


def _delta_net(keys: Keys, fields: Fields) -> Fields:
    """Gated delta nets, with attention in every ``full_attention_interval``-th layer."""
    heads = keys.size("ssm.time_step_rank")
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": keys.size("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "full_attention_interval": keys.size("full_attention_interval", 4),
        "partial_rotary_factor": 0.25,
    }


def _granite_hybrid(keys: Keys, fields: Fields) -> Fields:
    layers, heads = fields["num_hidden_layers"], keys.size("ssm.time_step_rank", 0)
    attends = keys.each("attention.head_count_kv", layers)
    return {
        "layer_types": ["attention" if one else "mamba" for one in attends],
        "mamba_n_heads": heads,
        "mamba_d_head": keys.size("ssm.inner_size", 0) // max(1, heads),
        "mamba_d_state": keys.size("ssm.state_size", 0),
        "mamba_n_groups": keys.size("ssm.group_count", 0),
        "mamba_d_conv": keys.size("ssm.conv_kernel", 0),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _convolutions(keys: Keys, fields: Fields) -> Fields:
    attends = keys.each("attention.head_count_kv", fields["num_hidden_layers"])
    return {
        "layer_types": ["full_attention" if one else "conv" for one in attends],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": fields["intermediate_size"],
        "norm_eps": 1e-5,
    }


def _mamba(keys: Keys, fields: Fields) -> Fields:
    return {
        "state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "intermediate_size": keys.size("ssm.inner_size"),
        "time_step_rank": keys.size("ssm.time_step_rank"),
        "use_bias": False,
        "use_conv_bias": True,
    }


def _nemotron(keys: Keys, fields: Fields) -> Fields:
    """Layers have one part: attention, a feed-forward part, or neither and so a state."""
    layers = fields["num_hidden_layers"]
    attends = keys.each("attention.head_count_kv", layers)
    feeds = keys.each("feed_forward_length", layers)
    feed = "E" if keys.size("expert_count", 0) else "-"
    pairs = zip(attends, feeds, strict=True)
    heads = keys.size("ssm.time_step_rank")
    return {
        "hybrid_override_pattern": "".join("*" if a else feed if f else "M" for a, f in pairs),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.size("ssm.inner_size") // max(1, heads),
        "ssm_state_size": keys.size("ssm.state_size"),
        "n_groups": keys.size("ssm.group_count"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length", 0),
        "moe_latent_size": keys.size("moe_latent_size", 0) or None,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
    }


def _gemma4(keys: Keys, fields: Fields) -> Fields:
    """Full layers have wider heads than those with a window, and perhaps fewer of keys."""
    layers, types = fields["num_hidden_layers"], fields["layer_types"]
    keyed = keys.each("attention.head_count_kv", layers)
    by_type = dict(zip(types, keyed, strict=True))
    full = by_type.get("full_attention")
    return {
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": fields["head_dim"],
        "num_key_value_heads": by_type.get("sliding_attention", full),
        "num_global_key_value_heads": full,
        "num_kv_shared_layers": keys.size("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": fields["vocab_size"],
        "enable_moe_block": bool(fields["num_experts"]),
        "top_k_experts": fields["num_experts_per_tok"],
        "intermediate_size": min(keys.each("feed_forward_length", layers)),
        "use_double_wide_mlp": len(set(keys.each("feed_forward_length", layers))) > 1,
        "attention_k_eq_v": full != by_type.get("sliding_attention", full),
    }


Rule = Callable[[Keys, Fields], Fields]
FAMILIES: dict[str, tuple[str, tuple[Rule, ...]]] = {
    "llama": ("llama", (_mixtral,)),
    "afmoe": ("afmoe", (_experts, _windows(4))),
    "apertus": ("apertus", ()),
    "arcee": ("arcee", ()),
    "bitnet": ("bitnet", ()),
    "chatglm": ("glm", ()),
    "command-r": ("cohere", ()),
    "deepseek2": ("deepseek_v3", (_experts, _latent)),
    "deepseek32": ("deepseek_v32", (_experts, _latent, _indexer)),
    "dots1": ("dots1", (_experts,)),
    "ernie4_5": ("ernie4_5", ()),
    "ernie4_5-moe": ("ernie4_5_moe", (_experts, _from_layer)),
    "exaone4": ("exaone4", (_windows(4),)),
    "gemma": ("gemma", ()),
    "gemma2": ("gemma2", (_windows(2),)),
    "gemma3": ("gemma3_text", (_windows(6),)),
    "gemma3n": ("gemma3n", (_windows(5), _gemma3n)),
    "gemma4": ("gemma4_text", (_experts, _windows(6), _gemma4)),
    "glm-dsa": ("glm_moe_dsa", (_experts, _latent, _indexer)),
    "glm4": ("glm4", ()),
    "glm4moe": ("glm4_moe", (_experts,)),
    "gpt-oss": ("gpt_oss", (_experts_as_wide_as_layers, _windows(2))),
    "granite": ("granite", ()),
    "granitehybrid": ("granitemoehybrid", (_experts, _granite_hybrid)),
    "granitemoe": ("granitemoe", (_experts,)),
    "hunyuan-dense": ("hunyuan_v1_dense", ()),
    "lfm2": ("lfm2", (_convolutions,)),
    "lfm2moe": ("lfm2_moe", (_experts, _convolutions)),
    "llama4": ("llama4", (_llama4,)),
    "mamba": ("mamba", (_mamba,)),
    "minimax-m2": ("minimax_m2", (_experts_as_wide_as_layers,)),
    "mistral3": ("ministral3", ()),
    "mistral4": ("mistral4", (_experts, _latent)),
    "nemotron_h": ("nemotron_h", (_experts, _nemotron)),
    "nemotron_h_moe": ("nemotron_h", (_experts, _nemotron)),
    "olmo": ("olmo", ()),
    "olmo2": ("olmo2", (_windows(4), _olmo3)),
    "olmoe": ("olmoe", (_experts_as_wide_as_layers,)),
    "phi3": ("phi3", ()),
    "phi2": ("phi", ()),
    "qwen2": ("qwen2", ()),
    "qwen2moe": ("qwen2_moe", (_experts,)),
    "qwen2vl": ("qwen2", ()),
    "qwen3": ("qwen3", ()),
    "qwen35": ("qwen3_5", (_delta_net,)),
    "qwen35moe": ("qwen3_5_moe", (_experts, _delta_net)),
    "qwen3moe": ("qwen3_moe", (_experts,)),
    "qwen3next": ("qwen3_next", (_experts, _delta_net)),
    "qwen3vl": ("qwen3", ()),
    "qwen3vlmoe": ("qwen3_moe", (_experts,)),
    "seed_oss": ("seed_oss", ()),
    "smollm3": ("smollm3", ()),
    "stablelm": ("stablelm", ()),
    "starcoder2": ("starcoder2", ()),
}
"""By ``general.architecture``: the ``model_type`` and what is read beside the common keys."""
