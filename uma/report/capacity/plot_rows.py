"""Rows of the plots of a report, from its document. GiB are for the axes; all else is as it is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from uma.report.capacity.summary import number
from uma.units import GIB, format_gib

Doc = Mapping[str, Any]
Row = dict[str, Any]

VERDICTS = ("fits", "tight", "exceeds", "unknown")
MOST_ROWS = 40


def budget_rows(found: Doc, parts: Sequence[str]) -> list[Row]:
    rows = []
    for machine in found["machines"]:
        facts = machine["budget"]
        sizes = (
            facts["budget_bytes"],
            facts["limit_bytes"] - facts["budget_bytes"],
            facts["memory_bytes"] - facts["limit_bytes"],
        )
        for order, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            if size > 0:
                row = {"machine": machine["name"], "part": part, "order": order}
                rows.append(row | {"GiB": size / GIB})
    return rows


def sizes_of(found: Doc) -> dict[str, float]:
    """Parameters of each model of the map, by which it is ordered: of the catalog, or its weights.

    0 where nothing is known of it.
    """
    sizes: dict[str, float] = {model["name"]: model["parameters"] or 0 for model in found["models"]}
    for machine in found["machines"]:
        for row in machine["rows"]:
            for cell in row["cells"][:1]:
                weights = 8 * cell["weights_bytes"] / cell["bits_per_weight"]
                sizes[row["model"]] = sizes[row["model"]] or weights
    return sizes


def map_rows(found: Doc, wanted: int) -> list[Row]:
    """The largest models of which some width runs, of each machine."""
    return [row for machine in found["machines"] for row in _map_rows(machine, found, wanted)]


def _map_rows(machine: Doc, found: Doc, wanted: int) -> Iterator[Row]:
    sizes, shown = sizes_of(found), 0
    for row in sorted(machine["rows"], key=lambda r: (-sizes[r["model"]], r["model"])):
        at = [(c, a) for c in row["cells"] for a in c["at"] if a["context_tokens"] == wanted]
        if shown == MOST_ROWS or not any(one["verdict"] in ("fits", "tight") for _, one in at):
            continue
        shown += 1
        for cell, one in at:
            yield {
                "machine": machine["name"],
                "model": row["model"],
                "bits": cell["bits"],
                "verdict": one["verdict"],
                "GiB": one["total_bytes"] / GIB,
            }


def arithmetic(terms: Sequence[Doc], total_bytes: int) -> str:
    """``weights 4.21 + kv_cache 1.00 = 5.21 GiB``."""
    parts = [f"{term['name']} {term['size_bytes'] / GIB:,.2f}" for term in terms]
    return f"{' + '.join(parts)} = {format_gib(total_bytes)}"


def context_rows(found: Doc) -> list[Row]:
    """Of the first machine, a 16-bit cache and one sequence."""
    machine = found["machines"][0]
    return [
        {
            "machine": machine["name"],
            "model": model["model"],
            "bits": f"{point['bits']} bits",
            "context": point["context_tokens"],
            "GiB": point["total_bytes"] / GIB,
            "verdict": point["verdict"],
            "arithmetic": arithmetic(point["terms"], point["total_bytes"]),
        }
        for model in machine["models"]
        for point in model["points"]
        if (point["kv_bits"], point["batch_size"]) == (16, 1)
    ]


def decode_rows(found: Doc) -> list[Row]:
    wanted = (16, 1, found["settings"]["contexts"][0])
    return [
        _speed_row(machine["name"], model["model"], point, point["verdict"])
        | {"bits": f"{point['bits']} bits"}
        for machine in found["machines"]
        for model in machine["models"]
        for point in model["points"]
        if (point["kv_bits"], point["batch_size"], point["context_tokens"]) == wanted
        and point["decode_tps"] is not None
        and point["verdict"] in ("fits", "tight")
    ]


def plan_rows(found: Doc) -> list[Row]:
    return [
        _speed_row(plan["machine"], plan["model"], plan, f"{plan['format']}, {plan['technique']}")
        | {"label": f"{number(plan['decode_tps'])}, {plan['format']}"}
        for plan in found["plans"]
        if plan["decode_tps"] is not None and plan["verdict"] in ("fits", "tight")
    ]


def _speed_row(machine: str, model: str, row: Doc, how: str) -> Row:
    low, high = row["decode_tps_low"], row["decode_tps_high"]
    rates = {"tps": row["decode_tps"], "low": low, "high": high}
    label = number(row["decode_tps"])
    return {"machine": machine, "model": model, "how": how, "label": label, **rates}


def sequence_rows(found: Doc) -> list[Row]:
    """Within the budget at the first context of the map."""
    wanted = found["settings"]["contexts"][0]
    return [
        {
            "machine": machine["name"],
            "model": model["model"],
            "bits": f"{one['bits']} bits",
            "cache": cache,
            "sequences": one[key] or 0,
        }
        for machine in found["machines"]
        for model in machine["models"]
        for one in model["sequences"]
        if one["context_tokens"] == wanted
        for cache, key in (("contiguous", "max_batch_size"), ("paged", "paged_sequences"))
    ]


def training_rows(found: Doc) -> list[Row]:
    return [
        {
            "machine": machine["name"],
            "model": row["model"],
            "method": row["method"],
            "verdict": row["verdict"],
            "label": _length(row),
            "arithmetic": row["reason"] or f"{format_gib(row['total_bytes'])} at 2,048 tokens",
        }
        for machine in found["machines"]
        for row in machine["training"]
    ]


def _length(row: Doc) -> str:
    length = row["largest_seq_length"]
    if length is not None:
        return f"{length:,}"
    return "no" if row["total_bytes"] is None else str(row["verdict"])
