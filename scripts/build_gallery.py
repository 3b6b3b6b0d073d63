"""Sample reports of five Macs: pictures, a page that shows them, and on demand the reports.

    python scripts/build_gallery.py docs/gallery
    python scripts/build_gallery.py FOLDER --html [--only NAME ...]

Writes FOLDER/README.md and for each Mac pictures of its plots; with --html also FOLDER/NAME.html.
The date is that of SOURCE_DATE_EPOCH where it is set, so that a build can be repeated to the byte.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from uma.cli import main as uma  # noqa: E402
from uma.report.capacity.markdown import plain_words  # noqa: E402
from uma.report.capacity.page import page  # noqa: E402
from uma.report.capacity.plots import pictures  # noqa: E402

MACS = (
    "macbook-air-m4-16",
    "mac-mini-m4-pro-64",
    "mac-studio-m4-max-128",
    "mac-studio-m3-ultra-256",
    "mac-studio-m3-ultra-512",
)
MACOS = "26"
SHOWN = {
    "map": "What fits, by model and width of the weights",
    "plans": "Against graphics cards: tokens/s of the best plan of each",
    "training": "Fine-tuning: the longest rows by model and method",
}


def document(name: str) -> dict[str, Any]:
    """The report of a Mac, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        if uma(["report", "--machine", name, "--macos", MACOS, "-o", str(file)]):
            raise SystemExit(f"no report of {name}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def index(reports: dict[str, dict[str, Any]]) -> str:
    """A page in Markdown: what each Mac holds in three sentences, and its pictures."""
    version, date = (next(iter(reports.values()))[key] for key in ("uma_version", "date"))
    parts = [
        "# Sample reports of `uma report`",
        "",
        f"Five Macs with macOS {MACOS}, by uma {version} on {date}. Made by "
        "`python scripts/build_gallery.py docs/gallery`; with `--html` it also writes the "
        "reports themselves, each a file to open by double-click: controls for model, bits, "
        "cache, context, sequences, machines and the GPU limit, with the arithmetic of each "
        "figure. One of them: `uma report --machine mac-studio-m3-ultra-256 -o studio.html`. "
        "No figure here was measured on a Mac by the developers: see [the method](../report.md).",
    ]
    for name, found in reports.items():
        title = found["machines"][0]["title"]
        parts += ["", f"## {plain_words(title)}", "", *map(plain_words, found["summary"])]
        for plot, words in SHOWN.items():
            parts += ["", f"![{words}, {plain_words(title)}]({name}-{plot}.svg)"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--html", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(MACS), choices=MACS, metavar="NAME")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    reports = {}
    for name in asked.only:
        reports[name] = document(name)
        made = pictures(reports[name], "svg")
        for plot in SHOWN:
            (asked.folder / f"{name}-{plot}.svg").write_bytes(made[plot])
        if asked.html:
            (asked.folder / f"{name}.html").write_text(page(reports[name]), encoding="utf-8")
        print(f"{name}: written to {asked.folder}")
    (asked.folder / "README.md").write_text(index(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
