"""Score the estimator on measured rows, and say how far off it is.

    python scripts/accuracy.py [--inference FILE.csv] [--training FILE.csv] [--sizes FILE.csv]
                               [--rows] [--sources] [--json]

Files have the columns of ``uma/data/truth/*.csv``, which are taken where no file is named. Like is
compared with like: rows are put into fixed groups by program and by what was measured, and a row
that is not scored is counted under its reason. ``docs/accuracy.md`` explains both.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scoring import fits, memory, sizes, speed  # noqa: E402
from scoring import training as training_rows  # noqa: E402
from scoring.rows import read_rows  # noqa: E402
from scoring.summary import Group  # noqa: E402

TRUTH = ROOT / "uma/data/truth"


def main() -> None:
    options = _options()
    groups = scored(options.inference, options.training, options.sizes)
    found = {name: group.to_json(options.rows) for name, group in sorted(groups.items())}
    if options.json:
        print(json.dumps({"schema_version": 1, "groups": found}, indent=2))
        return
    print(table(found))
    if options.sources:
        print(f"\n{sources(found)}")
    if options.rows:
        for name, group in found.items():
            print(
                *(f"{name}: {row}: {why}" for row, why in group["skipped_rows"].items()), sep="\n"
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inference", type=Path, help="measured memory, speed and fits")
    parser.add_argument("--training", type=Path, help="measured training memory")
    parser.add_argument("--sizes", type=Path, help="published sizes of repositories")
    parser.add_argument("--rows", action="store_true", help="list every row by its id")
    parser.add_argument("--sources", action="store_true", help="errors by source, and without it")
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    options = parser.parse_args()
    if not (options.inference or options.training or options.sizes):
        options.inference = TRUTH / "inference.csv"
        options.training = TRUTH / "training.csv"
        options.sizes = TRUTH / "mlx_repo_sizes.csv"
    return options


def scored(
    inference: Path | None, training: Path | None, repositories: Path | None
) -> dict[str, Group]:
    """Every group of the rows in these files, by name."""
    groups: dict[str, Group] = {}
    if inference is not None:
        rows = read_rows(inference)
        groups |= memory.score(rows) | fits.score(rows) | speed.score(rows)
    if training is not None:
        groups |= training_rows.score(read_rows(training))
    if repositories is not None:
        groups |= sizes.score(read_rows(repositories))
    return groups


def table(groups: dict[str, dict[str, Any]]) -> str:
    """The groups as lines of a Markdown table, and their confusion matrices."""
    lines = [
        "| group | quantity | rows | eligible | scored | median | p90 | bias | skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        lines.append(_line(name, group))
        lines += [
            _line(f"{name}: {part}", {**group, **found, "rows": "", "eligible": "", "skipped": {}})
            for part, found in group.get("parts", {}).items()
        ]
    for name, group in groups.items():
        if group["confusion"]:
            counts = ", ".join(
                f"{key.replace('_', ' ')} {n}" for key, n in group["confusion"].items()
            )
            lines.append(f"\n{name}: {counts}")
    return "\n".join(lines)


def sources(groups: dict[str, dict[str, Any]]) -> str:
    """Each group's errors by who published the rows, and what is left without them."""
    lines = [
        "| group | source | scored | median | p90 | median without it | p90 without it |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        for source, own in group.get("by_source", {}).items():
            told = [part[key] for part in (own, own["without_it"]) for key in ERRORS]
            shown = ["" if error is None else f"{error:.2%}" for error in told]
            lines.append("| " + " | ".join([name, source, str(own["scored"]), *shown]) + " |")
    return "\n".join(lines)


ERRORS = ("median_abs_error", "p90_abs_error")


def _line(name: str, group: dict[str, Any]) -> str:
    errors = [group[key] for key in ("median_abs_error", "p90_abs_error", "bias")]
    shown = ["" if error is None else f"{error:.2%}" for error in errors]
    skipped = ", ".join(f"{reason} {count}" for reason, count in group["skipped"].items())
    cells = [name, group["quantity"], group["rows"], group["eligible"], group["scored"]]
    return "| " + " | ".join(map(str, [*cells, *shown, skipped])) + " |"


if __name__ == "__main__":
    main()
