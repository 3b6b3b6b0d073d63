"""The memory of llama.cpp's inference, all terms together (b11434)."""

from dataclasses import dataclass
from typing import Literal

from uma.architecture.layers import Architecture, LatentAttention, Recurrent
from uma.engines.llama_cpp_buffers import (
    MicroBatch,
    compute_bytes,
    device_compute_bytes,
    host_compute_bytes,
)
from uma.engines.llama_cpp_cache import attentions, cache_type, cells, kv_cache_bytes, state_bytes
from uma.engines.llama_cpp_weights import device_weight_bytes, formats, mix_named, weight_bytes
from uma.errors import UsageError
from uma.memory.term import Basis, MemoryTerm, TermName
from uma.quantization import FLOAT32
from uma.units import MIB
from uma.workload import Inference

__all__ = [
    "ALL_LAYERS",
    "LlamaCpp",
    "device_terms",
    "formats",
    "inference_terms",
    "notes",
    "weights_term",
]

ALL_LAYERS = -1


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Options of ``llama-cli`` with its defaults (b11434, ``common/common.h``).

    ``n_parallel`` sequences have the workload's context each; the larger of it and the workload's
    batch counts. ``flash_attn`` ``auto`` is on, as wherever the device has the kernel.
    ``n_gpu_layers`` of 0 keeps all on the host; layers are split over ``num_devices``.
    ``runtime_context_bytes`` is what the driver takes for the process, which llama.cpp's own
    figures leave out: measured, not known from shapes. ``cache_ram_mib`` is how many MiB
    ``llama-server`` may keep of the states of earlier prompts, in the host's memory: 8192 unless
    it is told otherwise (``common/arg.cpp``, ``--cache-ram``), and none in ``llama-cli``.
    """

    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_batch: int = 2048
    n_ubatch: int = 512
    n_parallel: int = 1
    kv_unified: bool = False
    flash_attn: Literal["on", "off", "auto"] = "auto"
    swa_full: bool = False
    n_gpu_layers: int = ALL_LAYERS
    num_devices: int = 1
    runtime_context_bytes: int = 0
    cache_ram_mib: int = 0


def weights_term(architecture: Architecture, quant: str) -> MemoryTerm:
    """The term ``weights``: every tensor of the GGUF file in the mix ``quant``.

    Raises:
        UnknownName: If llama.cpp has no such mix.
    """
    source = f"shapes x {mix_named(quant)} of llama-quant.cpp"
    return MemoryTerm("weights", weight_bytes(architecture, quant), "exact", source)


def inference_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    settings: LlamaCpp | None = None,
) -> tuple[MemoryTerm, ...]:
    """Every term of a context; llama.cpp allocates all of them at the start.

    Raises:
        UsageError: If the settings contradict each other.
        UnsupportedModel: If llama.cpp caches this attention by rules that are not known here.
    """
    chosen = settings or LlamaCpp()
    sequences, batch = _reserved(architecture, workload, chosen)
    type_k, type_v = chosen.cache_type_k, chosen.cache_type_v
    cache = kv_cache_bytes(architecture, batch.held, type_k, type_v, flash_attn=batch.flash_attn)
    terms = [
        weights,
        MemoryTerm("kv_cache", cache, "exact", "llama-kv-cache.cpp, by shape"),
        MemoryTerm(
            "recurrent_state",
            state_bytes(architecture, sequences),
            "exact",
            "llama-memory-recurrent.cpp, 32-bit",
        ),
        MemoryTerm(
            "activations", _compute_bytes(architecture, batch), "bound", "ggml-alloc.c, by shape"
        ),
        MemoryTerm(
            "logits",
            sequences * architecture.vocab_size * FLOAT32,
            "exact",
            "llama-context.cpp, output_reserve",
        ),
        MemoryTerm(
            "runtime_context", chosen.runtime_context_bytes, "fitted", "the device's driver"
        ),
        MemoryTerm("saved_prompts", chosen.cache_ram_mib * MIB, "bound", "--cache-ram"),
    ]
    return tuple(term for term in terms if term.size_bytes or term.name == "kv_cache")


def device_terms(
    architecture: Architecture,
    quant: str,
    workload: Inference,
    settings: LlamaCpp | None = None,
    weights_bytes: int | None = None,
) -> tuple[MemoryTerm, ...]:
    """The device's own buffers of model, cache and computation, as llama.cpp's log prints them.

    The host keeps the token embeddings and the inputs of the graph. All layers are offloaded.
    ``weights_bytes`` are those of the model's buffer where they are known already.
    """
    if weights_bytes is None:
        weights_bytes = device_weight_bytes(architecture, quant)
    sequences, batch = _reserved(architecture, workload, settings or LlamaCpp())
    cache = kv_cache_bytes(
        architecture, batch.held, batch.type_k, batch.type_v, flash_attn=batch.flash_attn
    )
    sizes: tuple[tuple[TermName, int, Basis], ...] = (
        ("weights", weights_bytes, "exact"),
        ("kv_cache", cache, "exact"),
        ("recurrent_state", state_bytes(architecture, sequences), "exact"),
        ("activations", compute_bytes(architecture, batch), "bound"),
    )
    source = "the device's buffers, by shape"
    return tuple(MemoryTerm(name, size, basis, source) for name, size, basis in sizes if size)


def device_compute(
    architecture: Architecture, workload: Inference, settings: LlamaCpp
) -> list[int]:
    """Bytes of the compute buffer of each of ``num_devices`` devices."""
    return device_compute_bytes(architecture, _reserved(architecture, workload, settings)[1])


def notes(architecture: Architecture) -> tuple[str, ...]:
    """What the terms of this architecture do not model closely."""
    found = []
    if any(isinstance(m, Recurrent) for layer in architecture.layers for m in layer.mixers):
        found.append("llama.cpp's compute buffer of recurrent layers is only approximate")
    return tuple(found)


def _compute_bytes(architecture: Architecture, batch: MicroBatch) -> int:
    """Bytes of the compute buffers of the device and of the host beside it."""
    size = compute_bytes(architecture, batch)
    if batch.placement == "device":
        size += host_compute_bytes(architecture, batch)
    return size


def _reserved(
    architecture: Architecture, workload: Inference, settings: LlamaCpp
) -> tuple[int, MicroBatch]:
    """Sequences, and the micro-batch that the graph is reserved for."""
    for name in ("n_batch", "n_ubatch", "n_parallel", "num_devices"):
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} {getattr(settings, name)}: it must be at least 1")
    sequences = max(settings.n_parallel, workload.batch_size)
    n_ubatch = min(settings.n_ubatch, settings.n_batch)
    held = cells(
        architecture,
        workload.context_tokens,
        sequences,
        n_ubatch,
        unified=settings.kv_unified,
        swa_full=settings.swa_full,
    )
    latent = any(isinstance(mixer, LatentAttention) for mixer in attentions(architecture))
    if latent and cache_type(settings.cache_type_k) != cache_type(settings.cache_type_v):
        raise UsageError(
            f"{architecture.model_type} keeps keys and values in one latent: "
            "--cache-type-k and --cache-type-v must be the same"
        )
    batch = MicroBatch(
        tokens=min(n_ubatch, held.full * held.streams),
        held=held,
        flash_attn=settings.flash_attn != "off",
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        placement="host" if settings.n_gpu_layers == 0 else "device",
        num_devices=settings.num_devices,
    )
    return sequences, batch
