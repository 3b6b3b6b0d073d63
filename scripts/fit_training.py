#!/usr/bin/env python3
"""Fit the torch engine's two shares of allocator slack to the rows that measured both counts.

Usage: fit_training.py FILE.csv

A row counts if it has the peak that torch allocated, the state that it kept, and what nvidia-smi or
the allocator showed at the peak. Slack is a share of what is allocated above the state and one of
the logits that we predict: medians, the first of rows with few logits. The two go into
``uma/engines/torch_training.py``: ``SLACK`` and ``LOGITS_SLACK``.
"""

import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scoring.rows import Row, Skipped, read_rows  # noqa: E402
from scoring.training import case_of  # noqa: E402

from uma.engines.torch_training import training_terms  # noqa: E402
from uma.engines.transformers import CUDA_CONTEXT  # noqa: E402
from uma.units import MIB  # noqa: E402

FEW = 0.2  # logits over what is above the state


def shares(row: Row) -> tuple[float, float] | None:
    """Slack and logits over what is above the state; ``None`` if the row lacks a count."""
    told = row["mem_kind"] == "torch_allocated" and row["peak_mem_bytes"]
    if row["outcome"] != "ok" or not told:
        return None
    notes, peak = row["notes"], int(float(row["peak_mem_bytes"]))
    state = re.search(r"retained after train (\d+) B", notes)
    shown = re.search(r"nvidia-smi peak \(mean over GPUs\) (\d+) MiB", notes)
    loaded = re.search(r'"after_load_allocated_mib": ([\d.]+)', notes)
    held = re.search(r'"peak_reserved_mib": ([\d.]+)', notes)
    if state and shown:
        above, slack = peak - int(state[1]), int(shown[1]) * MIB - CUDA_CONTEXT - peak
    elif loaded and held:
        above = peak - round(float(loaded[1]) * MIB)
        slack = round(float(held[1]) * MIB) - peak
    else:
        return None
    try:
        case = case_of(row)
    except Skipped:
        return None
    terms = training_terms(case.architecture, case.workload, case.settings)
    logits = sum(t.size_bytes for t in terms if t.name == "logits")
    return (slack / above, logits / above) if above > 0 else None


def fitted(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The median share where logits are few, and that of the logits in what is left elsewhere."""
    everywhere = median([slack for slack, logits in points if logits < FEW])
    of_logits = [(slack - everywhere) / logits for slack, logits in points if logits >= FEW]
    return everywhere, median(of_logits)


def main(path: Path) -> int:
    """Print both shares."""
    points = [found for row in read_rows(path) if (found := shares(row)) is not None]
    everywhere, of_logits = fitted(points)
    print(f"SLACK = {everywhere:.2f}\nLOGITS_SLACK = {of_logits:.2f}  # {len(points)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
