"""A checked data set as text and JSON."""

from typing import Any

from uma.dataset.check import Split, findings
from uma.dataset.rows import expected_schemas
from uma.report import SCHEMA_VERSION
from uma.report.text import table

SHOWN = 20  # problems of one file


def check_text(splits: dict[str, Split], batch_size: int) -> str:
    """A row a file, then every problem with its place, then what training would lose."""
    head = ["", "rows", "tokens", "longest", "to predict", "padding"]
    rows = [_row(split, batch_size) for split in splits.values()]
    parts = [table([head, *rows], "<>>>>>")]
    parts += [_roles(split) for split in splits.values() if split.roles]
    problems = [line for split in splits.values() for line in _problems(split)]
    if problems:
        parts.append("\n".join([*problems, "each line is one of:", expected_schemas()]))
    parts += [f"note: {line}" for line in findings(splits, batch_size)]
    return "\n".join(parts)


def _row(split: Split, batch_size: int) -> list[str]:
    lengths = [len(e.tokens) for e in split.examples]
    return [
        split.path.name,
        f"{len(split.examples):,}",
        f"{split.tokens:,}",
        f"{max(lengths, default=0):,}",
        f"{split.supervised_tokens:,}",
        f"{split.padding(batch_size):.1%}",
    ]


def _roles(split: Split) -> str:
    wanted = split.role_targets
    counts = ", ".join(
        f"{role} {count:,} ({wanted.get(role, 0):,} to predict)"
        for role, count in split.roles.items()
    )
    return f"{split.path.name}: tokens by role: {counts}"


def _problems(split: Split) -> list[str]:
    lines = [f"{split.path}:{p.line}:{p.column}: {p.text}" for p in split.problems[:SHOWN]]
    left = len(split.problems) - SHOWN
    more = f"{split.path}: {left:,} more lines cannot be used; --json lists all"
    return [*lines, more] if left > 0 else lines


def check_json(splits: dict[str, Split], batch_size: int) -> dict[str, Any]:
    """The same as one document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "splits": {name: _split_json(split, batch_size) for name, split in splits.items()},
        "notes": findings(splits, batch_size),
    }


def _split_json(split: Split, batch_size: int) -> dict[str, Any]:
    fitted = split.fitted
    return {
        "path": str(split.path),
        "formats": split.formats,
        "rows": len(split.examples),
        "tokens": split.tokens,
        "longest_tokens": max((len(e.tokens) for e in split.examples), default=0),
        "supervised_tokens": split.supervised_tokens,
        "tokens_by_role": split.roles,
        "supervised_tokens_by_role": split.role_targets,
        "padding_share": round(split.padding(batch_size), 4),
        "overlong_lines": list(fitted.overlong_lines),
        "lost_tokens": fitted.lost_tokens,
        "lost_ends": fitted.lost_ends,
        "unsupervised_lines": list(fitted.unsupervised_lines),
        "problems": [{"line": p.line, "column": p.column, "text": p.text} for p in split.problems],
    }
