"""What one step reads of the weights: of embeddings a row, of experts those that are chosen."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from uma.architecture.layers import Architecture, Experts, Parameter, parameters


class Stored(NamedTuple):
    """A parameter as it is kept: its layer (``None`` outside the layers), shape and bytes."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    size_bytes: float


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """Routed experts of one or several layers: their bytes and elements, all experts together."""

    size_bytes: float
    elements: float
    num_experts: int
    num_experts_per_tok: int

    def share(self, tokens: int) -> float:
        """The part of them that a step with so many tokens reads, 0 to 1."""
        return expected_experts(self.num_experts, self.num_experts_per_tok, tokens) / (
            self.num_experts
        )


@dataclass(frozen=True, slots=True)
class WeightReads:
    """What a step reads: ``dense_bytes`` always, of ``experts`` those that some token chose.

    ``elements`` are the numbers that each token is multiplied with, experts apart;
    ``head_elements``, which are part of them, only those tokens that are followed by a new one.
    """

    dense_bytes: float
    elements: float
    experts: tuple[ExpertReads, ...] = ()
    head_elements: float = 0

    def size_bytes(self, tokens: int = 1) -> float:
        """Bytes that a step with so many tokens, of one or several sequences, reads."""
        return self.dense_bytes + self.expert_bytes(tokens)

    def expert_bytes(self, tokens: int = 1) -> float:
        return sum(one.size_bytes * one.share(tokens) for one in self.experts)

    @property
    def active_elements(self) -> float:
        """Numbers that one token is multiplied with, its experts included."""
        return self.elements + sum(one.elements * one.share(1) for one in self.experts)

    @property
    def all_elements(self) -> float:
        """The same with every expert: what a long prompt reads."""
        return self.elements + sum(one.elements for one in self.experts)


def expected_experts(num_experts: int, num_experts_per_tok: int, tokens: int) -> float:
    """Distinct experts that ``tokens`` tokens choose, each its own, none preferred.

    Real routers prefer some, so that it is an upper estimate for several tokens.

    >>> expected_experts(128, 8, 1), round(expected_experts(128, 8, 32), 1)
    (8.0, 111.8)
    """
    return num_experts * (1 - (1 - num_experts_per_tok / num_experts) ** tokens)


def weight_reads(architecture: Architecture, stored: Iterable[Stored]) -> WeightReads:
    """What a step reads of these parameters: all of a model's, or those of one device."""
    looked_up = {p.name for p in parameters(architecture) if _is_looked_up(p, architecture)}
    head = (architecture.vocab_size, architecture.hidden_size)
    dense_bytes = elements = head_elements = 0.0
    experts: dict[tuple[int, int], list[float]] = {}
    for one in stored:
        if one.name in looked_up:
            continue
        size = _size(one.shape)
        routed = None if one.layer is None else experts_of(architecture, one.layer)
        if routed is None or not _is_stacked(one.shape, routed):
            dense_bytes += one.size_bytes
            elements += size
            if one.layer is None and one.shape == head:
                head_elements += size
            continue
        sums = experts.setdefault((routed.num_experts, routed.num_experts_per_tok), [0.0, 0.0])
        sums[0] += one.size_bytes
        sums[1] += size
    return WeightReads(
        dense_bytes,
        elements,
        tuple(ExpertReads(sums[0], sums[1], *counts) for counts, sums in experts.items()),
        head_elements,
    )


def evenly_stored(architecture: Architecture, weights_bytes: float) -> Iterator[Stored]:
    """Every parameter, as if all were kept in the same bits.

    Off where some are kept in more: by a few percent, and by more for models whose experts alone
    are quantized.
    """
    each = weights_bytes / architecture.num_parameters
    for parameter in architecture.parameters:
        yield Stored(parameter.name, None, parameter.shape, parameter.size * each)
    for index, layer in enumerate(architecture.layers):
        for parameter in layer.parameters:
            yield Stored(parameter.name, index, parameter.shape, parameter.size * each)


def read_share(architecture: Architecture, tokens: int = 1) -> float:
    """The part of all parameters that a step with so many tokens reads, 0 to 1.

    Of an embedding that is not the head as well it reads one row, of the experts those that its
    router chooses. Counted by elements: where a part is kept in more bits, it is off by as much.
    """
    total = architecture.num_parameters
    return weight_reads(architecture, evenly_stored(architecture, total)).size_bytes(tokens) / total


def experts_of(architecture: Architecture, layer: int) -> Experts | None:
    """The routed experts of a layer, if it has some."""
    parts = architecture.layers[layer].feed_forward
    return next((part for part in parts if isinstance(part, Experts)), None)


def _is_looked_up(parameter: Parameter, architecture: Architecture) -> bool:
    head = (architecture.vocab_size, architecture.hidden_size)
    is_head = architecture.tie_word_embeddings and parameter.shape == head
    return parameter.kind == "embedding" and not is_head


def _is_stacked(shape: tuple[int, ...], experts: Experts) -> bool:
    """Whether it is a matrix of every expert, stacked along the first of three axes."""
    return len(shape) == 3 and shape[0] == experts.num_experts


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
