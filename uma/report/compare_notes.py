"""What is told below a comparison: how plans are run, what they give up, which figures lack."""

import re
from collections.abc import Iterator, Sequence

from uma.plan.compare import Comparison, Plan, Row
from uma.plan.compare.subject import Subject
from uma.speed.rate import Rate

MANY_ROWS = 40  # with more, notes do not tell how each of them is run


def notes_text(found: Comparison) -> Iterator[str]:
    """Each once; in a very long table what figures lack alone, and not how to run each plan."""
    seen: dict[str, dict[str, str]] = {}
    for row in found.rows:
        notes = notes_of(row, found)
        if len(found.rows) > MANY_ROWS:
            notes = [note for note in notes if note not in _how_to(row)]
        for note in notes:
            seen.setdefault(_of_it(note, row), {})[row.candidate.name] = note
    for note, of in seen.items():
        said = note if len(of) > 1 else next(iter(of.values()))
        yield f"note: {several_of(list(of))}: {said}"
    if len(found.rows) > MANY_ROWS:
        yield "note: how each is run: --machine NAME, or --json"


def _of_it(note: str, row: Row) -> str:
    """``note`` without the name of the machine that it is about, so that others may share it."""
    for name in {device.name for device in row.candidate.machine.devices}:
        if name in note:
            note = re.sub(rf"\bthe ([\w ]+) of {re.escape(name)}", r"its \1", note)
    return note


def _command(plan: Plan) -> list[str]:
    """What makes the engine run it so."""
    if not plan.options or plan.technique == "resident":
        return []
    command = plan.options[0].startswith("sudo")
    return [" ".join([*([] if command else [plan.engine]), *plan.options])]


def _how_to(row: Row) -> list[str]:
    return [] if row.plan is None else [*_command(row.plan), *row.plan.notes]


def notes_of(row: Row, found: Comparison) -> list[str]:
    """How to run a row's plan, what it gives up, and why a figure is missing; each once."""
    plan = row.plan
    if plan is None:
        return []
    notes = _how_to(row)
    rates = {"tokens/s": plan.decode}
    if plan.recipe is None:
        rates["prompt/s"] = plan.prompt
    for name, rate in rates.items():
        if isinstance(rate, Rate):
            notes += rate.notes
        elif row.runs:
            notes.append(f"{name}: {rate.reason}")
    return list(dict.fromkeys([*notes, *_too_long(row, found)]))


def _too_long(row: Row, found: Comparison) -> Iterator[str]:
    """Beyond what the model was made for: of MLX the plan itself says so."""
    subject, longest = found.subject, found.subject.architecture.max_position_embeddings
    mlx = row.plan is not None and row.plan.engine == "mlx" and row.candidate.number == 1
    asked = subject.workload.max_seq_length if not isinstance(subject, Subject) else 0
    if isinstance(subject, Subject):
        asked = 0 if mlx else subject.workload.context_tokens
    if row.runs and longest and asked > longest:
        yield f"the model was made for {longest:,} tokens of context"


def several_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
