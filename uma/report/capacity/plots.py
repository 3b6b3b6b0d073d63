"""The plots of a report, from its document, as Vega-Lite made by Altair."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from uma.errors import RuntimeUnavailable
from uma.units import GIB

Doc = Mapping[str, Any]

VERDICT_COLORS = {"fits": "#2a7f62", "tight": "#c98a00", "exceeds": "#b3403a", "unknown": "#777777"}
MOST_ROWS = 40
PICTURE_WIDTH = 520


def altair() -> Any:
    """Altair.

    Raises:
        RuntimeUnavailable: If it is not installed.
    """
    return _installed("altair")


def vl_convert() -> Any:
    """vl-convert, which has Vega's runtime and makes pictures without a browser.

    Raises:
        RuntimeUnavailable: If it is not installed.
    """
    return _installed("vl_convert")


def _installed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise RuntimeUnavailable(
            "plots need Altair and vl-convert-python: pip install 'uma-toolkit[report]'; --format "
            "md and json do without"
        ) from None


def charts(found: Doc) -> dict[str, Any]:
    """Each plot under its name; those without data are left out."""
    made = {
        "budget": budget(found),
        "map": capacity_map(found),
        "context": context(found),
        "decode": decode(found),
        "plans": plans(found),
        "training": training(found),
    }
    return {name: chart for name, chart in made.items() if chart is not None}


def budget(found: Doc) -> Any:
    alt = altair()
    rows = []
    for machine in found["machines"]:
        facts = machine["budget"]
        parts = (
            ("1 models fit", facts["budget_bytes"]),
            ("2 tight: the limit allows it", facts["limit_bytes"] - facts["budget_bytes"]),
            ("3 the system's", facts["memory_bytes"] - facts["limit_bytes"]),
        )
        for part, size in parts:
            rows.append(
                {
                    "machine": machine["name"],
                    "part": part[2:],
                    "order": part,
                    "GiB": max(0, size) / GIB,
                }
            )
    return (
        alt.Chart(alt.Data(values=rows), title="Memory of each machine")
        .mark_bar()
        .encode(
            y=alt.Y("machine:N", title=None, sort=None),
            x=alt.X("GiB:Q", title="GiB", stack="zero"),
            color=alt.Color("part:N", title=None, sort=[r["part"] for r in rows[:3]]),
            order=alt.Order("order:N"),
            tooltip=["machine:N", "part:N", alt.Tooltip("GiB:Q", format=",.2f")],
        )
        .properties(width="container", height=alt.Step(34))
    )


def capacity_map(found: Doc) -> Any:
    """The largest models that fit in some width, on the first machine."""
    alt = altair()
    machine, wanted = found["machines"][0], found["settings"]["contexts"][0]
    rows = list(_map_rows(machine, found, wanted))
    if not rows:
        return None
    names = list(dict.fromkeys(row["model"] for row in rows))
    base = alt.Chart(
        alt.Data(values=rows), title=f"{machine['name']} at {wanted:,} tokens of context"
    ).encode(
        x=alt.X("bits:O", title="bits of a weight", sort=found["settings"]["widths"]),
        y=alt.Y("model:N", title=None, sort=names),
    )
    color = alt.Color(
        "verdict:N",
        title=None,
        scale=alt.Scale(domain=list(VERDICT_COLORS), range=list(VERDICT_COLORS.values())),
    )
    tooltip = [
        "model:N",
        "format:N",
        "verdict:N",
        alt.Tooltip("GiB:Q", format=",.2f"),
        alt.Tooltip("headroom:Q", title="headroom GiB", format=",.2f"),
        alt.Tooltip("tps:Q", title="tokens/s", format=",.1f"),
    ]
    cells = base.mark_rect(stroke="white").encode(color=color, tooltip=tooltip)
    words = base.mark_text(color="white", fontSize=10).encode(text=alt.Text("GiB:Q", format=",.0f"))
    return (cells + words).properties(width="container", height=alt.Step(17))


def _map_rows(machine: Doc, found: Doc, wanted: int) -> Iterator[dict[str, Any]]:
    sizes = {model["name"]: model["parameters"] or 0 for model in found["models"]}
    shown = 0
    for row in sorted(machine["rows"], key=lambda r: (-sizes[r["model"]], r["model"])):
        at = [
            (cell, one)
            for cell in row["cells"]
            for one in cell["at"]
            if one["context_tokens"] == wanted
        ]
        if shown == MOST_ROWS or all(one["verdict"] == "exceeds" for _, one in at):
            continue
        shown += 1
        for cell, one in at:
            yield {
                "model": row["model"],
                "bits": cell["bits"],
                "format": cell["format"],
                "verdict": one["verdict"],
                "GiB": one["total_bytes"] / GIB,
                "headroom": one["headroom_bytes"] / GIB,
                "tps": one["decode_tps"],
            }


def context(found: Doc) -> Any:
    """Memory over the context, a line for each width of the weights, on the first machine."""
    alt = altair()
    machine = found["machines"][0]
    rows = [
        {
            "model": model["model"],
            "bits": str(point["bits"]),
            "context": point["context_tokens"],
            "GiB": point["total_bytes"] / GIB,
            "verdict": point["verdict"],
        }
        for model in machine["models"]
        for point in model["points"]
        if (point["kv_bits"], point["batch_size"]) == (16, 1)
    ]
    if not rows:
        return None
    facts = machine["budget"]
    lines = [
        {"line": "budget", "GiB": facts["budget_bytes"] / GIB},
        {"line": "limit", "GiB": facts["limit_bytes"] / GIB},
    ]
    curve = (
        alt.Chart()
        .mark_line(point=True)
        .encode(
            x=alt.X("context:Q", title="tokens of context", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("GiB:Q", title="GiB"),
            color=alt.Color("bits:N", title="bits", sort=None),
            tooltip=[
                "model:N",
                "bits:N",
                alt.Tooltip("context:Q", format=","),
                alt.Tooltip("GiB:Q", format=",.2f"),
                "verdict:N",
            ],
        )
    )
    rule = (
        alt.Chart(alt.Data(values=lines))
        .mark_rule(strokeDash=[6, 4])
        .encode(y="GiB:Q", tooltip=["line:N", alt.Tooltip("GiB:Q", format=",.2f")])
    )
    return (
        alt.layer(curve, rule, data=alt.Data(values=rows))
        .properties(width=300, height=220)
        .facet(alt.Facet("model:N", title=None, sort=None), columns=2)
        .resolve_scale(y="independent")
        .properties(title=f"Memory over context, {machine['name']}")
    )


def decode(found: Doc) -> Any:
    rows = [
        {
            "machine": machine["name"],
            "model": model["model"],
            "bits": f"{point['bits']} bits",
            "context": point["context_tokens"],
            "tps": point["decode_tps"],
            "low": point["decode_tps_low"],
            "high": point["decode_tps_high"],
        }
        for machine in found["machines"]
        for model in machine["models"]
        for point in model["points"]
        if (point["kv_bits"], point["batch_size"], point["context_tokens"])
        == (16, 1, found["settings"]["contexts"][0])
        and point["decode_tps"] is not None
    ]
    return _intervals(rows, "bits", "Decode, one request", ["machine", "model"])


def plans(found: Doc) -> Any:
    rows = [
        {
            "machine": plan["machine"],
            "model": plan["model"],
            "how": f"{plan['format']}, {plan['technique']}",
            "kind": plan["kind"],
            "tps": plan["decode_tps"],
            "low": plan["decode_tps_low"],
            "high": plan["decode_tps_high"],
        }
        for plan in found["plans"]
        if plan["decode_tps"] is not None and plan["verdict"] in ("fits", "tight")
    ]
    return _intervals(rows, "machine", "Against graphics cards", ["model"])


def _intervals(rows: list[dict[str, Any]], y: str, title: str, facets: list[str]) -> Any:
    """Bars with the interval that holds eight in ten measurements."""
    alt = altair()
    if not rows:
        return None
    for row in rows:
        row["facet"] = ", ".join(row[name] for name in facets)
    tooltip = [
        *(f"{name}:N" for name in rows[0] if isinstance(rows[0][name], str) and name != "facet"),
        *(alt.Tooltip(f"{name}:Q", format=",.1f") for name in ("tps", "low", "high")),
    ]
    base = alt.Chart().encode(y=alt.Y(f"{y}:N", title=None, sort=None))
    bars = base.mark_bar().encode(x=alt.X("tps:Q", title="tokens/s"), tooltip=tooltip)
    spans = base.mark_rule(strokeWidth=2, color="black").encode(x="low:Q", x2="high:Q")
    return (
        alt.layer(bars, spans, data=alt.Data(values=rows))
        .properties(width=300)
        .facet(alt.Facet("facet:N", title=None, sort=None), columns=2)
        .resolve_scale(x="independent", y="independent")
        .properties(title=title)
    )


def training(found: Doc) -> Any:
    alt = altair()
    rows = [
        {
            "machine": machine["name"],
            "model": row["model"],
            "method": row["method"],
            "length": row["largest_seq_length"],
            "verdict": row["verdict"],
        }
        for machine in found["machines"]
        for row in machine["training"]
        if row["largest_seq_length"] is not None
    ]
    if not rows:
        return None
    return (
        alt.Chart(alt.Data(values=rows), title="Longest rows that can be trained on, one at a time")
        .mark_bar()
        .encode(
            y=alt.Y("model:N", title=None, sort=None),
            yOffset=alt.YOffset("method:N", sort=None),
            x=alt.X("length:Q", title="tokens", scale=alt.Scale(type="symlog")),
            color=alt.Color("method:N", title=None, sort=None),
            row=alt.Row("machine:N", title=None, sort=None),
            tooltip=["machine:N", "model:N", "method:N", alt.Tooltip("length:Q", format=",")],
        )
        .properties(width=500)
    )


def pictures(found: Doc, kind: str) -> dict[str, bytes]:
    """Every plot as ``svg`` or ``png``.

    Raises:
        RuntimeUnavailable: If Altair or vl-convert is not installed.
    """
    convert = vl_convert()
    made = {}
    for name, chart in charts(found).items():
        spec = chart.to_dict()
        if spec.get("width") == "container":  # there is none around a picture
            spec["width"] = PICTURE_WIDTH
        if kind == "svg":
            made[name] = convert.vegalite_to_svg(spec).encode("utf-8")
        else:
            made[name] = convert.vegalite_to_png(spec, scale=2)
    return made
