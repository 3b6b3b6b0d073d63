"""Losses on sets of examples, without and with an adapter, as text and JSON."""

import math
from collections.abc import Mapping
from typing import Any

from uma.dataset.score import Score
from uma.report import SCHEMA_VERSION
from uma.report.text import table

Scores = Mapping[str, Score]
"""By name of a set."""


def scores_text(base: Scores, adapted: Scores) -> str:
    """A row a set: loss and perplexity of the model, and of the adapter where there is one."""
    head = ["", "rows", "tokens", "loss", "perplexity"]
    more = ["with adapter", "perplexity", "change"] if adapted else []
    rows = [_row(name, score, adapted.get(name)) for name, score in base.items()]
    return table([head + more, *rows], "<" + ">" * (len(head + more) - 1))


def _row(name: str, base: Score, adapted: Score | None) -> list[str]:
    cells = [name, f"{base.rows:,}", f"{base.tokens:,}", *_numbers(base)]
    if adapted is not None:
        cells += [*_numbers(adapted), f"{adapted.loss - base.loss:+.4f}"]
    return cells


def _numbers(score: Score) -> list[str]:
    return [f"{score.loss:.4f}", f"{score.perplexity:,.3f}"]


def scores_json(base: Scores, adapted: Scores) -> dict[str, Any]:
    """The same as one document; ``change`` is the adapter's loss less the model's."""
    return {
        "schema_version": SCHEMA_VERSION,
        "splits": {name: _split(score, adapted.get(name)) for name, score in base.items()},
    }


def _split(base: Score, adapted: Score | None) -> dict[str, Any]:
    return {
        "rows": base.rows,
        "tokens": base.tokens,
        "base": _score(base),
        "adapter": None if adapted is None else _score(adapted),
        "loss_change": None if adapted is None else _finite(adapted.loss - base.loss),
    }


def _score(score: Score) -> dict[str, Any]:
    return {"loss": _finite(score.loss), "perplexity": _finite(score.perplexity)}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
