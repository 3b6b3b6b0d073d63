"""What the page needs of the document, in little space: rows of numbers instead of objects."""

from collections.abc import Mapping
from typing import Any

from uma.report.capacity.plot_rows import VERDICTS, sizes_of

Doc = Mapping[str, Any]
Terms = dict[tuple[str, str, str], int]


def page_data(found: Doc) -> dict[str, Any]:
    """Terms are told once, by their number; models stand in the order of the map."""
    terms: Terms = {}
    settings, sizes = found["settings"], sizes_of(found)
    machines = [_machine(machine, settings, sizes, terms) for machine in found["machines"]]
    return {
        "verdicts": list(VERDICTS),
        "models": {one["name"]: [one["kind"], *one["uses"]] for one in found["models"]},
        "contexts": settings["contexts"],
        "widths": settings["widths"],
        "machines": machines,
        "terms": [list(term) for term in terms],
    }


def _machine(machine: Doc, settings: Doc, sizes: Doc, terms: Terms) -> dict[str, Any]:
    rows = sorted(machine["rows"], key=lambda row: (-sizes[row["model"]], row["model"]))
    return {
        "name": machine["name"],
        "limits": machine["budget"]["limits"],
        "rows": [[row["model"], sizes[row["model"]], _cells(row, settings)] for row in rows],
        "models": [_model(model, terms) for model in machine["models"]],
    }


def _cells(row: Doc, settings: Doc) -> list[Any]:
    """A cell for each width, null where there is none."""
    found = {cell["bits"]: cell for cell in row["cells"]}
    return [_cell(found.get(bits), settings) for bits in settings["widths"]]


def _cell(cell: Doc | None, settings: Doc) -> list[Any] | None:
    """format, weights, then for each context: codes, total, headroom, speed."""
    if cell is None:
        return None
    at = {one["context_tokens"]: one for one in cell["at"]}
    found: list[Any] = [cell["format"], cell["weights_bytes"]]
    for context in settings["contexts"]:
        one = at.get(context)
        found.append(
            one
            and [
                codes(one["verdicts"]),
                one["total_bytes"],
                one["headroom_bytes"],
                _rate(one, "decode"),
            ]
        )
    return found


def codes(verdicts: list[str]) -> str:
    """A digit for each verdict: its place in ``VERDICTS``."""
    return "".join(str(VERDICTS.index(one)) for one in verdicts)


def _model(model: Doc, terms: Terms) -> dict[str, Any]:
    return {
        "name": model["model"],
        "reason": model["reason"],
        "points": [_point(point, terms) for point in model["points"]],
        "longest": [list(one.values()) for one in model["longest"]],
        "sequences": [
            [
                *(one["bits"], one["context_tokens"], one["max_batch_size"]),
                *(one["paged_sequences"], one["cache_bytes"], _rate(one, "decode")),
            ]
            for one in model["sequences"]
        ],
    }


def _point(point: Doc, terms: Terms) -> list[Any]:
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


def _rate(row: Doc, name: str) -> list[float] | None:
    if row[f"{name}_tps"] is None:
        return None
    return [row[f"{name}_tps{end}"] for end in ("", "_low", "_high")]
