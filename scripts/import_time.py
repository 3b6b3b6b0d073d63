"""CPU time (user + system) of `import uma` and of commands; least and median of N runs.

    python scripts/import_time.py [--json]

Commands run through the console entry point beside this interpreter, else as `python -m uma`. They
take turns, so that a busy moment of the machine does not fall on one alone.
"""

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = 21
ROOT = Path(__file__).resolve().parents[1]
_ENTRY = Path(sys.executable).parent / "uma"
UMA = [str(_ENTRY)] if _ENTRY.exists() else [sys.executable, "-m", "uma"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import uma": [sys.executable, "-c", "import uma"],
    "uma --help": [*UMA, "--help"],
    "uma run --help": [*UMA, "run", "--help"],
    "uma run llama-3-70b --dry-run": [*UMA, "run", "llama-3-70b", "--dry-run"],
}


def cpu_ms(command: list[str]) -> float:
    """CPU milliseconds of one run of ``command`` in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    rounds = [[cpu_ms(command) for command in COMMANDS.values()] for _ in range(RUNS)]
    times = dict(zip(COMMANDS, zip(*rounds, strict=True), strict=True))
    found = {
        name: {"min": round(min(ms), 1), "median": round(statistics.median(ms), 1)}
        for name, ms in times.items()
    }
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, ms in found.items():
        print(f"{name:32} {ms['min']:6.1f} ms least {ms['median']:6.1f} median")


if __name__ == "__main__":
    main()
