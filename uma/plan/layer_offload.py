"""llama.cpp's way to run what a card does not hold: some weights stay in the host's memory.

``-ngl N`` puts the head and the last ``N - 1`` layers on the card, each with its part of the
cache (llama.cpp b11434, ``src/llama-model.cpp``, ``load_tensors``: ``i_gpu_start``). ``-ncmoe N``
keeps the experts of the first ``N`` layers on the host and all else on the card
(``common/common.h``, ``LLM_FFN_EXPS_REGEX``): of a mixture each token reads few of them. For long
prompts one matrix of the host at a time is copied to the card
(``ggml/src/ggml-backend.cpp``, ``ggml_backend_sched_split_graph``; ``ggml-cuda.cu``,
``op_offload_min_batch_size``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture
from uma.architecture.remembered import remembered
from uma.engines.llama_cpp import LlamaCpp
from uma.engines.llama_cpp_cache import cells, kv_cache_bytes, state_bytes
from uma.engines.llama_cpp_weights import Tensor, tensor_bytes
from uma.plan.engine_case import EngineCase
from uma.workload import Inference

EXPERT_ROLES = frozenset({"ffn_up", "ffn_gate", "ffn_down"})


@dataclass(frozen=True, slots=True)
class LayerOffload:
    """What is on the card and what on the host with ``options`` of llama.cpp.

    On the host are ``layers`` layers, ``whole`` or their experts alone.
    """

    options: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    text: str
    layers: int = 0
    whole: bool = True


def best_offload(case: EngineCase) -> LayerOffload | None:
    """The most on the card that is within the budget and leaves no more than the host holds.

    ``None`` if there is nothing of the kind. Experts go to the host first: what they leave on the
    card is read for every token.
    """
    machine = case.machine
    host = machine.host_available_bytes or machine.host_memory_bytes
    for plan in offloads(case):
        if plan.device_bytes <= case.budget.budget_bytes:
            return plan if host is None or plan.host_bytes <= host else None
    return None


def offloads(case: EngineCase, whole_bytes: int | None = None) -> Iterator[LayerOffload]:
    """Every way to leave something on the host: experts first, from the least to the most.

    ``whole_bytes`` is what all of it needs on the card, where that is known already.
    """
    sizes = tensor_bytes(case.architecture, case.format)
    if whole_bytes is None:
        whole_bytes = sum(term.size_bytes for term in case.terms(case.workload))
    yield from _experts_on_host(case, sizes, whole_bytes)
    yield from _layers_on_card(case, sizes, whole_bytes)


def layer_bytes(case: EngineCase) -> list[int]:
    """Bytes of every layer's weights, cache and states."""
    found = list(_caches_by_layer(case.architecture, case.workload, case.settings))
    for tensor, size in tensor_bytes(case.architecture, case.format):
        if tensor.layer is not None:
            found[tensor.layer] += size
    return found


def _experts_on_host(
    case: EngineCase, sizes: list[tuple[Tensor, int]], whole: int
) -> Iterator[LayerOffload]:
    """Experts of one layer, of two, ... of all layers on the host."""
    by_layer: dict[int, int] = {}
    for tensor, size in sizes:
        if _is_expert(tensor) and tensor.layer is not None:
            by_layer[tensor.layer] = by_layer.get(tensor.layer, 0) + size
    if not by_layer:
        return
    copied = max(size for tensor, size in sizes if _is_expert(tensor))
    embeddings = _embedding_bytes(sizes)
    host = 0
    for layer in range(max(by_layer) + 1):
        host += by_layer.get(layer, 0)
        yield LayerOffload(
            options=("-ngl", "999", "-ncmoe", str(layer + 1)),
            device_bytes=whole - host + copied,
            host_bytes=host + embeddings,
            text=f"the experts of {layer + 1} of {len(case.architecture.layers)} layers",
            layers=layer + 1,
            whole=False,
        )


def _layers_on_card(
    case: EngineCase, sizes: list[tuple[Tensor, int]], whole: int
) -> Iterator[LayerOffload]:
    """All layers but one on the card, all but two, ... the head alone."""
    count = len(case.architecture.layers)
    weights, largest = [0] * count, [0] * count
    for tensor, size in sizes:
        if tensor.layer is not None:
            weights[tensor.layer] += size
            largest[tensor.layer] = max(largest[tensor.layer], size)
    embeddings = _embedding_bytes(sizes)
    caches = _caches_by_layer(case.architecture, case.workload, case.settings)
    host = copied = 0
    for layer in range(count):
        host += weights[layer] + caches[layer]
        copied = max(copied, largest[layer])
        yield LayerOffload(
            options=("-ngl", str(count - layer)),
            device_bytes=whole - host + copied,
            host_bytes=host + embeddings,
            text=f"{layer + 1} of {count} layers",
            layers=layer + 1,
        )


@remembered
def _caches_by_layer(
    architecture: Architecture, workload: Inference, settings: LlamaCpp
) -> list[int]:
    """Bytes of every layer's cache and states."""
    sequences = max(settings.n_parallel, workload.batch_size)
    held = cells(
        architecture,
        workload.context_tokens,
        sequences,
        min(settings.n_ubatch, settings.n_batch),
        unified=settings.kv_unified,
        swa_full=settings.swa_full,
    )
    alone = (replace(architecture, layers=(layer,)) for layer in architecture.layers)
    return [
        kv_cache_bytes(
            one,
            held,
            settings.cache_type_k,
            settings.cache_type_v,
            flash_attn=settings.flash_attn != "off",
        )
        + state_bytes(one, sequences)
        for one in alone
    ]


def _is_expert(tensor: Tensor) -> bool:
    return len(tensor.shape) == 3 and tensor.role in EXPERT_ROLES


def _embedding_bytes(sizes: list[tuple[Tensor, int]]) -> int:
    return sum(size for tensor, size in sizes if tensor.role == "token_embd")
