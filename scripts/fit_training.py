#!/usr/bin/env python3
"""Fit the torch engine's shares of allocator slack to the rows that measured both counts.

Usage: fit_training.py FILE.csv

A row counts if it has the peak that torch allocated, the state that it kept, and what nvidia-smi or
the allocator showed at the peak, which is below ``FULL`` of the card: a pool that the card's end
cut off is smaller than torch would have it. Slack is a share of what is allocated above the state,
and one of the logits that we predict (medians, the first of rows with few logits); where batches
differ in length, a share of what one makes; in full training under FSDP, a share of all above
weights and optimizer states. Runs bound by the update are no exception: states are no part of what
slack is a share of, and what their backward pass freed is still held. The shares go into
``uma/engines/torch_training.py``: ``SLACK``, ``LOGITS_SLACK``, ``VARIABLE_SLACK`` and
``FSDP_SLACK``.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scoring.rows import Row, Skipped, read_rows  # noqa: E402
from scoring.training import case_of  # noqa: E402

from uma.engines.torch_training import training_terms  # noqa: E402
from uma.engines.transformers import CUDA_CONTEXT  # noqa: E402
from uma.units import GIB, MIB  # noqa: E402

FEW = 0.2  # logits over what is above the state
FULL = 0.92  # of the card's memory


@dataclass(frozen=True, slots=True)
class Point:
    """Slack and predicted logits of a row over what is above the state; what kind of run it was."""

    slack: float
    logits: float
    kind: str


def point_of(row: Row) -> Point | None:
    """What a row says; ``None`` if it lacks a count."""
    told = row["mem_kind"] == "torch_allocated" and row["peak_mem_bytes"]
    if row["outcome"] != "ok" or not told:
        return None
    notes, peak = row["notes"], int(float(row["peak_mem_bytes"]))
    state = re.search(r"retained after train (\d+) B", notes)
    shown = re.search(r"nvidia-smi peak \(mean over GPUs\) (\d+)[.\d]* MiB", notes)
    loaded = re.search(r'"after_load_allocated_mib": ([\d.]+)', notes)
    held = re.search(r'"peak_reserved_mib": ([\d.]+)', notes)
    if state and shown:
        above, reserved = peak - int(state[1]), int(shown[1]) * MIB - CUDA_CONTEXT
    elif loaded and held:
        above = peak - round(float(loaded[1]) * MIB)
        reserved = round(float(held[1]) * MIB)
    else:
        return None
    if reserved > FULL * float(row["device_mem_gb"] or "inf") * GIB:
        return None
    slack = reserved - peak
    try:
        case = case_of(row)
    except Skipped:
        return None
    terms = training_terms(case.architecture, case.workload, case.settings)
    if case.workload.method == "full" and case.workload.sharding.zero_stage == 3:
        always = sum(t.size_bytes for t in terms if t.phase == "always")
        return Point(slack / (peak - always), 0, "fsdp")
    logits = sum(t.size_bytes for t in terms if t.name == "logits")
    kind = "variable" if case.settings.variable_lengths else "fixed"
    return Point(slack / above, logits / above, kind) if above > 0 else None


def fitted(points: list[Point]) -> dict[str, float]:
    """The shares by their names."""
    fixed = [p for p in points if p.kind == "fixed"]
    everywhere = median(p.slack for p in fixed if p.logits < FEW)
    return {
        "SLACK": everywhere,
        "LOGITS_SLACK": median((p.slack - everywhere) / p.logits for p in fixed if p.logits >= FEW),
        "VARIABLE_SLACK": median(p.slack for p in points if p.kind == "variable"),
        "FSDP_SLACK": median(p.slack for p in points if p.kind == "fsdp"),
    }


def main(path: Path) -> int:
    """Print the shares."""
    points = [found for row in read_rows(path) if (found := point_of(row)) is not None]
    for name, share in fitted(points).items():
        print(f"{name} = {share:.2f}")
    print("#", Counter(point.kind for point in points))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
