"""Keys that a ``config.json`` may leave out: defaults of transformers' configuration classes."""

import csv
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "config_defaults.csv"


@cache
def _lines() -> dict[str, list[str]]:
    """The lines of the table by ``model_type``, not yet parsed."""
    lines = defaultdict(list)
    with FILE.open(encoding="utf-8") as file:
        next(file)
        next(file)
        for line in file:
            lines[line.partition(",")[0]].append(line)
    return dict(lines)


@cache
def class_defaults(model_type: str) -> tuple[dict[str, Any], str]:
    """Defaults of the class for ``model_type`` and their source; none if transformers has none.

    >>> class_defaults("minimax_m2")[0]["num_local_experts"]
    256
    """
    rows = list(csv.reader(_lines().get(model_type, ())))
    return {key: json.loads(value) for _, key, value, _ in rows}, rows[0][3] if rows else ""
