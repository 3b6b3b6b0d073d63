"""What the llama.cpp engine predicts for a row: the buffers of its devices, and each log line."""

import re
from collections.abc import Callable

from uma.architecture.layers import Architecture
from uma.checkpoint.free_names import NamedFormat
from uma.engines import llama_cpp_weights
from uma.engines.llama_cpp_buffers import MicroBatch, compute_bytes
from uma.engines.llama_cpp_cache import cache_type, cells, kv_cache_bytes
from uma.errors import UmaError, UnknownName
from uma.units import MIB

from .rows import FORMAT, INCOMPLETE, METRIC, Row, Skipped, Subject, cards_of, decimal, number

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
        name.removeprefix("mem_"): (size, decimal(row[name]) * MIB)
        for name, size in predicted.items()
        if decimal(row[name])
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
    flash_attn, kv_type = row["flash_attn"] == "1", _kv_type(row)
    n_ubatch = number(row["ubatch"]) or N_UBATCH
    held = cells(architecture, context, 1, n_ubatch, unified=False, swa_full=False)
    batch = MicroBatch(
        tokens=min(n_ubatch, held.full),
        held=held,
        flash_attn=flash_attn,
        type_k=kv_type,
        type_v=kv_type,
        num_devices=cards_of(row) if _build(row) >= PIPELINES else 1,
    )
    return {
        "mem_weights": _weights(weigh, architecture, mix),
        "mem_kv": kv_cache_bytes(architecture, held, kv_type, kv_type, flash_attn=flash_attn),
        "mem_compute": compute_bytes(architecture, batch),
    }


def _weights(weigh: Callable[[Architecture, str], int], model: Architecture, mix: str) -> int:
    """Bytes in that mix.

    Raises:
        Skipped: If llama-quantize has none of that name.
    """
    try:
        return weigh(model, mix)
    except UnknownName as error:
        raise Skipped(FORMAT) from error


def _kv_type(row: Row) -> str:
    """The type of the cache; ``f16`` where none is told, as in llama.cpp.

    Raises:
        Skipped: If it is none of llama.cpp's.
    """
    told = re.match(r"[\w.]*", row["kv_dtype"].lower())
    name = told[0] if told else ""
    if name in ("", "fp16"):
        return "f16"
    try:
        return cache_type(name)
    except UmaError as error:
        raise Skipped(FORMAT) from error


def mix_of(named: NamedFormat | None) -> str:
    """The mix of llama-quantize.

    Raises:
        Skipped: If none is told.
    """
    if named is None:
        raise Skipped(INCOMPLETE)
    if named.scheme == "gguf":
        return named.name
    if named.scheme == "mxfp4":
        return "MXFP4_MOE"
    if named.scheme == "float":
        return {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[named.name]
    raise Skipped(FORMAT)


def _build(row: Row) -> int:
    """The build number that a version begins with; the newest where none is told."""
    told = re.match(r"b(\d+)", row["engine_version"])
    return int(told[1]) if told else PIPELINES
