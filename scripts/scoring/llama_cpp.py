"""What the llama.cpp engine predicts for a row: the buffers of its devices, and each log line."""

import re

from uma.checkpoint.free_names import NamedFormat
from uma.engines import llama_cpp_weights
from uma.engines.llama_cpp_buffers import MicroBatch, compute_bytes
from uma.engines.llama_cpp_cache import cells, kv_cache_bytes
from uma.units import MIB

from .rows import FORMAT, INCOMPLETE, METRIC, Row, Skipped, Subject, number

N_UBATCH = 512  # llama.cpp, common.h: -ub
DEFAULT_CONTEXT = 512  # common.h, n_ctx, before builds that take the model's own
PIPELINES = 2409  # pull request 6017: micro-batches in a pipeline, a compute buffer on every device


def buffer_bytes(row: Row, subject: Subject, group: str) -> int:
    """Weights, cache and compute buffer on the devices.

    Raises:
        Skipped: If the format is not told.
    """
    return sum(_predicted(row, subject).values())


def parts(row: Row, subject: Subject) -> dict[str, tuple[int, float]]:
    """Predicted and logged bytes by term.

    Raises:
        Skipped: If the unit of the log's lines or the format is not told.
    """
    if not row["mem_unit"].startswith("MiB"):
        raise Skipped(METRIC)
    predicted = _predicted(row, subject)
    return {
        name.removeprefix("mem_"): (size, float(row[name]) * MIB)
        for name, size in predicted.items()
        if row[name]
    }


def _predicted(row: Row, subject: Subject) -> dict[str, int]:
    """Bytes by the column of their term.

    Token embeddings stay on the host beside a card, and are mapped with the rest on a Mac.
    Without a context it is a run of llama-bench, which allocates what it needs, or one with the
    default of its time.
    """
    mix, architecture = mix_of(subject.format), subject.architecture
    on_mac = row["chip"].startswith("Apple")
    weigh = llama_cpp_weights.weight_bytes if on_mac else llama_cpp_weights.device_weight_bytes
    tokens = number(row["prompt_tokens"]) + number(row["gen_tokens"])
    context = number(row["ctx_alloc"]) or tokens or DEFAULT_CONTEXT
    flash_attn = row["flash_attn"] == "1"
    n_ubatch = number(row["ubatch"]) or N_UBATCH
    held = cells(architecture, context, 1, n_ubatch, unified=False, swa_full=False)
    batch = MicroBatch(
        tokens=min(n_ubatch, held.full),
        held=held,
        flash_attn=flash_attn,
        type_k="f16",
        type_v="f16",
        num_devices=number(row["gpu_count"]) or 1 if _build(row) >= PIPELINES else 1,
    )
    return {
        "mem_weights": weigh(architecture, mix),
        "mem_kv": kv_cache_bytes(architecture, held, "f16", "f16", flash_attn=flash_attn),
        "mem_compute": compute_bytes(architecture, batch),
    }


def mix_of(named: NamedFormat | None) -> str:
    """The mix of llama-quantize.

    Raises:
        Skipped: If none is told.
    """
    if named is None:
        raise Skipped(INCOMPLETE)
    if named.scheme == "gguf":
        return named.name
    if named.scheme == "float":
        return {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[named.name]
    raise Skipped(FORMAT)


def _build(row: Row) -> int:
    """The build number that a version begins with; the newest where none is told."""
    told = re.match(r"b(\d+)", row["engine_version"])
    return int(told[1]) if told else PIPELINES
