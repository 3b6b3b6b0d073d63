"""An estimate with all that is told beside it: its inverses, advice, offload, and a trace."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.frozen import dataclass
from uma.plan.estimate import Asked, Estimate
from uma.plan.inverses import best_format, largest_batch, largest_context

if TYPE_CHECKING:
    from uma.memory.paging import Holding
    from uma.plan.advice import Advice
    from uma.plan.layer_offload import LayerOffload


@dataclass(frozen=True, slots=True)
class Paging:
    """What ``sequences`` running at once hold of a cache, in pages and contiguously."""

    holding: "Holding"
    slot_bytes: int
    sequences: int

    @property
    def paged_bytes(self) -> int:
        return self.holding.paged_bytes(self.slot_bytes, self.sequences)

    @property
    def contiguous_bytes(self) -> int:
        return self.holding.contiguous_bytes(self.slot_bytes, self.sequences)


@dataclass(frozen=True, slots=True)
class Findings:
    """``max_context_tokens`` is within the budget, ``tight_context_tokens`` within the limit.

    The second is told where the workload is tight. ``traced`` is ``uma.runtime.trace.Traced``,
    ``compare`` the command that weighs machines.
    """

    estimate: Estimate
    max_context_tokens: int | None
    max_batch_size: int | None
    best_format: str | None
    advice: "tuple[Advice, ...]" = ()
    offload: "LayerOffload | None" = None
    paging: Paging | None = None
    traced: Any = None
    compare: str | None = None
    tight_context_tokens: int | None = None


def _with_context_note(found: Estimate) -> Estimate:
    """MLX's plan says it itself."""
    longest = found.architecture.max_position_embeddings
    if found.engine == "mlx" or longest is None or found.workload.context_tokens <= longest:
        return found
    note = f"the model was made for {longest:,} tokens of context"
    if found.engine == "vllm":
        note += ": vLLM does not start with more (--max-model-len), but for"
        note += " VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    return replace(found, notes=(note, *found.notes))


def findings(
    asked: Asked, *, traced: Any = None, paging: Paging | None = None, compare: str | None = None
) -> Findings:
    """The estimate, and what would fit; advice and a command to compare where it does not."""
    found = _with_context_note(asked.estimate())
    advice: tuple[Advice, ...] = ()
    offload = None
    if found.ledger.verdict != "fits":
        from uma.plan.advice import remedies

        advice = tuple(remedies(asked))
    if found.ledger.verdict != "exceeds":
        compare = None
    elif found.machine.kind == "discrete":
        from uma.plan.engine_case import EngineCase
        from uma.plan.layer_offload import best_offload

        if isinstance(asked, EngineCase) and asked.engine == "llama.cpp":
            offload = best_offload(asked)
    tight = None
    if found.ledger.verdict == "tight":
        tight = largest_context(asked, asked.budget.ceiling_bytes)
    return Findings(
        estimate=found,
        max_context_tokens=largest_context(asked),
        max_batch_size=largest_batch(asked),
        best_format=best_format(asked),
        advice=advice,
        offload=offload,
        paging=paging,
        traced=traced,
        compare=compare,
        tight_context_tokens=tight,
    )
