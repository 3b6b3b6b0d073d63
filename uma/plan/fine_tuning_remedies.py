"""What would make a fine-tuning run fit that does not: the cheapest change of each kind."""

from collections.abc import Iterator
from dataclasses import replace

from uma.ledger import peak
from uma.plan.fine_tuning import (
    Cut,
    FineTuning,
    FineTuningPlan,
    Row,
    Rows,
    plan_fine_tuning,
    rows_text,
)
from uma.units import format_gib

FEWEST_LAYERS, SHORTEST_ROW = 4, 64  # of what is proposed

Change = tuple[str, FineTuning, Cut]
"""Options in words, what they make of a run, and how its batches are cut then."""


def remedies(plan: FineTuningPlan) -> list[str]:
    """What would fit, the cheapest change first; each is tried."""
    case = plan.case
    if plan.ledger.terms == (case.form.weights,) or _is_too_large(case):
        return [_smaller_base(case)]
    found = []
    smaller = plan_fine_tuning(case, plan.cut, smaller=True)
    if smaller.ledger.verdict in ("fits", "tight"):
        at_once = rows_text(smaller.micro_batch)
        found.append(f"{_budget(case)}: {at_once} at once, the same updates")
    for changes in (_shorter_rows, _fewer_layers, _lower_ranks):
        found += _first_that_fits(changes(case, smaller.cut))
    several = "a smaller --num-layers, --rank and --max-seq-length together"
    return found or [f"no one change that was tried fits; {several} may, or a smaller base"]


def _first_that_fits(changes: Iterator[Change]) -> list[str]:
    for words, case, cut in changes:
        if peak(case.terms(cut)[1])[1] <= case.budget.budget_bytes:
            return [words]
    return []


def _shorter_rows(case: FineTuning, cut: Cut) -> Iterator[Change]:
    most = max(inputs for inputs, _ in case.rows.train)
    for length in (most // 2, most // 4, most // 8):
        if length >= SHORTEST_ROW:
            words = f"--max-seq-length {length + 1} --overlong split {_budget(case)}"
            shorter = replace(case, rows=_shortened(case.rows, length))
            yield words, shorter, replace(cut, row_tokens=None)


def _fewer_layers(case: FineTuning, cut: Cut) -> Iterator[Change]:
    if (case.workload.num_layers or len(case.architecture.layers)) > FEWEST_LAYERS:
        fewer = replace(case, workload=replace(case.workload, num_layers=FEWEST_LAYERS))
        yield f"--num-layers {FEWEST_LAYERS} {_budget(case)}: adapts less", fewer, cut


def _lower_ranks(case: FineTuning, cut: Cut) -> Iterator[Change]:
    for rank in (64, 8, 1):
        if case.workload.method != "full" and rank < case.workload.rank:
            lower = replace(case, workload=replace(case.workload, rank=rank))
            yield f"--rank {rank} {_budget(case)}: adapts less", lower, cut


def _budget(case: FineTuning) -> str:
    """What lets the batches be cut: the user's own budget, where there is one."""
    return "--budget auto" if case.budget.user_bytes is None else "with your --budget"


def _is_too_large(case: FineTuning) -> bool:
    return case.form.weights.size_bytes > case.budget.budget_bytes


def _smaller_base(case: FineTuning) -> str:
    size = format_gib(case.form.weights.size_bytes)
    base = "a smaller base" if case.form.quantization else "a smaller or a quantized base"
    return f"the weights alone take {size}: only {base} would fit"


def _shortened(rows: Rows, length: int) -> Rows:
    train, validation = (
        tuple(part for row in split for part in _parts(row, length))
        for split in (rows.train, rows.validation)
    )
    return Rows(train, validation, rows.batch_size)


def _parts(row: Row, most: int) -> list[Row]:
    inputs, targets = row
    whole, rest = divmod(inputs, most)
    return [(n, min(n, targets)) for n in [most] * whole + ([rest] if rest else [])]
