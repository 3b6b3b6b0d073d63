"""What each engine calls its formats of weights and caches, and its options."""

from collections.abc import Mapping
from typing import Any

from uma.errors import UsageError
from uma.workload import Engine, Inference

DEFAULT_FORMATS: dict[Engine, str] = {
    "llama.cpp": "Q4_K_M",
    "transformers": "bf16",
    "vllm": "bf16",
}

# What ``--bits`` means in each engine's own words, the usual format of that width.
BITS: dict[Engine, dict[int, str]] = {
    "llama.cpp": {
        16: "F16",
        8: "Q8_0",
        6: "Q6_K",
        5: "Q5_K_M",
        4: "Q4_K_M",
        3: "Q3_K_M",
        2: "Q2_K",
    },
    "transformers": {16: "bf16", 8: "int8", 4: "nf4"},
    "vllm": {16: "bf16", 8: "fp8", 4: "awq"},
}

# ``quant_method`` and, of compressed-tensors, ``format`` in ``quantization_config``.
STORED = {"gptq": "gptq", "awq": "awq", "fp8": "fp8", "mxfp4": "mxfp4"}
COMPRESSED_TENSORS = {
    "pack-quantized": "compressed-tensors-w4a16",
    "int-quantized": "compressed-tensors-w8a8",
    "float-quantized": "compressed-tensors-fp8",
    "nvfp4-pack-quantized": "compressed-tensors-nvfp4",
}

# general.file_type of GGUF: llama.cpp b11434, include/llama.h, llama_ftype.
# fmt: off
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}
# fmt: on

EIGHT_BIT_CACHE: dict[Engine, tuple[dict[str, str], tuple[str, ...]]] = {
    "llama.cpp": (
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        ("-ctk", "q8_0", "-ctv", "q8_0"),
    ),
    "vllm": ({"kv_cache_dtype": "fp8"}, ("--kv-cache-dtype", "fp8")),
}


def format_of_bits(engine: Engine, bits: int) -> str:
    """The usual format of ``bits`` bits in the engine's own words.

    Raises:
        UsageError: If the engine has none.
    """
    formats = BITS[engine]
    if bits not in formats:
        known = ", ".join(f"{width} ({formats[width]})" for width in sorted(formats))
        raise UsageError(f"--bits {bits}: {engine} has {known}; or name a format with --quant")
    return formats[bits]


def stored_format(engine: Engine, config: Mapping[str, Any]) -> str | None:
    """The format that ``quantization_config`` says a checkpoint has, as the engine would load it.

    ``None`` where it says none, for llama.cpp, whose files have formats of their own.
    """
    stored = config.get("quantization_config")
    if engine == "llama.cpp" or not isinstance(stored, Mapping):
        return None
    method = str(stored.get("quant_method", "")).lower()
    if method == "bitsandbytes":
        double = "nf4-double" if stored.get("bnb_4bit_use_double_quant") else "nf4"
        return "int8" if stored.get("load_in_8bit") else double
    if method == "compressed-tensors":
        return COMPRESSED_TENSORS.get(str(stored.get("format")))
    return "gptq-int8" if method == "gptq" and stored.get("bits") == 8 else STORED.get(method)


def cache_words(engine: Engine, settings: Any) -> str:
    """The number format of the cache in the engine's words."""
    if engine == "llama.cpp":
        types = {settings.cache_type_k: None, settings.cache_type_v: None}
        return " / ".join(types)
    if engine == "vllm" and settings.kv_cache_dtype != "auto":
        return str(settings.kv_cache_dtype)
    return str(settings.dtype)


def setting_words(engine: Engine, settings: Any, workload: Inference) -> tuple[str, ...]:
    """The engine's own options that its terms depend on, as they are given to it; none is open."""
    if engine == "llama.cpp":
        words = [
            f"-c {workload.context_tokens * max(workload.batch_size, settings.n_parallel)}",
            f"-np {max(workload.batch_size, settings.n_parallel)}",
            f"-ub {settings.n_ubatch}",
            f"-fa {settings.flash_attn}",
            f"-ctk {settings.cache_type_k}",
            f"-ctv {settings.cache_type_v}",
        ]
        words += ["--swa-full"] if settings.swa_full else []
        words += [f"--cache-ram {settings.cache_ram_mib}"] if settings.cache_ram_mib else []
        return tuple(words)
    if engine == "vllm":
        return (
            f"--max-model-len {workload.context_tokens}",
            f"--max-num-seqs {settings.max_num_seqs}",
            f"--max-num-batched-tokens {settings.max_num_batched_tokens}",
            f"--kv-cache-dtype {settings.kv_cache_dtype}",
            f"--gpu-memory-utilization {settings.gpu_memory_utilization}",
        )
    return (
        f"attn_implementation {settings.attn_implementation}",
        f"cache_implementation {settings.cache_implementation}",
    )


def is_16_bit(engine: Engine, settings: Any) -> bool:
    """Whether the cache has keys and values of 16 bits."""
    words = cache_words(engine, settings)
    return words in ("f16", "bf16", "bfloat16", "float16")
