"""The ledger: memory terms by phase, predicted before and measured after."""

from collections.abc import Iterable
from dataclasses import field
from typing import Literal

from uma.frozen import dataclass
from uma.memory.term import MemoryTerm, Phase

Verdict = Literal["fits", "tight", "exceeds", "unknown"]


def phase_totals(terms: Iterable[MemoryTerm]) -> dict[Phase, int]:
    """Bytes held in each phase: the phase's own terms plus those of phase ``always``.

    >>> from uma.memory.term import MemoryTerm as T
    >>> phase_totals([T("weights", 10, "exact", ""), T("activations", 3, "bound", "", "prefill")])
    {'prefill': 13}
    """
    rows = list(terms)
    held = sum(t.size_bytes for t in rows if t.phase == "always")
    totals: dict[Phase, int] = {}
    for term in rows:
        if term.phase != "always":
            totals[term.phase] = totals.get(term.phase, held) + term.size_bytes
    return totals or {"always": held}


def peak(terms: Iterable[MemoryTerm]) -> tuple[Phase, int]:
    """The phase that needs most memory, and its bytes."""
    totals = phase_totals(terms)
    phase = max(totals, key=totals.__getitem__)
    return phase, totals[phase]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Predicted terms, what was measured of them, and the lines they are held against.

    ``measured`` maps (name, phase) of a predicted term to its measured bytes; a term that cannot
    be measured on its own is absent.
    """

    terms: tuple[MemoryTerm, ...]
    budget_bytes: int | None
    limit_bytes: int | None
    verdict: Verdict
    measured: dict[tuple[str, str], int] = field(default_factory=dict)
    measured_peak_bytes: int | None = None

    @property
    def predicted_peak_bytes(self) -> int:
        return peak(self.terms)[1]

    def to_json(self) -> dict[str, object]:
        """The ``LEDGER`` object of the JSON contract; unknown values are ``None``."""
        return {
            "terms": [
                {
                    "name": t.name,
                    "predicted_bytes": t.size_bytes,
                    "measured_bytes": self.measured.get((t.name, t.phase)),
                    "basis": t.basis,
                    "source": t.source,
                    "phase": t.phase,
                }
                for t in self.terms
            ],
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "limit_bytes": self.limit_bytes,
            "verdict": self.verdict,
        }
