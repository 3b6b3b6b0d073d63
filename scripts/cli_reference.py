"""Write ``docs/cli.md`` from ``--help``; with ``--check`` fail when it is out of date."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
TARGET = ROOT / "docs" / "cli.md"


def commands() -> Iterator[str]:
    """Every command, and below a group its own, in the order of the help."""
    from uma.cli.app import command
    from uma.cli.commands import COMMANDS

    def below(name: str, found: Any) -> Iterator[str]:
        yield name
        for sub, one in getattr(found, "commands", {}).items():
            yield from below(f"{name} {sub}", one)

    yield ""
    for name in COMMANDS:
        yield from below(name, command(name))


def help_text(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "uma", *command.split(), "--help"]
    result = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    return "\n".join(line.rstrip() for line in result.stdout.splitlines()).strip()


def reference() -> str:
    parts = ["# Command line\n\nWritten by `scripts/cli_reference.py` from `--help`.\n"]
    for command in commands():
        parts.append(
            f"## `{' '.join(['uma', command]).strip()}`\n\n```text\n{help_text(command)}\n```\n"
        )
    return "\n".join(parts)


def main() -> int:
    text = reference()
    if "--check" in sys.argv:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            print(
                "docs/cli.md is out of date: run python scripts/cli_reference.py", file=sys.stderr
            )
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
