#!/usr/bin/env python3
"""Fit the torch engine's shares of allocator slack to the rows that measured both counts.

Usage: fit_training.py FILE.csv

A row counts if it has the peak that torch allocated, the state that it kept, and what nvidia-smi or
the allocator showed at the peak, which is below ``FULL`` of the card: a pool that the card's end
cut off is smaller than torch would have it. Slack is a share of what is allocated above the state,
and one of the logits that we predict (medians, the first of rows with few logits). Where batches
differ in length that second one is another: the median over programs, of which some have only what
was reserved, and of these we predict what is allocated. In full training under FSDP it is a share
of all above weights and optimizer states. Runs bound by the update are no exception: states are no
part of what slack is a share of, and what their backward pass freed is still held. The shares go
into ``uma/engines/torch_training.py``: ``SLACK``, ``LOGITS_SLACK``, ``VARIABLE_SLACK`` and
``FSDP_SLACK``.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scoring.rows import Row, Skipped, decimal, read_rows  # noqa: E402
from scoring.training import case_of  # noqa: E402
from scoring.training_models import Case  # noqa: E402

from uma.engines.cuda import CUDA_CONTEXT  # noqa: E402
from uma.engines.torch_training import training_terms  # noqa: E402
from uma.errors import UsageError  # noqa: E402
from uma.ledger import peak as peak_of  # noqa: E402
from uma.units import GIB, MIB  # noqa: E402

FEW = 0.2  # logits over what is above the state
FULL = 0.92  # of the card's memory


@dataclass(frozen=True, slots=True)
class Point:
    """Slack and predicted logits of a row over what is above the state; what kind of run it was."""

    slack: float
    logits: float
    kind: str
    program: str


def point_of(row: Row) -> Point | None:
    """What a row says; ``None`` if it lacks a count, or tells nothing of the allocator."""
    try:
        case = case_of(row)
    except (Skipped, UsageError):
        return None
    if row["outcome"] != "ok" or case.weights is not None:
        return None
    terms = training_terms(case.architecture, case.workload, case.settings)
    always = sum(t.size_bytes for t in terms if t.phase == "always")
    full, sharded = case.workload.method == "full", case.workload.sharding.zero_stage == 3
    varies = case.settings.variable_lengths and not full
    counts = _counted(row) or (_shown(row, case) if varies else None)
    if counts is None or counts[2] > FULL * float(row["device_mem_gb"] or "inf") * GIB:
        return None
    peak, above, reserved = counts
    program = row["framework"].split()[0]
    if full and sharded:
        return Point((reserved - peak) / (peak - always), 0, "fsdp", program)
    logits = sum(t.size_bytes for t in terms if t.name == "logits")
    if above <= 0 or (case.settings.variable_lengths and (full or not logits)):
        return None
    kind = "variable" if varies else "fixed"
    return Point((reserved - peak) / above, logits / above, kind, program)


def _counted(row: Row) -> tuple[int, int, int] | None:
    """The peak that torch allocated, what of it is above the state, and what it reserved."""
    if row["mem_kind"] != "torch_allocated" or not row["peak_mem_bytes"]:
        return None
    notes, peak = row["notes"], int(float(row["peak_mem_bytes"]))
    state = re.search(r"retained after train (\d+) B", notes)
    shown = re.search(r"nvidia-smi peak \(mean over GPUs\) (\d+)[.\d]* MiB", notes)
    if state and shown:
        return peak, peak - int(state[1]), int(shown[1]) * MIB - CUDA_CONTEXT
    loaded = re.search(r'"after_load_allocated_mib": ([\d.]+)', notes)
    held = re.search(r'"peak_reserved_mib": ([\d.]+)', notes)
    if loaded and held:
        return peak, peak - round(float(loaded[1]) * MIB), round(float(held[1]) * MIB)
    return None


def _shown(row: Row, case: Case) -> tuple[int, int, int] | None:
    """The same of a row that has only what was reserved: what we predict to be allocated."""
    told = row["is_training_peak"] == "yes" and row["seq_len"] and decimal(row["peak_mem_bytes"])
    if not told or case.bound or case.settings.empties_cache:
        return None
    workload = replace(case.workload, mem_kind="allocated")
    terms = training_terms(case.architecture, workload, case.settings)
    allocated = peak_of(terms)[1]
    if case.workload.mem_kind == "allocated" or "load" in peak_of(terms)[0]:
        return None
    always = sum(t.size_bytes for t in terms if t.phase == "always")
    context = CUDA_CONTEXT if case.workload.mem_kind == "device" else 0
    return allocated, allocated - always, round(decimal(row["peak_mem_bytes"])) - context


def fitted(points: list[Point]) -> dict[str, float]:
    """The shares by their names; of batches that differ in length each program counts once."""
    fixed = [p for p in points if p.kind == "fixed"]
    everywhere = median(p.slack for p in fixed if p.logits < FEW)
    with_logits = [p for p in fixed if p.logits >= FEW]
    return {
        "SLACK": everywhere,
        "LOGITS_SLACK": _of_logits(with_logits, everywhere),
        "VARIABLE_SLACK": median(by_program(points, everywhere).values()),
        "FSDP_SLACK": median(p.slack for p in points if p.kind == "fsdp"),
    }


def by_program(points: list[Point], everywhere: float) -> dict[str, float]:
    """What each program alone says of ``VARIABLE_SLACK``."""
    varied = [p for p in points if p.kind == "variable"]
    programs = sorted({p.program for p in varied})
    return {
        name: _of_logits([p for p in varied if p.program == name], everywhere) for name in programs
    }


def _of_logits(points: list[Point], everywhere: float) -> float:
    return median((p.slack - everywhere) / p.logits for p in points)


def main(path: Path) -> int:
    """Print the shares, and the one of batches that differ without one program each."""
    points = [found for row in read_rows(path) if (found := point_of(row)) is not None]
    shares = fitted(points)
    for name, share in shares.items():
        print(f"{name} = {share:.2f}")
    programs = by_program(points, shares["SLACK"])
    for name, share in programs.items():
        rest = median(other for key, other in programs.items() if key != name)
        print(f"# {name}: {share:.2f}, without it {rest:.2f}")
    print("#", Counter(point.kind for point in points))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
