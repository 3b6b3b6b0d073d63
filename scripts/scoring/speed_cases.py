"""Every row that measured a rate, as ``uma.speed`` needs it: what the fit is made of."""

from pathlib import Path

from .rows import Skipped, decimal, read_rows
from .speed import COLUMNS, Case, case_of, slow_prompts
from .speed_training import TrainingCase
from .speed_training import case_of as training_case_of

AnyCase = Case | TrainingCase


def all_cases(inference: Path, training: Path) -> list[AnyCase]:
    """Every row's case, of each quantity, that the scoring takes."""
    found: list[AnyCase] = []
    for row in read_rows(training):
        if row["tokens_per_s"]:
            try:
                found.append(training_case_of(row))
            except Skipped:
                continue
    rows = read_rows(inference)
    slow = slow_prompts(rows)
    for row in rows:
        for quantity in COLUMNS:
            if quantity == "prefill" and row["rec_id"] in slow:
                continue
            if row["kind"] != "fit" and decimal(row[COLUMNS[quantity]]):
                try:
                    found.append(case_of(row, quantity))
                except Skipped:
                    continue
    return found
