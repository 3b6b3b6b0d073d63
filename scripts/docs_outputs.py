"""Write below each `$ uma ...` line of a page's code blocks what it prints; ``--check`` compares.

Usage: docs_outputs.py PAGE.md [--check]
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```\n\$ (uma [^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def printed(command: str) -> str:
    arguments = [sys.executable, "-m", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout


def rewritten(page: str) -> str:
    return BLOCK.sub(lambda found: f"```\n$ {found[1]}\n{printed(found[1])}```", page)


def main() -> int:
    path = Path(sys.argv[1])
    old = path.read_text(encoding="utf-8")
    new = rewritten(old)
    if "--check" in sys.argv:
        if new != old:
            print(f"{path} is out of date: python scripts/docs_outputs.py {path}", file=sys.stderr)
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
