"""What the mlx engine predicts for a row."""

from collections.abc import Mapping
from typing import Any

from uma.architecture.layers import Architecture, Experts, parameters
from uma.catalog import model_config
from uma.checkpoint.free_names import NamedFormat
from uma.engines import mlx
from uma.errors import UmaError
from uma.ledger import peak
from uma.memory.term import MemoryTerm
from uma.memory.weights import Format, weight_bytes
from uma.quantization import (
    MODES,
    Quantization,
    StoredQuantization,
    quantization_for,
    quantization_of_config,
)
from uma.workload import DEFAULT_PREFILL_STEP_SIZE, Inference

from .rows import FORMAT, INCOMPLETE, Row, Skipped, Subject, number, tokens_of

# The mlx-swift-lm fork that published its measurements runs prompts in chunks of a size that each
# model file sets (github.com/ekryski/mlx-swift-lm at 49d6b80, Libraries/MLXLLM/Models/*.swift,
# defaultPrefillStepSize; 1,024 where none is set: Libraries/MLXLMCommon/LanguageModel.swift).
SWIFT_PREFILL_STEPS = {"gemma4": 4096, "gpt_oss": 2048, "qwen3_5_moe": 4096}
SWIFT_PREFILL_STEP = 1024

DENSE_PARTS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "router.proj")

PREFILL_BATCH = 8  # mlx-lm 0.32.2, generate.py, BatchGenerator

CACHE_BITS = {"affine-4": 4, "affine-8": 8}
CACHES_16 = ("", "f16", "fp16", "bf16", "fp16/bf16", "bf16/fp16")


def peak_bytes(row: Row, subject: Subject, group: str) -> int:
    """The predicted peak of MLX's allocator.

    Raises:
        Skipped: If the row's format, cache or lengths are not told or not claimed.
    """
    return peak(terms(row, subject, group))[1]


def terms(row: Row, subject: Subject, group: str) -> tuple[MemoryTerm, ...]:
    architecture = subject.architecture
    weights = weights_term(architecture, subject, row["quant"])
    prompt, context = tokens_of(row)
    if row["kv_dtype"] not in CACHE_BITS and row["kv_dtype"] not in CACHES_16:
        raise Skipped(FORMAT)
    workload = Inference(
        context_tokens=context,
        prompt_tokens=prompt,
        batch_size=number(row["batch"]) or 1,
        prefill_step_size=number(row["ubatch"]) or _prefill_step(architecture, group),
        kv_bits=CACHE_BITS.get(row["kv_dtype"]),
        prefill_batch_size=PREFILL_BATCH,
    )
    wide = group.startswith("mlx-swift") and _is_float32(architecture)
    return mlx.inference_terms(architecture, weights, workload, activation_bytes=4 if wide else 2)


def _prefill_step(architecture: Architecture, group: str) -> int:
    if not group.startswith("mlx-swift"):
        return DEFAULT_PREFILL_STEP_SIZE
    return SWIFT_PREFILL_STEPS.get(architecture.module or "", SWIFT_PREFILL_STEP)


def weights_term(architecture: Architecture, subject: Subject, told: str = "") -> MemoryTerm:
    """The weights in the format that a repository's name tells.

    Raises:
        Skipped: If it is no format of MLX's, or none is told.
    """
    config = model_config(subject.model).values
    if subject.format is None and told:
        raise Skipped(FORMAT)
    try:
        return weight_bytes(architecture, mlx_format(architecture, subject.format, config))
    except (UmaError, ValueError) as error:
        raise Skipped(FORMAT) from error


def mlx_format(
    architecture: Architecture, named: NamedFormat | None, config: Mapping[str, Any]
) -> Format:
    """MLX's format of a repository with that format in its name; ``None`` is 16 bits.

    Without one it keeps what the model was published in. Experts that were published in mxfp4
    stay so when the rest is quantized (mlx-lm 0.32.2, ``utils.py``, ``quantize_model``: a module
    that is quantized already has no ``to_quantized``).

    Raises:
        Skipped: If MLX has no such format.
    """
    published = quantization_of_config(config)
    if named is None:
        if published is None:
            raise Skipped(FORMAT if "quantization_config" in config else INCOMPLETE)
        return published
    if named.scheme == "float":
        return None
    if named.scheme == "mxfp4-q":
        return _experts_apart(architecture, Quantization(named.bits or 8, 64))
    if named.scheme in MODES:
        return quantization_for(named.bits, named.scheme, named.group_size)
    if named.scheme != "bits":
        raise Skipped(FORMAT)
    chosen = quantization_for(named.bits, None, named.group_size)
    if chosen is None:
        raise Skipped(INCOMPLETE)
    if published is not None and published.default.mode == "mxfp4":
        return _experts_apart(architecture, chosen)
    if architecture.module == "gemma4" and _has_experts(architecture):
        return _dense_parts_apart(architecture, chosen)
    return chosen


def _experts_apart(architecture: Architecture, rest: Quantization) -> StoredQuantization:
    """Experts in mxfp4, all else as ``rest``."""
    experts: dict[str, Quantization | None] = {
        parameter.name: Quantization(4, 32, "mxfp4")
        for parameter in parameters(architecture)
        if len(parameter.shape) == 3 and parameter.kind == "matrix"
    }
    return StoredQuantization(rest, experts)


def _is_float32(architecture: Architecture) -> bool:
    """Whether that fork computes in float32: its Gemma 4 weighs experts with a float32 softmax
    (``Gemma4.swift``, ``precise: true``), which all that follows takes over. The cache that it
    prints has twice the bytes of 16-bit numbers for this model, and for no other.
    """
    return architecture.module == "gemma4" and _has_experts(architecture)


def _has_experts(architecture: Architecture) -> bool:
    return any(
        isinstance(part, Experts) for layer in architecture.layers for part in layer.feed_forward
    )


def _dense_parts_apart(architecture: Architecture, chosen: Quantization) -> StoredQuantization:
    """Gemma 4 with experts as mlx-vlm 0.4.4 to 0.6 made the public repositories.

    It keeps the router and the feed-forward part beside the experts in 8 bits
    (``gemma4/language.py``, ``quant_predicate``), mlx-lm's own conversion the router alone.
    """
    kept: dict[str, Quantization | None] = {
        parameter.name: Quantization(8, 64)
        for parameter in parameters(architecture)
        if parameter.name.endswith(DENSE_PARTS)
    }
    return StoredQuantization(chosen, kept)
