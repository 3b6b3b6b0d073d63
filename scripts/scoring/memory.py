"""Memory of inference: rows to groups, each predicted by its engine."""

from collections.abc import Callable, Iterable

from uma.errors import UmaError

from . import cuda, llama_cpp, mlx
from .rows import (
    ENGINE,
    FORMAT,
    INCOMPLETE,
    METRIC,
    NOT_COMPARABLE,
    UNTRUSTWORTHY,
    Row,
    Skipped,
    Subject,
    engine_of,
    is_doubtful,
    is_mixed,
    measured_bytes,
    metric_of,
    outcome_of,
    rows_of_kind,
    subject_of,
)
from .summary import Group, source_of

Predict = Callable[[Row, Subject, str], int]

PREDICT: dict[str, Predict] = {
    "mlx": mlx.peak_bytes,
    "llama.cpp": llama_cpp.buffer_bytes,
    "transformers": cuda.allocated_bytes,
    "vllm": cuda.vllm_weights_of_card,
}


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """The groups of the rows that measured memory, by name."""
    groups: dict[str, Group] = {}
    for row in rows_of_kind(rows, "memory"):
        name, engine, kind = _group_of(row)
        group = groups.setdefault(name, Group("memory", engine, kind))
        try:
            group.errors[row["rec_id"]] = _error(row, engine, kind, name)
            group.sources[row["rec_id"]] = source_of(row["source"])
        except Skipped as skipped:
            group.skipped[row["rec_id"]] = str(skipped)
        if engine == "llama.cpp" and kind not in NOT_COMPARABLE:
            _score_parts(row, group)
    return groups


def _score_parts(row: Row, group: Group) -> None:
    """The terms that llama.cpp logs one by one; a row without them has no parts."""
    try:
        found = llama_cpp.parts(row, subject_of(row))
    except (Skipped, UmaError):
        return
    for name, (predicted, logged) in found.items():
        group.parts.setdefault(name, {})[row["rec_id"]] = predicted / logged - 1


def _group_of(row: Row) -> tuple[str, str, str]:
    """Name of the group, our engine or an empty name, and what was measured."""
    found = engine_of(row)
    if found is None:
        return "other engines", "", ""
    engine, program = found
    kind = metric_of(row, engine) or "other"
    if program == "mlx-swift":
        return f"mlx-swift {row['confidence'] or 'B'}", engine, kind
    if engine == "mlx":
        return program, engine, kind
    return f"{program}, {kind}", engine, kind


def _error(row: Row, engine: str, kind: str, group: str) -> float:
    """Predicted over measured memory, less one."""
    predict = PREDICT.get(engine)
    if predict is None:
        raise Skipped(ENGINE)
    if is_mixed(row):
        raise Skipped(FORMAT)
    if metric_of(row, engine) in NOT_COMPARABLE or outcome_of(row) == "exceeds":
        raise Skipped(METRIC)
    if is_doubtful(row):
        raise Skipped(UNTRUSTWORTHY)
    measured = measured_bytes(row)
    try:
        return predict(row, subject_of(row), group) / measured - 1
    except UmaError as error:
        raise Skipped(INCOMPLETE) from error
