"""Whether a training fits: freed blocks that an allocator holds are no reason to fail."""

from collections.abc import Iterable, Iterator

from uma.ledger import Verdict, peak
from uma.machine import verdict
from uma.memory.term import MemoryTerm
from uma.plan.training.case import TrainingCase


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
