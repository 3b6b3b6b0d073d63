"""The memory of serving with vLLM on one CUDA device (vllm 0.33.0).

The terms say what a workload needs. vLLM itself takes ``gpu_memory_utilization`` of the device at
start and fills what weights, activations and graphs leave with blocks: ``reserved_bytes``,
``num_blocks``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from uma.architecture.layers import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
)
from uma.engines import schemes
from uma.engines.cuda import CUDA_CONTEXT
from uma.engines.vllm_cache import CacheBlocks, cache_blocks, layer_specs
from uma.errors import DoesNotFit, UsageError
from uma.memory.paging import BLOCK_SIZE
from uma.memory.term import MemoryTerm
from uma.units import MIB
from uma.workload import Inference

VOCABULARY_MULTIPLE = 64  # layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
GRAPH_BYTES = 1 * MIB  # v1/worker/gpu_model_runner.py, profile_cudagraph_memory: least of a graph
LARGEST_GRAPH = 512  # config/vllm.py, default_max_graph_size

# v1/sample/ops/topk_topp_sampler.py on float32 logits: sorted, their order as int64,
# probabilities, sums and a mask, beside logits in both widths.
SAMPLING_BYTES = 2 + 4 + 4 + 8 + 4 + 4 + 1

CacheDtype = Literal["auto", "bfloat16", "fp8"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of ``vllm serve`` by their names, with the defaults of cards below 70 GiB.

    ``max_num_seqs`` and ``max_num_batched_tokens`` are 1,024 and 8,192 on H100 and H200
    (``engine/arg_utils.py``, ``get_batch_defaults``). ``gpu_memory_utilization`` was 0.9 before
    the versions with 0.92.
    """

    gpu_memory_utilization: float = 0.92
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_cache_dtype: CacheDtype = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    enforce_eager: bool = False
    async_scheduling: bool = True
    cuda_context_bytes: int = CUDA_CONTEXT

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def cache_bytes(self) -> int:
        return 1 if self.kv_cache_dtype == "fp8" else self.dtype_bytes

    @property
    def in_flight_tokens(self) -> int:
        """Tokens of the batches that run at once (``config/vllm.py``, ``max_in_flight_tokens``)."""
        return self.max_num_batched_tokens * (2 if self.async_scheduling else 1)


DEFAULTS = Settings()


def formats() -> tuple[str, ...]:
    """Names of the formats of weights."""
    return tuple(schemes.schemes())


def weights_term(architecture: Architecture, quant: str) -> MemoryTerm:
    """The term ``weights``, experts converted as well, the vocabulary in whole 64s.

    Latent attention keeps 16-bit copies of its projection to the heads beside it
    (``layers/attention/mla_attention.py``, ``process_weights_after_loading``: W_UK_T, W_UV).

    Raises:
        UnknownName: If vLLM has no such format.
    """
    scheme = schemes.scheme_named(quant)
    size = schemes.weight_bytes(architecture, scheme, vocabulary_multiple=VOCABULARY_MULTIPLE)
    size += scheme.rest_bytes * sum(schemes.latent_matrices(architecture))
    return MemoryTerm("weights", size, "exact", f"shapes x {scheme.name}: {scheme.source}")


def inference_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    settings: Settings = DEFAULTS,
) -> tuple[MemoryTerm, ...]:
    """What ``batch_size`` sequences of ``context_tokens`` need, by phase.

    Raises:
        UsageError: If the workload's cache has bits that vLLM's does not.
    """
    if workload.kv_bits not in (None, 8 * settings.cache_bytes):
        raise UsageError(
            f"vLLM's cache has no {workload.kv_bits} bits by --kv-bits; use kv_cache_dtype 'auto' "
            "or 'fp8'"
        )
    blocks = sequence_blocks(architecture, workload.context_tokens, settings)
    caches = workload.batch_size * blocks.size_bytes
    layers = "kv_cache_interface.py, blocks of all groups"
    terms = [weights, *schemes.tower_terms(architecture, settings.dtype_bytes)]
    terms.append(MemoryTerm("kv_cache", caches, "exact", layers))
    context = settings.cuda_context_bytes
    terms.append(
        MemoryTerm("runtime_context", context, "fitted", "vLLM's logs of non-torch memory")
    )
    if not settings.enforce_eager:
        graphs = cuda_graph_bytes(settings)
        terms.append(MemoryTerm("other", graphs, "fitted", "CUDA graphs, vLLM's least a graph"))
    rows = settings.max_num_batched_tokens
    width = _activation_width(architecture)
    activations = rows * width * settings.dtype_bytes
    source = "profile run of max_num_batched_tokens"
    terms.append(MemoryTerm("activations", activations, "bound", source, "prefill"))
    hidden = rows * architecture.hidden_size * settings.dtype_bytes
    terms.append(MemoryTerm("activations", hidden, "bound", source, "decode"))
    logits = min(rows, settings.max_num_seqs) * architecture.vocab_size * SAMPLING_BYTES
    terms.append(MemoryTerm("logits", logits, "bound", "profile run of the sampler", "decode"))
    return tuple(terms)


def splits_heads(architecture: Architecture, num_devices: int) -> bool:
    """Whether tensor parallelism can split the model over so many devices.

    ``config/model.py``, ``verify_with_parallel_config``: attention heads must be divisible;
    ``layers/linear.py``, ``QKVParallelLinear``: so must heads of keys, one way or the other.
    """
    for mixer in (mixer for layer in architecture.layers for mixer in layer.mixers):
        if isinstance(mixer, Recurrent):
            continue
        keys = mixer.num_key_value_heads if isinstance(mixer, Attention) else num_devices
        if mixer.num_attention_heads % num_devices or (keys % num_devices and num_devices % keys):
            return False
    return True


def parallel_words(architecture: Architecture, num_devices: int) -> tuple[str, ...]:
    """The option that puts the model on all devices: vLLM takes one unless it is told."""
    if num_devices == 1:
        return ()
    kind = "tensor" if splits_heads(architecture, num_devices) else "pipeline"
    return (f"--{kind}-parallel-size {num_devices}",)


def on_devices(
    terms: Iterable[MemoryTerm], architecture: Architecture, num_devices: int
) -> tuple[MemoryTerm, ...]:
    """What all devices hold together: weights once, all else but the context on each.

    With tensor parallelism latents are cached on every device, and so are fewer heads of keys
    than there are devices (``config/model.py``, ``get_num_kv_heads``). The context is left as it
    is: a machine's limit already lacks those of the other devices.
    """
    parts = num_devices
    if splits_heads(architecture, num_devices):
        parts = min([num_devices, *_cache_parts(architecture)])
    found = []
    for term in terms:
        size = term.size_bytes
        if term.name == "kv_cache":
            size = -(-size * num_devices // parts)
        elif term.name not in ("weights", "runtime_context"):
            size *= num_devices
        found.append(replace(term, size_bytes=size))
    return tuple(found)


def _cache_parts(architecture: Architecture) -> Iterator[int]:
    for mixer in (mixer for layer in architecture.layers for mixer in layer.mixers):
        if isinstance(mixer, LatentAttention):
            yield 1
        elif isinstance(mixer, Attention):
            yield mixer.num_key_value_heads


def sequence_blocks(
    architecture: Architecture, tokens: int, settings: Settings = DEFAULTS
) -> CacheBlocks:
    """Blocks that vLLM must have free to admit one sequence of ``tokens``."""
    specs = layer_specs(architecture, settings.cache_bytes, settings.dtype_bytes)
    return cache_blocks(specs, tokens, settings.block_size, settings.in_flight_tokens)


def reserved_bytes(device_bytes: int, settings: Settings = DEFAULTS) -> int:
    """What vLLM takes of a device at start, whatever the workload needs."""
    return int(device_bytes * settings.gpu_memory_utilization)


def num_blocks(
    architecture: Architecture,
    weights: MemoryTerm,
    device_bytes: int,
    settings: Settings = DEFAULTS,
) -> int:
    """Blocks that the reserved part has room for after all else.

    Raises:
        DoesNotFit: If there is room for none.
    """
    terms = inference_terms(architecture, weights, Inference(context_tokens=1), settings)
    always = sum(t.size_bytes for t in terms if t.phase == "always" and t.name != "kv_cache")
    peaks = [sum(t.size_bytes for t in terms if t.phase == p) for p in ("prefill", "decode")]
    left = reserved_bytes(device_bytes, settings) - always - max(peaks)
    block_bytes = sequence_blocks(architecture, 1, settings).block_bytes
    if left < block_bytes:
        raise DoesNotFit(
            f"weights and activations leave {left:,} bytes of the part that "
            f"gpu_memory_utilization {settings.gpu_memory_utilization} reserves; raise it, or "
            "lower max_num_batched_tokens and max_num_seqs"
        )
    return left // block_bytes if block_bytes else 0


def cuda_graph_bytes(settings: Settings = DEFAULTS) -> int:
    """The least that graphs take: one for every captured size, with and without attention."""
    return 2 * GRAPH_BYTES * len(list(capture_sizes(settings)))


def capture_sizes(settings: Settings = DEFAULTS) -> Iterator[int]:
    """Batch sizes that graphs are captured for (``config/vllm.py``, ``_set_cudagraph_sizes``)."""
    largest = min(2 * settings.max_num_seqs, LARGEST_GRAPH, settings.max_num_batched_tokens)
    yield from (size for size in (1, 2, 4) if size <= largest)
    yield from range(8, min(largest + 1, 256), 8)
    yield from range(256, largest + 1, 16)


def _activation_width(architecture: Architecture) -> int:
    """Elements for every token of a batch in the layer that needs most.

    Hidden states, residual and the input of a part; then its arrays. The logs of vLLM issue 10517
    (17.06 and 17.98 GiB with 14.99 of weights at 20,000 and 29,000 tokens of Llama 3.1 8B) give
    3 x hidden_size + 3 x intermediate_size.
    """
    hidden = architecture.hidden_size
    return 3 * hidden + max(_layer_width(layer, hidden) for layer in architecture.layers)


def _layer_width(layer: Layer, hidden_size: int) -> int:
    """Gate and up together, and their product; for experts, of every chosen row.

    ``layers/fused_moe/fused_moe.py``: the rows of gate and up share their buffer with the rows
    of the output.
    """
    widths = [0]
    for part in layer.feed_forward:
        if isinstance(part, FeedForward):
            widths.append((3 if part.gated else 2) * part.intermediate_size)
        elif isinstance(part, Experts):
            inner = part.moe_intermediate_size
            between = max((2 if part.gated else 1) * inner, hidden_size) + inner
            widths.append(part.num_experts_per_tok * between)
            widths.append(hidden_size + 3 * part.shared_intermediate_size)
    widths += [_mixer_width(mixer) for mixer in layer.mixers]
    return max(widths)


def _mixer_width(mixer: Attention | LatentAttention | Recurrent) -> int:
    """Queries, keys and values, and the output."""
    if isinstance(mixer, Attention):
        query, key = mixer.num_attention_heads, mixer.num_key_value_heads
        return (query + key) * (mixer.head_dim + mixer.v_head_dim)
    if isinstance(mixer, LatentAttention):
        # Prefill expands keys and values of all heads (mla_attention.py, forward_mha).
        key = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return mixer.num_attention_heads * (2 * key + mixer.qk_nope_head_dim + 2 * mixer.v_head_dim)
    conv = sum(state.shape[-1] for state in mixer.states if "conv" in state.name)
    return 2 * conv + 3 * mixer.inner_size
