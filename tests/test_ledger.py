import pytest

from uma.ledger import Ledger, peak, phase_totals
from uma.memory.term import MemoryTerm
from uma.report.ledger import ledger_text


def term(name: str, size: int, phase: str = "always", basis: str = "exact") -> MemoryTerm:
    return MemoryTerm(name, size, basis, "test", phase)  # type: ignore[arg-type]


TERMS = (
    term("weights", 1000),
    term("kv_cache", 10, "prefill"),
    term("activations", 200, "prefill", "bound"),
    term("kv_cache", 20, "decode"),
)


def test_a_phase_holds_its_own_terms_and_those_held_always() -> None:
    assert phase_totals(TERMS) == {"prefill": 1210, "decode": 1020}


def test_the_peak_is_the_phase_that_needs_most() -> None:
    assert peak(TERMS) == ("prefill", 1210)


def test_terms_held_always_are_a_peak_of_their_own_when_there_is_no_other_phase() -> None:
    assert peak([term("weights", 7)]) == ("always", 7)


def test_the_terms_of_the_json_sum_to_the_predicted_peak() -> None:
    ledger = Ledger(TERMS, 2000, 3000, "fits").to_json()
    rows = ledger["terms"]
    assert isinstance(rows, list)
    prefill = [r["predicted_bytes"] for r in rows if r["phase"] in ("prefill", "always")]
    assert sum(prefill) == ledger["predicted_peak_bytes"]


def test_what_was_not_measured_is_null_in_the_json() -> None:
    ledger = Ledger(TERMS, 2000, 3000, "fits", {("weights", "always"): 1000}, 1200)
    rows = ledger.to_json()["terms"]
    assert isinstance(rows, list)
    assert [r["measured_bytes"] for r in rows] == [1000, None, None, None]


@pytest.mark.parametrize(
    ("name", "basis", "measured", "shown"),
    [
        ("weights", "exact", 800, "+25.0 %"),
        ("activations", "bound", 150, "within"),
        ("activations", "bound", 320, "-10.0 % of peak"),
    ],
)
def test_an_exact_term_shows_its_error_and_a_bound_whether_it_held(
    name: str, basis: str, measured: int, shown: str
) -> None:
    terms = (term("weights", 1000), term("activations", 200, "prefill", "bound"))
    phase = "always" if name == "weights" else "prefill"
    text = ledger_text(Ledger(terms, 1, 1, "fits", {(name, phase): measured}))
    row = next(line for line in text.splitlines() if line.startswith(name))
    assert shown in row
