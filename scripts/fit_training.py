#!/usr/bin/env python3
"""Fit the torch engine's share of allocator slack to the rows that measured both counts.

Usage: fit_training.py FILE.csv

A row counts if it has the peak that torch allocated, the state that it kept, and what nvidia-smi or
the allocator showed at the peak. The share is that of the slack in what is allocated above the
state; the median goes into ``uma/engines/torch_training.py``, ``RESERVED_SLACK``.
"""

import re
import sys
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parent))

from scoring.rows import Row, read_rows

from uma.engines.transformers import CUDA_CONTEXT
from uma.units import MIB


def share(row: Row) -> float | None:
    """Slack over what is allocated above the state; ``None`` if the row lacks a count."""
    told = row["mem_kind"] == "torch_allocated" and row["peak_mem_bytes"]
    if row["outcome"] != "ok" or not told:
        return None
    notes, peak = row["notes"], int(float(row["peak_mem_bytes"]))
    state = re.search(r"retained after train (\d+) B", notes)
    shown = re.search(r"nvidia-smi peak \(mean over GPUs\) (\d+) MiB", notes)
    if state and shown:
        above, slack = peak - int(state[1]), int(shown[1]) * MIB - CUDA_CONTEXT - peak
        return slack / above if above > 0 else None
    loaded = re.search(r'"after_load_allocated_mib": ([\d.]+)', notes)
    held = re.search(r'"peak_reserved_mib": ([\d.]+)', notes)
    if loaded and held:
        return (float(held[1]) * MIB - peak) / (peak - float(loaded[1]) * MIB)
    return None


def main(path: Path) -> int:
    """Print the median share."""
    shares = [found for row in read_rows(path) if (found := share(row)) is not None]
    spread = quantiles(shares, n=10)
    deciles = f"deciles {spread[0]:.2f} to {spread[-1]:.2f}"
    print(f"RESERVED_SLACK = {median(shares):.2f}  # {len(shares)} rows, {deciles}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
