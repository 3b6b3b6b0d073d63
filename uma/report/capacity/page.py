"""A report as one HTML file that needs no network."""

import json
from collections.abc import Mapping
from typing import Any

from uma.report.capacity.page_data import page_data
from uma.report.capacity.plots import charts, vl_convert
from uma.report.capacity.templates import FOLDER, rendered


def page(found: Mapping[str, Any]) -> str:
    """The page of a document.

    Raises:
        RuntimeUnavailable: If Altair, vl-convert or Jinja is not installed.
    """
    specs = {name: chart.to_dict() for name, chart in charts(found).items()}
    return rendered(
        "page.html",
        found=found,
        data=script_json(page_data(found)),
        specs=script_json(specs),
        vega=vl_convert().javascript_bundle(),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )


def script_json(value: Any) -> Any:
    """JSON that may stand in a ``script`` element: nothing in it ends one or begins a comment."""
    from markupsafe import Markup

    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
