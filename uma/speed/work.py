"""What a step of decode, or a prompt, makes a processor do: bytes read, FLOPs, kernels started.

Every figure is a sum over layers, so that the work of a part of the model is a part of it.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from uma.architecture.layers import (
    Architecture,
    Attention,
    LatentAttention,
    Mixer,
    Recurrent,
)
from uma.architecture.remembered import remembered
from uma.engines.llama_cpp_cache import ignores_window, window_of
from uma.memory.reads import WeightReads, experts_of
from uma.quantization import FLOAT32
from uma.workload import Engine


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step with ``tokens`` tokens, or of a prompt of as many in ``passes`` passes.

    ``weights_bytes`` are read in every pass; ``dequantized_bytes`` is what their numbers take in
    16 bits, 0 where they are kept in those.
    ``cache_bytes`` are keys and values read, ``attention_flops`` those of attention, ``flops``
    all others. ``score_bytes`` is what the scores of attention take where they are stored, and
    ``hidden_bytes`` what the hidden states of one pass take in 16 bits.
    """

    tokens: int
    passes: int
    layers: float
    expert_layers: float
    weights_bytes: float
    dequantized_bytes: float
    flops: float
    attention_flops: float
    score_bytes: float
    cache_bytes: float
    hidden_bytes: float

    def part(self, share: float) -> "Work":
        """The work of ``share`` of all layers, 0 to 1, if layers are alike."""
        return replace(
            self.of_layers(share),
            weights_bytes=self.weights_bytes * share,
            dequantized_bytes=self.dequantized_bytes * share,
            flops=self.flops * share,
        )

    def of_layers(self, share: float) -> "Work":
        """The same weights, with attention, cache and kernels of ``share`` of all layers."""
        if share == 1:
            return self
        return replace(
            self,
            layers=self.layers * share,
            expert_layers=self.expert_layers * share,
            attention_flops=self.attention_flops * share,
            score_bytes=self.score_bytes * share,
            cache_bytes=self.cache_bytes * share,
        )


def decode_work(
    architecture: Architecture,
    reads: WeightReads,
    engine: Engine,
    context_tokens: float,
    *,
    batch_size: int = 1,
    tokens_each: int = 1,
    kv_bits: float = 16,
) -> Work:
    """A step of ``batch_size`` sequences that have ``context_tokens`` each.

    ``tokens_each`` are the tokens of one sequence in the step: several where drafted ones are
    verified. ``kv_bits`` are those of one cached number, scales included.
    """
    tokens = batch_size * tokens_each
    cached = _cached_elements(architecture, engine, context_tokens)
    scored = attention_elements(architecture, engine, context_tokens)
    return Work(
        tokens=tokens,
        passes=1,
        layers=len(architecture.layers),
        expert_layers=_expert_layers(architecture),
        weights_bytes=reads.size_bytes(tokens),
        dequantized_bytes=0,
        flops=2 * reads.active_elements * tokens,
        attention_flops=2 * scored * tokens,
        score_bytes=_scored_heads(architecture, engine, context_tokens) * tokens * FLOAT32,
        cache_bytes=(cached * kv_bits / 8 + _state_bytes(architecture)) * batch_size,
        hidden_bytes=2 * architecture.hidden_size * tokens,
    )


def prompt_work(
    architecture: Architecture,
    reads: WeightReads,
    engine: Engine,
    prompt_tokens: int,
    *,
    pass_tokens: int,
    cached_tokens: int = 0,
    batch_size: int = 1,
    quantized: bool = True,
    tile_tokens: int = 1,
) -> Work:
    """Prompts of ``prompt_tokens`` behind ``cached_tokens``, ``pass_tokens`` in each pass.

    An expert multiplies whole tiles of ``tile_tokens`` tokens, however few have chosen it.

    The head runs for the last token alone: mlx-lm evaluates only the caches of a chunk
    (``generate.py``, ``generate_step``), llama.cpp only asked-for logits (``llama-context.cpp``).
    """
    tokens = prompt_tokens * batch_size
    size = min(tokens, pass_tokens)
    middle = cached_tokens + prompt_tokens / 2
    scored = attention_elements(architecture, engine, middle) * tokens
    heads = _scored_heads(architecture, engine, middle)
    return Work(
        tokens=tokens,
        passes=ceil(tokens / size),
        layers=len(architecture.layers),
        expert_layers=_expert_layers(architecture),
        weights_bytes=reads.size_bytes(size),
        dequantized_bytes=2 * reads.all_elements if quantized else 0,
        flops=2 * (_multiplied(reads, size, tile_tokens) - reads.head_elements) * tokens,
        attention_flops=2 * scored,
        score_bytes=heads * tokens * FLOAT32,
        cache_bytes=0,
        hidden_bytes=2 * architecture.hidden_size * size,
    )


def _multiplied(reads: WeightReads, tokens: int, tile_tokens: int) -> float:
    """Numbers that a token of a pass with ``tokens`` is multiplied with, and empty places with."""
    total = reads.elements
    for one in reads.experts:
        chosen = one.num_experts * one.share(tokens)
        each = tokens * one.num_experts_per_tok / chosen
        whole = each if tile_tokens == 1 else ceil(each / tile_tokens) * tile_tokens
        total += one.elements * one.share(1) * whole / each
    return total


def _mixers(architecture: Architecture) -> list[Mixer]:
    return [mixer for layer in architecture.layers for mixer in layer.mixers]


@remembered
def _expert_layers(architecture: Architecture) -> int:
    layers = range(len(architecture.layers))
    return sum(experts_of(architecture, layer) is not None for layer in layers)


def _window(
    mixer: Attention | LatentAttention, engine: Engine, architecture: Architecture
) -> int | None:
    """The tokens that a query looks back at, or ``None`` for all."""
    ignored = engine == "llama.cpp" and ignores_window(architecture)
    return window_of(mixer, ignored)


@remembered
def attention_elements(architecture: Architecture, engine: Engine, tokens: float) -> float:
    """Products of one query with ``tokens`` keys, and of their scores with the values."""
    total = 0.0
    for mixer in _mixers(architecture):
        if isinstance(mixer, Recurrent):
            continue
        seen = min(tokens, _window(mixer, engine, architecture) or tokens)
        total += mixer.num_attention_heads * (_key_dim(mixer) + mixer.v_head_dim) * seen
    return total


@remembered
def _scored_heads(architecture: Architecture, engine: Engine, tokens: float) -> float:
    """Scores of one query with ``tokens`` keys, of all heads."""
    return sum(
        mixer.num_attention_heads * min(tokens, _window(mixer, engine, architecture) or tokens)
        for mixer in _mixers(architecture)
        if not isinstance(mixer, Recurrent)
    )


def _key_dim(mixer: Attention | LatentAttention) -> int:
    if isinstance(mixer, LatentAttention):
        return mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    return mixer.head_dim


@remembered
def _cached_elements(architecture: Architecture, engine: Engine, tokens: float) -> float:
    return sum(_cached(mixer, engine, architecture, tokens) for mixer in _mixers(architecture))


def _cached(mixer: Mixer, engine: Engine, architecture: Architecture, tokens: float) -> float:
    """Numbers of the cache that one sequence reads in a layer: keys and values, or latents."""
    if isinstance(mixer, Recurrent):
        return 0
    seen = min(tokens, _window(mixer, engine, architecture) or tokens)
    if isinstance(mixer, LatentAttention):
        return (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * seen
    return mixer.num_key_value_heads * (mixer.head_dim + mixer.v_head_dim) * seen


@remembered
def _state_bytes(architecture: Architecture) -> int:
    """What the states of recurrent layers take in 32 bits."""
    return FLOAT32 * sum(
        prod(state.shape)
        for mixer in _mixers(architecture)
        if isinstance(mixer, Recurrent)
        for state in mixer.states
    )
