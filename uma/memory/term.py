"""A named amount of memory: one row of the ledger."""

from typing import Literal

from uma.frozen import dataclass

TermName = Literal[
    "weights",
    "kv_cache",
    "recurrent_state",
    "activations",
    "logits",
    "attention",
    "gradients",
    "optimizer_states",
    "adapters",
    "master_weights",
    "runtime_context",
    "buffer_pool",
    "draft_weights",
    "draft_kv_cache",
    "saved_prompts",
    "other",
]

Phase = Literal[
    "load", "prefill", "decode", "forward", "backward", "optimizer", "validation", "save", "always"
]

Basis = Literal["exact", "bound", "fitted"]
"""How sure a size is: follows from shapes, an upper bound, or fitted to measurements."""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Memory that one purpose takes in one phase.

    A term of phase ``always`` is held in every phase. ``source`` names the formula or the file
    that the size comes from.
    """

    name: TermName
    size_bytes: int
    basis: Basis
    source: str
    phase: Phase = "always"
