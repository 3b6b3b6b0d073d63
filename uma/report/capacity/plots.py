"""The plots of a report, from its document, as Vega-Lite made by Altair.

Each has rows and a chart. The page holds all rows and shows those of the choice; a picture is made
for each model or machine that the rows are of.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

from uma.errors import RuntimeUnavailable
from uma.report.capacity.plot_rows import (
    VERDICTS,
    budget_rows,
    context_rows,
    decode_rows,
    map_rows,
    plan_rows,
    sequence_rows,
    training_rows,
)
from uma.units import printable

Doc = Mapping[str, Any]
Row = dict[str, Any]

# Dark enough for white words on them, light enough for a dark page.
VERDICT_COLORS = dict(zip(VERDICTS, ("#24795c", "#96690a", "#b3403a", "#6b6b6b"), strict=True))
PARTS = ("fits", "tight: above the budget", "left to the system")
PICTURE_WIDTH = 520


class Plot(NamedTuple):
    """Rows, what makes a chart of data, and the keys by which one chart shows but some rows.

    Its height is ``step`` for each value of the keys ``by``: Vega-Lite warns of steps where the
    width is that of what is around.
    """

    rows: Sequence[Row]
    chart: Callable[[Any], Any]
    follows: tuple[str, ...] = ()
    step: int = 280
    by: tuple[str, ...] = ()

    def height(self) -> int:
        return self.step * prod(max(1, len({row[key] for row in self.rows})) for key in self.by)


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


def page_plots(found: Doc) -> dict[str, Any]:
    """The plots of the page: Vega-Lite whose data are named ``rows``, and all of those rows."""
    alt = altair()
    made = {}
    for name, plot in (_common(found) | {"one": Plot([], one)}).items():
        if plot.rows or name == "one":
            fit = alt.AutoSizeParams(type="fit-x", contains="padding")
            chart = plot.chart(alt.NamedData("rows")).properties(width="container", autosize=fit)
            made[name] = {**plot._asdict(), "chart": chart.to_dict()}
    return made


def pictures(found: Doc, kind: str) -> dict[str, bytes]:
    """Every plot as ``svg`` or ``png``, under its name and what it is of.

    Raises:
        RuntimeUnavailable: If Altair or vl-convert is not installed.
    """
    alt, convert, made = altair(), vl_convert(), {}
    for name, title, plot in _single(found):
        chart = plot.chart(alt.Data(values=plot.rows)).properties(
            title=title, background="white", width=PICTURE_WIDTH, height=plot.height()
        )
        spec = chart.to_dict()
        if kind == "svg":
            made[name] = convert.vegalite_to_svg(spec).encode("utf-8")
        else:
            made[name] = convert.vegalite_to_png(spec, scale=2)
    return made


def _single(found: Doc) -> Iterator[tuple[str, str, Plot]]:
    """A plot for each machine or model that its rows are of, with its name and title."""
    contexts = found["settings"]["contexts"]
    more = {
        "map": Plot(
            map_rows(found, contexts[0]), capacity_map(found), ("machine",), 17, ("model",)
        ),
        "context": Plot(context_rows(found), context, ("machine", "model")),
    }
    for name, plot in (_common(found) | more).items():
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in plot.rows:
            groups.setdefault(tuple(row[key] for key in plot.follows), []).append(row)
        for place, (keys, rows) in enumerate(groups.items()):
            slug = re.sub(r"[^a-z0-9.]+", "-", "-".join(keys).lower()).strip("-.")
            title = ", ".join([TITLES[name].format(contexts[0]), *(printable(k, "") for k in keys)])
            full = name if len(groups) == 1 else f"{name}-{place + 1}-{slug}"
            yield full, title, plot._replace(rows=rows)


TITLES = {
    "budget": "Memory of each machine",
    "map": "GiB by model and width at {:,} tokens of context",
    "context": "Memory over the context, 16-bit cache",
    "decode": "Decode of one request at {:,} tokens of context",
    "sequences": "Sequences at {:,} tokens of context each",
    "training": "Longest rows of a fine-tuning, one at a time",
    "plans": "Decode of the best plan of each machine and card",
}


def _common(found: Doc) -> dict[str, Plot]:
    """The plots of both the page and the pictures."""
    machines = [machine["name"] for machine in found["machines"]]
    takers = list(dict.fromkeys(plan["machine"] for plan in found["plans"]))
    pages, bars = ("machine", "model"), 13
    return {
        "budget": Plot(budget_rows(found, PARTS), budget, (), 30, ("machine",)),
        "decode": Plot(
            decode_rows(found),
            _intervals("bits", machines),
            ("model",),
            bars,
            ("bits", "machine"),
        ),
        "sequences": Plot(sequence_rows(found), sequences, pages, bars, ("bits", "cache")),
        "training": Plot(training_rows(found), training, ("machine",), 26, ("model",)),
        "plans": Plot(
            plan_rows(found), _intervals("model", takers), (), bars, ("model", "machine")
        ),
    }


def budget(data: Any) -> Any:
    alt = altair()
    colors = [VERDICT_COLORS["fits"], VERDICT_COLORS["tight"], VERDICT_COLORS["unknown"]]
    return (
        alt.Chart(data)
        .mark_bar()
        .encode(
            y=alt.Y("machine:N", title=None, sort=None),
            x=alt.X("GiB:Q", title="GiB", stack="zero"),
            color=alt.Color(
                "part:N", title=None, scale=alt.Scale(domain=list(PARTS), range=colors)
            ),
            order="order:Q",
            tooltip=["machine:N", "part:N", alt.Tooltip("GiB:Q", format=",.2f")],
        )
    )


def capacity_map(found: Doc) -> Callable[[Any], Any]:
    """The largest models that run in some width, by width."""
    alt, widths = altair(), found["settings"]["widths"]

    def chart(data: Any) -> Any:
        base = alt.Chart(data).encode(
            x=alt.X("bits:O", title="bits of a weight", sort=widths, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("model:N", title=None, sort=None),
        )
        exact = alt.Tooltip("GiB:Q", format=",.2f")
        return _cells(base, alt.Text("GiB:Q", format=",.0f"), [exact])

    return chart


def _cells(base: Any, text: Any, tooltip: list[Any]) -> Any:
    """Rectangles in the colour of their verdict, with words on them."""
    alt = altair()
    scale = alt.Scale(domain=list(VERDICT_COLORS), range=list(VERDICT_COLORS.values()))
    boxes = base.mark_rect(stroke="white").encode(
        color=alt.Color("verdict:N", title=None, scale=scale),
        tooltip=["model:N", "verdict:N", *tooltip],
    )
    words = base.mark_text(color="white", fontSize=10).encode(text=text)
    return boxes + words


def training(data: Any) -> Any:
    alt = altair()
    base = alt.Chart(data).encode(
        x=alt.X("method:N", title=None, sort=None, axis=alt.Axis(labelAngle=-30, orient="top")),
        y=alt.Y("model:N", title=None, sort=None),
    )
    return _cells(base, "label:N", ["method:N", "arithmetic:N"])


def context(data: Any) -> Any:
    """Lines by width of the weights, for a picture."""
    return _over_context(data, "bits:N", [])


def one(data: Any) -> Any:
    """Lines by width of the cache, what is chosen marked, against budget and limit."""
    alt = altair()
    chosen = (
        alt.Chart(data)
        .transform_filter("datum.chosen")
        .mark_point(size=160, strokeWidth=2, color="#d62728")
        .encode(x="context:Q", y="GiB:Q", tooltip=["arithmetic:N"])
    )
    lines = alt.Chart(alt.NamedData("lines")).encode(y="GiB:Q")
    rule = lines.mark_rule(strokeDash=[6, 4]).encode(tooltip=["line:N"])
    words = lines.mark_text(align="left", dx=4, dy=-6, x=0).encode(text="line:N")
    return _over_context(data, "cache:N", [chosen, rule, words])


def _over_context(data: Any, color: str, more: list[Any]) -> Any:
    alt = altair()
    axis = alt.Axis(format=",", labelOverlap=True)
    scale = alt.Scale(type="log", base=2)
    curve = (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(
            x=alt.X("context:Q", title="tokens of context", scale=scale, axis=axis),
            y=alt.Y("GiB:Q", title="GiB", scale=alt.Scale(zero=True)),
            color=alt.Color(color, title=None, sort=None),
            tooltip=[
                alt.Tooltip("context:Q", format=","),
                color,
                "verdict:N",
                alt.Tooltip("arithmetic:N", title="GiB"),
            ],
        )
    )
    return alt.layer(curve, *more)


def sequences(data: Any) -> Any:
    alt = altair()
    base = alt.Chart(data).encode(
        y=alt.Y("bits:N", title=None, sort=None),
        yOffset=alt.YOffset("cache:N", sort=None),
        x=alt.X("sequences:Q", title="sequences at once"),
    )
    bars = base.mark_bar().encode(
        color=alt.Color("cache:N", title=None, sort=None),
        tooltip=["bits:N", "cache:N", alt.Tooltip("sequences:Q", format=",")],
    )
    words = base.mark_text(align="left", dx=3).encode(text=alt.Text("sequences:Q", format=","))
    return bars + words


def _intervals(y: str, machines: list[str]) -> Callable[[Any], Any]:
    """Bars for each machine, with the interval that holds eight in ten measurements."""
    alt = altair()

    def chart(data: Any) -> Any:
        base = alt.Chart(data).encode(
            y=alt.Y(f"{y}:N", title=None, sort=None),
            yOffset=alt.YOffset("machine:N", sort=machines),
        )
        rates = [alt.Tooltip(f"{name}:Q", format=",.1f") for name in ("tps", "low", "high")]
        bars = base.mark_bar().encode(
            x=alt.X("tps:Q", title="tokens/s"),
            color=alt.Color("machine:N", title=None, scale=alt.Scale(domain=machines)),
            tooltip=["model:N", "machine:N", "how:N", *rates],
        )
        spans = base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q")
        words = base.mark_text(align="left", dx=4, fontSize=9).encode(x="high:Q", text="label:N")
        return alt.layer(bars, spans, words)

    return chart
