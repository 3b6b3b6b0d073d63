"""What the documents tell people to type is what the commands take."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")

from uma.cli.app import command

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def typed_commands() -> list[str]:
    """Every line of a code block that begins with ``uma``, and every ``uma ...`` in backquotes."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.name != "cli.md"]
    found = [m for text in texts for m in re.findall(r"^(?:\$ )?(uma .+)$", text, re.MULTILINE)]
    found += [m for text in texts for m in re.findall(r"`(uma [a-z][^`]*)`", text)]
    return sorted(set(found))


@pytest.mark.parametrize("line", typed_commands())
def test_a_command_in_the_documents_is_one_that_is_accepted(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    if words and not words[0].startswith("-"):
        command(words[0]).make_context(f"uma {words[0]}", words[1:]).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_file_leads_to_one(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []
