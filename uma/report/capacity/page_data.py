"""What the page needs of the document, in little space: rows of numbers instead of objects."""

from collections.abc import Mapping
from typing import Any

Doc = Mapping[str, Any]
VERDICTS = ("fits", "tight", "exceeds", "unknown")


def page_data(found: Doc) -> dict[str, Any]:
    """Columns are named beside the rows; terms and formats are told once, by their number."""
    terms: dict[tuple[str, str, str], int] = {}
    return {
        "verdicts": list(VERDICTS),
        "models": [
            [m["name"], m["kind"], m["parameters"], m["context_tokens"], m["release_date"]]
            for m in found["models"]
        ],
        "contexts": found["settings"]["contexts"],
        "widths": found["settings"]["widths"],
        "machines": [_machine(machine, terms) for machine in found["machines"]],
        "plans": found["plans"],
        "terms": [list(term) for term in terms],
    }


def codes(verdicts: list[str]) -> str:
    """A digit for each verdict: its place in ``VERDICTS``."""
    return "".join(str(VERDICTS.index(one)) for one in verdicts)


def _machine(machine: Doc, terms: dict[tuple[str, str, str], int]) -> dict[str, Any]:
    return {
        "name": machine["name"],
        "title": machine["title"],
        "engine": machine["engine"],
        "limits": machine["budget"]["limits"],
        "rows": [
            [row["model"], [_cell(cell) for cell in row["cells"]], row["reason"]]
            for row in machine["rows"]
        ],
        "models": [_model(model, terms) for model in machine["models"]],
    }


def _cell(cell: Doc) -> list[Any]:
    """bits, format, weights, then for each context: tokens, codes, total, headroom, speed."""
    at = [
        [
            one["context_tokens"],
            codes(one["verdicts"]),
            one["total_bytes"],
            one["headroom_bytes"],
            *_rate(one, "decode"),
        ]
        for one in cell["at"]
    ]
    return [cell["bits"], cell["format"], cell["weights_bytes"], at]


def _model(model: Doc, terms: dict[tuple[str, str, str], int]) -> dict[str, Any]:
    return {
        "name": model["model"],
        "reason": model["reason"],
        "points": [_point(point, terms) for point in model["points"]],
        "longest": [list(one.values()) for one in model["longest"]],
    }


def _point(point: Doc, terms: dict[tuple[str, str, str], int]) -> list[Any]:
    """bits, cache, sequences, context, codes, total, headroom, phase, decode, prompt, terms."""
    held = []
    for term in point["terms"]:
        key = (term["name"], term["basis"], term["source"])
        held.append([terms.setdefault(key, len(terms)), term["size_bytes"]])
    return [
        point["bits"],
        point["kv_bits"],
        point["batch_size"],
        point["context_tokens"],
        codes(point["verdicts"]),
        point["total_bytes"],
        point["headroom_bytes"],
        point["phase"],
        _rate(point, "decode"),
        _rate(point, "prompt"),
        held,
    ]


def _rate(row: Doc, name: str) -> list[float | None]:
    return [row[f"{name}_tps{end}"] for end in ("", "_low", "_high")]
