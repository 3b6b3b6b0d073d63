"""A model that ran: each term of its ledger predicted and measured, and whether it held."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from uma.ledger import Ledger
from uma.memory.term import Basis
from uma.units import KIB

PROMPT_TOKENS = 400  # beyond one step of the caches, and beyond the windows of the tiny models
GENERATION_TOKENS = 32

TRANSIENT = ("activations", "attention", "logits")
NOT_AT_ONCE = ("buffer_pool", "other", "runtime_context")  # no part of a phase's active memory

# MLX does not count the task that allocates when it holds back others: small arrays pass a bound.
UNCOUNTED_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer. ``peaks`` are MLX's active memory by phase, ``active_peak_bytes`` its prediction.

    ``overhead_bytes`` is what the process held beside what MLX counts. ``read_bytes`` are the
    weights and caches that each token of decode read.
    """

    model: str
    form: str
    ledger: Ledger
    active_peak_bytes: int
    peaks: Mapping[str, int]
    generation_tps: float | None
    overhead_bytes: int
    read_bytes: int

    @property
    def decode_bytes_per_s(self) -> int | None:
        return None if self.generation_tps is None else round(self.read_bytes * self.generation_tps)


@dataclass(frozen=True, slots=True)
class TermRow:
    """``holds`` is ``None`` where nothing was measured; the temporaries of a phase are one row."""

    model: str
    name: str
    phase: str
    predicted_bytes: int
    measured_bytes: int | None
    basis: Basis

    @property
    def holds(self) -> bool | None:
        """Equal, where the term is exact; else not above it."""
        if self.measured_bytes is None:
            return None
        if self.basis == "exact":
            return self.measured_bytes == self.predicted_bytes
        return self.measured_bytes <= self.predicted_bytes + UNCOUNTED_BYTES


def rows_of(trial: Trial) -> Iterator[TermRow]:
    """Every term of a trial, the temporaries of a phase together, and the peak."""
    measured = trial.ledger.measured
    for term in trial.ledger.terms:
        if term.name not in (*TRANSIENT, *NOT_AT_ONCE):
            got = measured.get((term.name, term.phase))
            yield TermRow(trial.model, term.name, term.phase, term.size_bytes, got, term.basis)
    for phase in ("prefill", "decode"):
        yield from _transient(trial, phase)
    yield TermRow(
        trial.model,
        "peak",
        "all",
        trial.active_peak_bytes,
        max(trial.peaks.values(), default=None),
        "bound",
    )


def _transient(trial: Trial, phase: str) -> Iterator[TermRow]:
    """What a phase's peak held beside its measured terms, against its temporaries in all."""
    terms = [t for t in trial.ledger.terms if t.phase in (phase, "always")]
    transient = [t for t in terms if t.name in TRANSIENT]
    if not transient:
        return
    rest = [t for t in terms if t.name not in (*TRANSIENT, *NOT_AT_ONCE)]
    held = [trial.ledger.measured.get((t.name, t.phase)) for t in rest]
    peak, got = trial.peaks.get(phase), None
    if peak is not None and None not in held:
        got = max(0, peak - sum(size or 0 for size in held))
    name = " + ".join(t.name for t in transient)
    predicted = sum(t.size_bytes for t in transient)
    yield TermRow(trial.model, name, phase, predicted, got, "bound")
