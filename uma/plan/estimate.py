"""One model on one machine under one engine: terms, verdict, and what it is asked to do.

``Asked`` is what every engine gives for that: ``uma.plan.mlx_case`` for MLX, whose plan is that of
``uma run``, and ``uma.plan.engine_case`` for llama.cpp, transformers and vLLM.
"""

from collections.abc import Sequence
from typing import Protocol

from uma.architecture.layers import Architecture
from uma.frozen import dataclass
from uma.ledger import Ledger, phase_totals
from uma.machine import Budget, Machine
from uma.memory.term import MemoryTerm, Phase
from uma.workload import Engine, Inference


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one model needs on one machine.

    ``format`` is that of the weights in the engine's words, ``stored`` what that means where the
    words leave it open, and ``bits_per_weight`` what they take for each parameter, scales included.
    ``cache_type`` is the number format of the KV cache, and ``settings`` are the engine's own
    options that the terms depend on, defaults included.
    """

    architecture: Architecture
    machine: Machine
    engine: Engine
    format: str
    workload: Inference
    budget: Budget
    ledger: Ledger
    bits_per_weight: float
    cache_type: str
    settings: tuple[str, ...] = ()
    stored: str = ""
    largest_buffer_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int:
        """What the budget leaves; below 0 where it is not enough."""
        return self.budget.budget_bytes - self.ledger.predicted_peak_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """What to ask differently; ``None`` and false leave a choice as it is.

    ``requantize`` asks for ``bits`` in every matrix, where a checkpoint stores some of them wider.
    """

    context_tokens: int | None = None
    batch_size: int | None = None
    bits: int | None = None
    eight_bit_cache: bool = False
    requantize: bool = False


class Asked(Protocol):
    """A model as it is asked for, in one format under one engine on one machine."""

    @property
    def model(self) -> str | None:
        """The model's name, where the catalog may know it."""
        ...

    @property
    def architecture(self) -> Architecture: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def workload(self) -> Inference: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def format(self) -> str:
        """The format of the weights in the engine's words."""
        ...

    @property
    def bits(self) -> int:
        """The usual width of that format."""
        ...

    @property
    def widths(self) -> Sequence[int]:
        """Widths that the engine has a usual format for, the widest first."""
        ...

    def estimate(self) -> Estimate:
        """What it needs, and whether that fits."""
        ...

    def excess_bytes(self, workload: Inference, limit_bytes: int) -> int:
        """What ``workload`` needs above ``limit_bytes``; at most 0 where it can be run."""
        ...

    def changed(self, change: Change) -> "Asked | None":
        """The same with ``change``; ``None`` where engine or model have no such thing."""
        ...

    def options(self, change: Change) -> tuple[str, ...]:
        """The options of ``uma estimate`` that ask for ``change``."""
        ...

    def of_model(self, name: str) -> "Asked | None":
        """Another model of the catalog instead; ``None`` where the engine cannot run it."""
        ...


def default_engine(machine: Machine) -> Engine:
    """MLX on Apple machines, llama.cpp elsewhere."""
    return "mlx" if machine.backend == "metal" else "llama.cpp"


def bits_per_weight(weights: MemoryTerm, architecture: Architecture) -> float:
    """Bits that the weights take for each parameter, scales included."""
    return 8 * weights.size_bytes / max(1, architecture.num_parameters)


def phases(terms: Sequence[MemoryTerm]) -> dict[Phase, int]:
    """Bytes held in each phase of an inference, loading first.

    Loading holds the weights, and what making them takes where that is a term; a term of phase
    ``always`` besides weights and states is allocated after it, except what engines that have no
    phases hold from the start.
    """
    totals = phase_totals(terms)
    held = totals.pop("always", None)
    if held is not None:  # all of it from the start to the end
        return {"load": held, "prefill": held, "decode": held}
    weights = sum(t.size_bytes for t in terms if t.name in ("weights", "draft_weights", "adapters"))
    load = totals.pop("load", weights)
    return {"load": load, **totals}
