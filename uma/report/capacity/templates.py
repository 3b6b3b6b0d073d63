"""The templates of the pages, which escape whatever they show."""

from pathlib import Path
from typing import Any

from uma.errors import RuntimeUnavailable
from uma.report.capacity.markdown import plan_words, price_words
from uma.report.capacity.summary import number, speed_words
from uma.units import format_gib, printable

FOLDER = Path(__file__).parent


def rendered(template: str, **values: Any) -> str:
    """A template of this folder with these values, and the styles of the pages.

    Raises:
        RuntimeUnavailable: If Jinja is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise RuntimeUnavailable(
            "an HTML report needs Altair, vl-convert-python and Jinja: pip install "
            "'uma-toolkit[report]'; --format md and json do without"
        ) from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "gib": format_gib,
        "number": number,
        "speed": lambda row, name="decode": speed_words(row, name).removeprefix(" at ") or "?",
        "price": price_words,
        "plan": plan_words,
        "text": lambda value: printable(str(value), kept=""),
    }
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    return str(environment.get_template(template).render(style=style, **values))
