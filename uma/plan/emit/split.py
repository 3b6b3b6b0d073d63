"""What llama.cpp puts on each of several cards with ``-sm layer``: weights, cache, computation."""

from collections.abc import Sequence
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.engines.llama_cpp import LlamaCpp, device_compute, device_terms
from uma.engines.llama_cpp_weights import device_weight_bytes, tensor_bytes
from uma.frozen import dataclass
from uma.workload import Inference


@dataclass(frozen=True, slots=True)
class OnCard:
    """One card's layers and its buffers, as ``llama-fit-params -fitp on`` prints them."""

    layers: int
    model_bytes: int
    context_bytes: int
    compute_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.model_bytes + self.context_bytes + self.compute_bytes


def layer_counts(layers: int, memory: Sequence[int]) -> list[int]:
    """How many layers each card gets by its memory; the head, on the last, counts as one more.

    llama.cpp b11434, ``src/llama-model.cpp``, ``load_tensors``: a layer goes to the first card
    whose cumulated part of the free memory is above the layer's place among them and the head.
    """
    ends = [sum(memory[: card + 1]) / sum(memory) for card in range(len(memory))]
    counts = [0] * len(memory)
    for place in range(layers):
        counts[next(card for card, end in enumerate(ends) if place / (layers + 1) < end)] += 1
    return counts


def split_by_layers(
    architecture: Architecture,
    quant: str,
    workload: Inference,
    settings: LlamaCpp,
    memory: Sequence[int],
) -> tuple[OnCard, ...]:
    """The buffers of each card, where all layers are on cards of so much free memory."""
    counts = layer_counts(len(architecture.layers), memory)
    weights = [0] * len(architecture.layers)
    for tensor, size in tensor_bytes(architecture, quant):
        if tensor.layer is not None:
            weights[tensor.layer] += size
    head = device_weight_bytes(architecture, quant) - sum(weights)
    caches = [
        _context_bytes(architecture, layer, workload, settings) for layer in range(len(weights))
    ]
    chosen = replace(settings, num_devices=len(memory))
    computed = device_compute(architecture, workload, chosen)
    found, start = [], 0
    for card, count in enumerate(counts):
        own = slice(start, start + count)
        last = card == len(counts) - 1
        model = sum(weights[own]) + (head if last else 0)
        found.append(OnCard(count, model, sum(caches[own]), computed[card]))
        start += count
    return tuple(found)


def _context_bytes(
    architecture: Architecture, layer: int, workload: Inference, settings: LlamaCpp
) -> int:
    alone = replace(architecture, layers=(architecture.layers[layer],))
    terms = device_terms(alone, "F16", workload, settings, 0)
    return sum(t.size_bytes for t in terms if t.name in ("kv_cache", "recurrent_state"))
