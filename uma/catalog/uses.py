"""What models are made for, as far as their names or their makers' pages say.

Nothing here is a judgment of how well they do it: most models do more than they are named for.
"""

import csv
from functools import cache
from typing import NamedTuple

from uma.catalog import DATA, has_words
from uma.errors import UnknownName


class Use(NamedTuple):
    """One use of a model, and where that is said."""

    use: str
    source: str


class _Row(NamedTuple):
    match: str
    name: str
    use: str
    source: str


@cache
def _rows() -> tuple[_Row, ...]:
    """Rows of ``uses.csv``: of a ``word`` in models' names, or of one ``model``."""
    with open(DATA / "uses.csv", encoding="utf-8", newline="") as file:
        next(file)
        return tuple(_Row(**line) for line in csv.DictReader(file))


def known_uses() -> tuple[str, ...]:
    """Every use that some model is known to be made for."""
    return tuple(sorted({row.use for row in _rows()}))


def uses_of(hf_id: str) -> tuple[Use, ...]:
    """What the model is made for; empty where neither its name nor a page says it.

    >>> [one.use for one in uses_of("Qwen/Qwen2.5-Coder-7B-Instruct")]
    ['coding', 'chat']
    """
    name = hf_id.partition("/")[2]
    found: dict[str, Use] = {}
    for row in _rows():
        said = has_words(name, row.name) if row.match == "word" else row.name == hf_id
        if said:
            found.setdefault(row.use, Use(row.use, row.source))
    return tuple(found.values())


def require_use(use: str) -> None:
    """
    Raises:
        UnknownName: If no model is known to be made for ``use``.
    """
    if use not in known_uses():
        raise UnknownName(f"--use {use} is no use that is known; known: {', '.join(known_uses())}")
