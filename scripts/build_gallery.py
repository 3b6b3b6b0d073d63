"""Sample reports of five Macs, each as an HTML file with a picture, and a page that links them.

    python scripts/build_gallery.py FOLDER [--only NAME ...]

Writes FOLDER/NAME.html, FOLDER/NAME.png (the capacity map) and FOLDER/README.md. The date is that
of SOURCE_DATE_EPOCH where it is set, so that a build can be repeated to the byte.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

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


def document(name: str) -> dict[str, object]:
    """The report of a Mac, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        if uma(["report", "--machine", name, "--format", "json", "-o", str(file)]):
            raise SystemExit(f"no report of {name}")
        found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
        return found


def index(reports: dict[str, dict[str, object]]) -> str:
    """A page in Markdown: what each Mac holds in three sentences, its picture, its report."""
    parts = ["# Sample reports of `uma report`", "", "Made by `python scripts/build_gallery.py`."]
    for name, found in reports.items():
        sentences = found["summary"]
        assert isinstance(sentences, list)
        parts += ["", f"## [{name}]({name}.html)", "", *map(plain_words, sentences), ""]
        parts += [f"![What fits {name}, by model and width]({name}.png)"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(MACS), choices=MACS, metavar="NAME")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    reports = {}
    for name in asked.only:
        reports[name] = document(name)
        (asked.folder / f"{name}.html").write_text(page(reports[name]), encoding="utf-8")
        (asked.folder / f"{name}.png").write_bytes(pictures(reports[name], "png")["map"])
        print(f"{name}: written to {asked.folder}")
    (asked.folder / "README.md").write_text(index(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
