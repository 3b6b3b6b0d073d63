"""CPU seconds of the capacity map, of a report and of its page; and the size of the page.

    python scripts/bench_report.py [--machine NAME] [--models N]

Each part runs in a process of its own, with nothing kept from another; the least of three counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MAP = """
import gc, time
gc.disable()
from uma.catalog.listed import listed_models
from uma.machine.here import machine_of
from uma.plan.capacity.facts import WIDTHS
from uma.plan.capacity.map import capacity_map, place_of
from uma.plan.estimate import default_engine
machine = machine_of({machine!r})
place, _ = place_of(machine, default_engine(machine))
rows = capacity_map(listed_models()[:{models}], [place], {contexts}, WIDTHS)[0]
cells = sum(len(row.cells) for row in rows)
print(time.process_time(), len(rows), cells)
"""


def seconds(code: str) -> tuple[float, str]:
    """The least CPU time of three processes, the start of Python included, and what one said."""
    found = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        cpu_s, _, said = done.stdout.strip().partition(" ")
        found.append((float(cpu_s), said))
    return min(found)


def page(machine: str, format: str, file: Path) -> tuple[float, int]:
    """CPU seconds of ``uma report`` with its defaults, and the bytes that it wrote."""
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'uma', 'report', '--machine', {machine!r}, "
        f"'--format', {format!r}, '--force', '-o', {str(file)!r}], check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    cpu_s, _ = seconds(code)
    return cpu_s, os.path.getsize(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="mac-studio-m3-ultra-256")
    parser.add_argument("--models", type=int, default=252)
    parser.add_argument("--map-only", action="store_true")
    asked = parser.parse_args()
    for contexts in ((8192,), (8192, 32_768)):
        code = MAP.format(machine=asked.machine, models=asked.models, contexts=contexts)
        cpu_s, said = seconds(code)
        models, cells = said.split()
        print(f"map at {contexts}: {cpu_s:.2f} s CPU, {models} models, {cells} cells")
    if asked.map_only:
        return
    with tempfile.TemporaryDirectory() as folder:
        for format in ("json", "md", "html"):
            cpu_s, size = page(asked.machine, format, Path(folder, f"report.{format}"))
            print(f"uma report --format {format}: {cpu_s:.2f} s CPU, {size:,} bytes")


if __name__ == "__main__":
    main()
