"""What a training needs, and whether it fits: freed blocks that are held are no reason to fail."""

from collections.abc import Iterable, Iterator
from typing import Any

from uma.ledger import Verdict, peak
from uma.machine import verdict
from uma.memory.term import MemoryTerm
from uma.plan.training.case import TrainingCase, in_short_rows
from uma.plan.training.places import on_host


class Needs:
    """What one device needs in variants of one case, each computed once."""

    def __init__(self) -> None:
        self._found: dict[Any, int] = {}

    def __call__(self, case: TrainingCase, computed_bytes: int | None = None) -> int:
        """With what is meant for a host and stays; the case's own are computed unless given."""
        key = _differing(case)
        if key not in self._found:
            own = case.needed_bytes() if computed_bytes is None else computed_bytes
            self._found[key] = own + on_host(case).stays_bytes
        return self._found[key]

    def fits(self, case: TrainingCase) -> bool:
        """Within the budget and on the host; whole weights, and the host, cost nothing to see."""
        weights, sharded = case.weights, case.workload.sharding.zero_stage == 3
        if weights is not None and not sharded and weights.size_bytes > case.budget_bytes:
            return False
        return not on_host(case).excess_bytes and self(case) <= case.budget_bytes


def _differing(case: TrainingCase) -> Any:
    """What the variants of one case differ in."""
    own, workload = case.trainer == "uma", case.workload
    asked = in_short_rows(workload, case.architecture) if own else workload
    return asked, case.weights, case.stack, case.trainer


def least_bytes(terms: Iterable[MemoryTerm]) -> int:
    """What a device must hold at the worst moment, without the pool of freed blocks.

    torch gives cached blocks back and tries again before it is out of memory (torch 2.13,
    ``c10/cuda/CUDACachingAllocator.cpp``, ``malloc``: ``release_cached_blocks``).
    """
    return peak(term for term in terms if term.name != "buffer_pool")[1]


def training_verdict(case: TrainingCase, needed: int, least: int) -> Verdict:
    """``fits`` with the pool within the budget, ``exceeds`` where even ``least`` has no room.

    ``needed`` and ``least`` are bytes of one device, with and without the pool.
    """
    if least > case.room_bytes:
        return "exceeds"
    found = verdict(needed * case.machine_devices, case.budget)
    return "tight" if found == "exceeds" else found


def pool_note(case: TrainingCase, needed: int, least: int) -> Iterator[str]:
    """That only the pool has no room, where that is so."""
    if least <= case.room_bytes < needed:
        yield (
            "torch's pool of freed blocks has no room, which costs time: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it small"
        )
