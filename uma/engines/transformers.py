"""The memory of inference with Hugging Face transformers on a CUDA device.

Facts are of transformers 5.24.0 unless another version is named. What one device holds: a model
that is spread over several has one context and one workspace for each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from uma.architecture.layers import (
    Architecture,
    Attention,
    LatentAttention,
    Recurrent,
)
from uma.engines import schemes
from uma.engines.cuda import CUBLAS_WORKSPACE, CUDA_CONTEXT
from uma.engines.eager import EAGER_BY_DEFAULT
from uma.engines.transformers_activations import Call, transient
from uma.engines.transformers_cache import (
    CacheImplementation,
    CacheRules,
    cache_bytes,
    state_bytes,
)
from uma.errors import UsageError
from uma.memory.activations import Transient
from uma.memory.term import MemoryTerm, Phase
from uma.units import MIB
from uma.workload import Inference

AttnImplementation = Literal["sdpa", "flash_attention_2", "eager"]
ExpertsImplementation = Literal["grouped_mm", "eager"]

# bitsandbytes replaces nn.Linear, and experts are bare stacks of matrices since transformers 5
# (integrations/bitsandbytes.py, replace_with_bnb_linear): they stay in 16 bits.
LINEAR_ONLY = frozenset({"nf4", "nf4-double", "int8"})

SEGMENT = 2 * MIB  # c10/cuda/CUDACachingAllocator.h, kRoundLarge: large blocks are whole segments
SAMPLING_BYTES = 28  # generation/logits_process.py, top-p: two float32, sorted, order, sums, mask


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of ``from_pretrained`` and ``generate`` by their names, with their defaults.

    ``logits_to_keep`` is the number of last tokens whose logits are computed, 0 for all.
    ``upcast_logits``, ``latent_cache``, ``sliding_cache`` and ``rope_tables`` are what earlier
    versions did otherwise: ``settings_of`` knows them. ``own_head`` says that the checkpoint of a
    model with a tied head stores the head all the same, as AutoAWQ's do: the hub counts 630,167,424
    parameters of Qwen2.5-0.5B-Instruct-AWQ, 136,134,656 more than the model has. It is loaded, then
    tied (4.51.3, modeling_utils.py, ``from_pretrained``). Over ``num_devices`` cards the layers are
    split (``device_map``): each runs its own in turn, and at its peak holds what one layer needs.
    ``attn_implementation`` is left open where it is the model's own default: ``resolved`` fills it.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    attn_implementation: AttnImplementation | None = None
    cache_implementation: CacheImplementation = "dynamic"
    experts_implementation: ExpertsImplementation = "grouped_mm"
    prefill_chunk_size: int | None = None
    logits_to_keep: int = 1
    upcast_logits: bool = False
    latent_cache: bool = True
    sliding_cache: bool = True
    rope_tables: bool = False
    own_head: bool = False
    num_devices: int = 1
    cublas_workspace_bytes: int = CUBLAS_WORKSPACE
    cuda_context_bytes: int = CUDA_CONTEXT

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


DEFAULTS = Settings()


def settings_of(version: str, settings: Settings = DEFAULTS) -> Settings:
    """``settings`` as an earlier version of transformers would follow them.

    Read in the sources of 4.38.2, 4.45.0, 4.46.0, 4.51.3, 5.0.0, 5.14.0 and 5.16.0: before 4.45
    logits of the whole prompt, and tables of cosines in every layer; before 4.46 logits in
    float32; before 5.0 a loop over experts and windows that cut no cache; before 5.16 latent
    attention that caches whole heads.

    Raises:
        UsageError: If ``version`` does not begin with two numbers.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise UsageError(f"{version!r} is no version of transformers; write it as 4.46.0")
    release = (int(numbers[1]), int(numbers[2]))
    changes: dict[str, object] = {}
    if release < (4, 45):
        changes |= {"logits_to_keep": 0, "rope_tables": True}
    if release < (4, 46):
        changes |= {"upcast_logits": True}
    if release < (5, 0):
        changes |= {"experts_implementation": "eager", "sliding_cache": False}
    if release < (5, 16):
        changes |= {"latent_cache": False}
    return replace(settings, **changes)  # type: ignore[arg-type]


def resolved(architecture: Architecture, settings: Settings) -> Settings:
    """``settings`` with the attention that the model gets where none is asked for."""
    if settings.attn_implementation is not None:
        return settings
    eager = architecture.model_type in EAGER_BY_DEFAULT
    return replace(settings, attn_implementation="eager" if eager else "sdpa")


def require_attention(architecture: Architecture, settings: Settings) -> None:
    """Refuse an attention that transformers refuses for the model.

    Raises:
        UsageError: If it is ``sdpa`` and the model's classes have none.
    """
    if settings.attn_implementation == "sdpa" and architecture.model_type in EAGER_BY_DEFAULT:
        raise UsageError(
            f"transformers has no sdpa for {architecture.model_type}; use eager, its default, or "
            "flash_attention_2 where a kernel for the model is installed"
        )


def formats() -> tuple[str, ...]:
    """Names of the formats of weights."""
    return tuple(schemes.schemes())


def weights_term(architecture: Architecture, quant: str) -> MemoryTerm:
    """The term ``weights`` with every converted matrix in the format ``quant``.

    Raises:
        UnknownName: If transformers has no such format.
    """
    scheme = schemes.scheme_named(quant)
    size = schemes.weight_bytes(architecture, scheme, experts=scheme.name not in LINEAR_ONLY)
    return MemoryTerm("weights", size, "exact", f"shapes x {scheme.name}: {scheme.source}")


def inference_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: Inference,
    settings: Settings = DEFAULTS,
) -> tuple[MemoryTerm, ...]:
    """Every term of one ``generate``, by phase.

    Without ``runtime_context`` and ``buffer_pool`` they are what torch counts as allocated.

    Raises:
        UsageError: If the workload asks for a quantized cache.
    """
    if workload.kv_bits is not None:
        raise UsageError(
            f"a cache of {workload.kv_bits} bits is not modelled for transformers; leave it in "
            "16 bits, or choose another engine"
        )
    settings = resolved(architecture, settings)
    rules = _rules(workload, settings)
    terms = [weights, *schemes.tower_terms(architecture, settings.dtype_bytes)]
    terms += _constant_terms(architecture, rules, settings)
    if settings.own_head and architecture.tie_word_embeddings:
        terms += _head_terms(architecture, settings, terms)
    prompt = workload.longest_prompt_tokens
    if prompt > 1:
        terms += _prefill_terms(architecture, rules, workload, settings)
    terms += _decode_terms(architecture, rules, workload, settings)
    return tuple(terms)


def _head_terms(
    architecture: Architecture, settings: Settings, terms: Sequence[MemoryTerm]
) -> list[MemoryTerm]:
    """The head that a checkpoint stores beside the embedding, until it is tied to it.

    What counts as ``other`` is allocated after that, so the head takes its place first.
    """
    head = architecture.vocab_size * architecture.hidden_size * settings.dtype_bytes
    later = sum(term.size_bytes for term in terms if term.name == "other")
    source = "the checkpoint's own head, before tie_weights"
    return [MemoryTerm("other", max(0, head - later), "exact", source, "load")]


def notes(architecture: Architecture, settings: Settings = DEFAULTS) -> tuple[str, ...]:
    """What the terms of this architecture do not model closely."""
    mixers = [mixer for layer in architecture.layers for mixer in layer.mixers]
    found = []
    kinds = sorted({mixer.kind for mixer in mixers if isinstance(mixer, Recurrent)})
    if kinds:
        found.append(f"temporaries of {', '.join(kinds)} layers are approximate")
    if any(isinstance(m, LatentAttention) and m.index_head_dim is not None for m in mixers):
        found.append("the sparse-attention indexer's temporaries are not modelled")
    if settings.attn_implementation is None and architecture.model_type in EAGER_BY_DEFAULT:
        found.append(
            "attention is eager, as transformers has no sdpa for this model: the scores of all "
            "pairs of tokens are held; --attn-implementation flash_attention_2 needs a kernel"
        )
    return tuple(found)


def _rules(workload: Inference, settings: Settings) -> CacheRules:
    """A static cache has ``max_length - 1`` slots: the last token's keys are never needed."""
    return CacheRules(
        implementation=settings.cache_implementation,
        max_cache_len=_last_seen(workload),
        latent_cache=settings.latent_cache,
        sliding_cache=settings.sliding_cache,
        batch_size=workload.batch_size,
        dtype_bytes=settings.dtype_bytes,
    )


def _last_seen(workload: Inference) -> int:
    """Tokens that the caches have seen at the end; the last one generated never enters them."""
    prompt = workload.longest_prompt_tokens
    return max(prompt, workload.context_tokens - 1)


def _constant_terms(
    architecture: Architecture, rules: CacheRules, settings: Settings
) -> list[MemoryTerm]:
    terms = []
    states = state_bytes(architecture, rules)
    if states:
        terms.append(MemoryTerm("recurrent_state", states, "exact", "cache_utils.py, by shape"))
    other = settings.cublas_workspace_bytes
    if settings.rope_tables:
        other += _rope_table_bytes(architecture, settings)
    terms.append(MemoryTerm("other", other, "exact", "cuBLAS workspace, rotary tables"))
    context = settings.cuda_context_bytes
    terms.append(
        MemoryTerm("runtime_context", context, "fitted", "vLLM's logs of non-torch memory")
    )
    tensors = sum(2 for layer in architecture.layers if rules.slot_bytes(layer))
    pool = tensors * SEGMENT
    terms.append(MemoryTerm("buffer_pool", pool, "bound", "segments of 2 MiB, one a cache tensor"))
    return terms


def _rope_table_bytes(architecture: Architecture, settings: Settings) -> int:
    """Cosines and sines of all positions in every layer (4.38.2, ``_set_cos_sin_cache``)."""
    positions = architecture.max_position_embeddings or 0
    width = sum(
        mixer.head_dim
        for layer in architecture.layers
        for mixer in layer.mixers
        if isinstance(mixer, Attention)
    )
    return 2 * positions * width * settings.dtype_bytes


def _prefill_terms(
    architecture: Architecture, rules: CacheRules, workload: Inference, settings: Settings
) -> list[MemoryTerm]:
    """The last chunk of the prompt, or all of it: ``generate`` does not cut it by itself."""
    prompt = workload.longest_prompt_tokens
    chunk = min(prompt, settings.prefill_chunk_size or prompt)
    call = _call(workload, settings, chunk, prompt)
    kept = min(chunk, settings.logits_to_keep) or chunk
    found = transient(architecture, call)
    terms = _moment(
        "prefill",
        cache_bytes(architecture, rules, prompt, chunk),
        found,
        call.array(architecture.hidden_size),
        _logits(architecture, workload, settings, kept),
    )
    others = (settings.num_devices - 1) * found.total
    return [
        replace(term, size_bytes=term.size_bytes + others) if term.name == "activations" else term
        for term in terms
    ]


def _decode_terms(
    architecture: Architecture, rules: CacheRules, workload: Inference, settings: Settings
) -> list[MemoryTerm]:
    """The last token, and what windows still hold of the prompt when the first one begins.

    A dynamic cache copies one tensor of a layer at a time to append to it.
    """
    prompt, last = workload.longest_prompt_tokens, _last_seen(workload)
    chunk = min(prompt, settings.prefill_chunk_size or prompt)
    caches = cache_bytes(architecture, rules, last, 1)
    surplus = cache_bytes(architecture, rules, prompt, chunk) - caches
    call = _call(workload, settings, 1, last)
    found = transient(architecture, call)
    if settings.cache_implementation == "dynamic":
        copied = max(rules.largest_tensor(layer) for layer in architecture.layers) * last
        found = Transient(found.activations, max(found.attention, copied))
    logits = _logits(architecture, workload, settings, 1)
    terms = _moment("decode", caches, found, call.array(architecture.hidden_size), logits)
    if surplus > 0:
        source = "the prompt behind windows, freed layer by layer as the first token is made"
        terms.append(MemoryTerm("other", surplus, "bound", source, "decode"))
    return terms


def _call(workload: Inference, settings: Settings, tokens: int, attended: int) -> Call:
    return Call(
        tokens,
        attended,
        workload.batch_size,
        settings.dtype_bytes,
        eager=_eager(settings),
        latent_cache=settings.latent_cache,
        grouped_experts=settings.experts_implementation == "grouped_mm",
    )


def _eager(settings: Settings) -> bool:
    return settings.attn_implementation == "eager"


def _logits(architecture: Architecture, workload: Inference, settings: Settings, rows: int) -> int:
    """Logits of ``rows`` tokens a sequence, and the last one's in sampling.

    Earlier versions made float32 ones of all of them, the first still alive.
    """
    element = settings.dtype_bytes + (4 if settings.upcast_logits else 0)
    return workload.batch_size * architecture.vocab_size * (rows * element + SAMPLING_BYTES)


def _moment(
    phase: Phase, caches: int, found: Transient, hidden: int, logits: int
) -> list[MemoryTerm]:
    """The moment of a call that needs most: inside a layer, or with the logits at its end."""
    source = "arrays that the modules name at once"
    terms = [MemoryTerm("kv_cache", caches, "exact", "cache_utils.py, by shape", phase)]
    if found.total >= hidden + logits:
        terms.append(MemoryTerm("activations", found.activations, "bound", source, phase))
        terms.append(MemoryTerm("attention", found.attention, "bound", source, phase))
    else:
        terms.append(MemoryTerm("activations", hidden, "bound", source, phase))
        terms.append(MemoryTerm("logits", logits, "bound", "rows kept, and sampling", phase))
    return [term for term in terms if term.size_bytes]
