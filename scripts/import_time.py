"""CPU time (user + system) of `import uma` and of commands, above bare Python; least of N runs.

python scripts/import_time.py [--json]
"""

import json
import resource
import subprocess
import sys

RUNS = 11
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import uma": ["-c", "import uma"],
    "uma --help": ["-m", "uma", "--help"],
    "uma run --help": ["-m", "uma", "run", "--help"],
    "uma run -m llama-3-70b --dry-run": ["-m", "uma", "run", "-m", "llama-3-70b", "--dry-run"],
}


def cpu_ms(arguments: list[str]) -> float:
    """Least CPU milliseconds of a fresh interpreter with ``arguments`` over ``RUNS`` runs."""
    least = float("inf")
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        least = min(least, 1e3 * used)
    return least


def main() -> None:
    times = {name: cpu_ms(arguments) for name, arguments in COMMANDS.items()}
    if "--json" in sys.argv:
        print(json.dumps({name: round(ms, 1) for name, ms in times.items()}))
        return
    bare = times["python -c pass"]
    for name, ms in times.items():
        print(f"{name:34} {ms:6.1f} ms  {ms - bare:+6.1f} above bare Python")


if __name__ == "__main__":
    main()
