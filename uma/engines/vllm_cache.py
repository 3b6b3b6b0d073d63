"""Blocks of vLLM's KV cache (vllm 0.33.0, ``v1/kv_cache_interface.py``, ``kv_cache_planning.py``).

A layer has a kind of cache: how many bytes a page (one block of one layer) has, and how many
blocks a sequence needs. Layers of several kinds are cut into groups of equally many, each with
a block table of its own; a block of the pool has room for the pages of one group.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Literal

from uma.architecture.layers import Architecture, Attention, LatentAttention, Recurrent

INDEX_BLOCK = 128  # models/deepseek_v2.py, Indexer: one float32 scale for so many bytes of key

Kind = Literal["full", "sliding", "chunked", "state"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Cache of one layer: bytes of a token, or of a whole state; its window or chunk."""

    kind: Kind
    size_bytes: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """Blocks of one sequence and their bytes; ``page_tokens`` are tokens of a page."""

    blocks: int
    block_bytes: int
    page_tokens: int

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.block_bytes


def layer_specs(architecture: Architecture, cache_bytes: int, dtype_bytes: int) -> list[LayerSpec]:
    """The caches of all layers; one that runs two mixers side by side has two."""
    return [
        spec
        for layer in architecture.layers
        for mixer in layer.mixers
        for spec in _mixer_specs(mixer, cache_bytes, dtype_bytes)
    ]


def _mixer_specs(
    mixer: Attention | LatentAttention | Recurrent, cache_bytes: int, dtype_bytes: int
) -> list[LayerSpec]:
    if isinstance(mixer, Recurrent):
        return [LayerSpec("state", _state_bytes(mixer, dtype_bytes))]
    if isinstance(mixer, LatentAttention):
        latent = (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * cache_bytes
        specs = [LayerSpec("full", latent)]
        if mixer.index_head_dim is not None:
            index = mixer.index_head_dim
            specs.append(LayerSpec("full", index + index // INDEX_BLOCK * 4))
        return specs
    if mixer.kv_source is not None:
        return []
    width = mixer.num_key_value_heads * (mixer.head_dim + mixer.v_head_dim)
    if mixer.sliding_window is not None:
        return [LayerSpec("sliding", width * cache_bytes, mixer.sliding_window)]
    if mixer.attention_chunk_size is not None:
        return [LayerSpec("chunked", width * cache_bytes, mixer.attention_chunk_size)]
    return [LayerSpec("full", width * cache_bytes)]


def _state_bytes(mixer: Recurrent, dtype_bytes: int) -> int:
    return sum(
        prod(state.shape) * (4 if state.dtype == "float32" else dtype_bytes)
        for state in mixer.states
    )


def blocks_of(spec: LayerSpec, tokens: int, page_tokens: int, in_flight: int) -> int:
    """Blocks of a sequence of ``tokens``.

    A window keeps its last ``window - 1`` tokens and those of the batches in flight, in one more
    block than they fill as it need not start with one; a chunk likewise, without that block
    (``max_admission_blocks_per_request``). A state takes one.
    """
    if spec.kind == "state":
        return 1
    if spec.kind == "sliding":
        return -(-min(spec.window - 1 + in_flight, tokens) // page_tokens) + 1
    if spec.kind == "chunked":
        tokens = min(spec.window + in_flight, tokens)
    return -(-tokens // page_tokens)


def cache_blocks(
    specs: list[LayerSpec], tokens: int, block_size: int, in_flight: int
) -> CacheBlocks:
    """Blocks of one sequence, over all groups.

    Groups have as many layers as the rarest kind, or as the most frequent one if that is less
    than half as many again; short groups are padded (``_get_kv_cache_groups_uniform_page_size``).
    """
    kinds = Counter(specs)
    if not kinds:
        return CacheBlocks(0, 0, block_size)
    if len({(spec.kind, spec.window) for spec in kinds}) == 1:
        spec = next(iter(kinds))
        page = 1 if spec.kind == "state" else block_size
        row = sum(count * spec.size_bytes for spec, count in kinds.items())
        return CacheBlocks(blocks_of(spec, tokens, block_size, in_flight), page * row, block_size)
    page_tokens = _page_tokens(kinds, block_size)
    pages = {spec: _page_bytes(spec, page_tokens) for spec in kinds}
    largest = max(pages.values())
    fewest, most = min(kinds.values()), max(kinds.values())
    group = most if most < 1.5 * fewest else fewest
    blocks = 0
    for spec, count in kinds.items():
        wider = largest // pages[spec] if largest % pages[spec] == 0 else 1
        needed = blocks_of(spec, tokens, page_tokens * wider, in_flight)
        blocks += -(-count // group) * needed
    return CacheBlocks(blocks, group * largest, page_tokens)


def _page_bytes(spec: LayerSpec, page_tokens: int) -> int:
    """Bytes of a page before it is made as large as the largest.

    Pages of attention then take more tokens where that comes out even, and are padded otherwise
    as those of states are (``unify_kv_cache_spec_page_size``).
    """
    return spec.size_bytes * (1 if spec.kind == "state" else page_tokens)


def _page_tokens(kinds: Counter[LayerSpec], block_size: int) -> int:
    """Tokens of a page: more than asked where a state must fit into one of attention.

    ``platforms/interface.py``, ``_align_hybrid_block_size``.
    """
    states = [spec.size_bytes for spec in kinds if spec.kind == "state"]
    tokens = [spec.size_bytes for spec in kinds if spec.kind != "state"]
    if not states or not tokens:
        return block_size
    return block_size * -(-max(states) // (block_size * min(tokens)))
