"""Turn a bundle of ``uma doctor --bundle`` into a fixture of the tests and rows of measurements.

    python scripts/add_machine.py BUNDLE [--name NAME] [--truth FILE.csv]

Writes tests/data/machines/NAME.json, which the tests decode from then on, and appends the
bundle's measured rows to the table of measurements, each once.
"""

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from uma.errors import UmaError  # noqa: E402
from uma.measurement.bundle import KIND, machine_of_readings  # noqa: E402
from uma.report.bench import COLUMNS  # noqa: E402

FOLDER = ROOT / "tests" / "data" / "machines"
TRUTH = ROOT / "uma" / "data" / "truth" / "inference.csv"
FACTS = (
    *("kind", "backend", "memory_bytes", "limit_bytes", "limit_source", "limit_high_bytes"),
    *("max_buffer_bytes", "chip", "gpu_cores", "cpu", "os"),
)


def read_bundle(path: Path) -> dict[str, Any]:
    """Raises:
    UmaError: If it is no bundle, or its readings do not decode.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UmaError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UmaError(f"{path} is no bundle: make one with uma doctor --bundle FILE")
    return found


def fixture(bundle: Mapping[str, Any]) -> dict[str, Any]:
    """The readings of a bundle, and what they are decoded to: checked by a person once."""
    readings, info = bundle["readings"], bundle["device_info"] or None
    machine = asdict(machine_of_readings(readings, info))
    return {
        "source": f"uma doctor bundle, {bundle['date']}",
        "versions": bundle["versions"],
        "readings": readings,
        "device_info": info,
        "machine": {name: machine[name] for name in FACTS},
    }


def name_of(machine: Mapping[str, Any]) -> str:
    """A file's name: chip or processor, and memory.

    >>> name_of({"chip": "Apple M4 Max", "cpu": None, "memory_bytes": 64 << 30})
    'apple_m4_max_64g'
    """
    words = re.findall(r"[a-z0-9]+", str(machine["chip"] or machine["cpu"] or "machine").lower())
    return "_".join([*words, f"{round(machine['memory_bytes'] / (1 << 30))}g"])


def truth_rows(bundle: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The measured rows, each with an id and its origin."""
    return [
        {
            **{column: row.get(column, "") for column in COLUMNS},
            "rec_id": f"doctor-{name}-{bundle['date']}-{number:02}",
            "source": "uma doctor bundle",
        }
        for number, row in enumerate(bundle["rows"])
    ]


def append_rows(path: Path, rows: list[dict[str, Any]]) -> int:
    """Add the rows that are not there yet; how many were."""
    text = path.read_text(encoding="utf-8")
    known = {row["rec_id"] for row in csv.DictReader(io.StringIO(text))}
    new = [row for row in rows if row["rec_id"] not in known]
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(new)
    return len(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--name", help="of the fixture; by default of chip and memory")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--truth", type=Path, default=TRUTH)
    options = parser.parse_args()
    try:
        bundle = read_bundle(options.bundle)
        made = fixture(bundle)
    except (UmaError, KeyError, TypeError) as error:
        print(f"add_machine: {error}", file=sys.stderr)
        return 1
    name = options.name or name_of(made["machine"])
    target = options.folder / f"{name}.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    added = append_rows(options.truth, truth_rows(bundle, name))
    print(f"{target.name} written, {added} rows added to {options.truth.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
