"""A report as one HTML file that needs no network."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from uma.report.capacity.markdown import price_words
from uma.report.capacity.page_answers import answers
from uma.report.capacity.page_data import page_data
from uma.report.capacity.plots import page_plots, vl_convert
from uma.report.capacity.templates import FOLDER, rendered
from uma.units import printable

Doc = Mapping[str, Any]


def page(found: Doc) -> str:
    """The page of a document.

    Raises:
        RuntimeUnavailable: If Altair, vl-convert or Jinja is not installed.
    """
    plots = page_plots(found)
    return rendered(
        "page.html",
        found=found,
        answers=answers(found),
        takers=takers(found),
        prices=list(dict.fromkeys((one["machine"], price_words(one)) for one in found["plans"])),
        reasons=unknown_rates(found["plans"]),
        data=script_json(page_data(found)),
        plots=plots,
        plots_json=script_json(plots),
        vega=vl_convert().javascript_bundle(),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )


def takers(found: Doc) -> list[str]:
    """Machines and cards, each once."""
    return list(
        dict.fromkeys(
            [machine["name"] for machine in found["machines"]]
            + [plan["machine"] for plan in found["plans"]]
        )
    )


def unknown_rates(plans: Sequence[Doc]) -> list[str]:
    """Why rates of the plans are not known, each reason once."""
    named = (one[f"{name}_tps_reason"] for one in plans for name in ("decode", "prompt"))
    return list(dict.fromkeys(reason for reason in named if reason))


def script_json(value: Any) -> Any:
    """JSON that may stand in a ``script`` element: nothing in it ends one or begins a comment."""
    from markupsafe import Markup

    text = json.dumps(_shown(value), ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _shown(value: Any) -> Any:
    """``value`` with its texts, and the names in it, as they may be shown."""
    if isinstance(value, str):
        return printable(value, kept="")
    if isinstance(value, Mapping):
        return {_shown(key): _shown(held) for key, held in value.items()}
    return [_shown(held) for held in value] if isinstance(value, list | tuple) else value
