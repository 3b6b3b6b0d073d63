"""The ledger as text: each term predicted, and measured where it was."""

from uma.ledger import Ledger, peak
from uma.memory.term import MemoryTerm
from uma.report.text import percent, table
from uma.units import format_gib


def ledger_text(ledger: Ledger, budget_winner: str = "") -> str:
    """The whole ledger: a row for each term, the peak, and the lines it is held against."""
    measured = bool(ledger.measured) or ledger.measured_peak_bytes is not None
    header = ["term", "phase", "predicted", *(["measured", "error"] if measured else []), "basis"]
    rows = [header, *(_row(ledger, term, measured) for term in ledger.terms)]
    rows.append(_peak_row(ledger, measured))
    align = "<<>" + (">>" if measured else "") + "<"
    return table(rows, align) + "\n" + lines_text(ledger, budget_winner)


def lines_text(ledger: Ledger, budget_winner: str = "") -> str:
    """Budget, limit and verdict on one line."""
    parts = []
    if ledger.budget_bytes is not None:
        why = f" ({budget_winner})" if budget_winner else ""
        parts.append(f"budget {format_gib(ledger.budget_bytes)}{why}")
    if ledger.limit_bytes is not None:
        parts.append(f"limit {format_gib(ledger.limit_bytes)}")
    parts.append(f"verdict: {ledger.verdict}")
    return ", ".join(parts)


def turn_text(ledger: Ledger) -> str:
    """One line for a chat turn: the peak against its prediction and the budget."""
    text = f"peak {format_gib(ledger.predicted_peak_bytes)} predicted"
    if ledger.measured_peak_bytes is not None:
        text += f", {format_gib(ledger.measured_peak_bytes)} measured"
    return text


def _row(ledger: Ledger, term: MemoryTerm, measured: bool) -> list[str]:
    got = ledger.measured.get((term.name, term.phase))
    cells = [term.name, term.phase, format_gib(term.size_bytes)]
    if measured:
        cells += ["" if got is None else format_gib(got), _error(ledger, term, got)]
    return [*cells, f"{term.basis}: {term.source}"]


def _peak_row(ledger: Ledger, measured: bool) -> list[str]:
    phase, size_bytes = peak(ledger.terms)
    cells = ["peak", phase, format_gib(size_bytes)]
    if measured:
        got = ledger.measured_peak_bytes
        cells += [
            "" if got is None else format_gib(got),
            "" if got is None or ledger.verdict == "unknown" else _off(size_bytes, got),
        ]
    known = "what is known" if ledger.verdict == "unknown" else "the phase that needs most"
    return [*cells, f"sum of {known}"]


def _error(ledger: Ledger, term: MemoryTerm, got: int | None) -> str:
    """How far an exact term is off; of a bound, by how much of the peak it was passed."""
    if got is None:
        return ""
    if term.basis == "exact":
        return _off(term.size_bytes, got)
    if got <= term.size_bytes:
        return "within"
    return f"{percent((term.size_bytes - got) / ledger.predicted_peak_bytes)} of peak"


def _off(predicted: int, got: int) -> str:
    return percent((predicted - got) / got) if got else percent(float(predicted > 0))
