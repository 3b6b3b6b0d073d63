"""A machine as the memory plan sees it: its pool, the device's limit, the budget within it."""

from dataclasses import dataclass
from typing import Literal

from uma.ledger import Verdict
from uma.workload import Backend

PoolKind = Literal["unified", "discrete", "host"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of one machine; ``None`` where nothing could tell.

    ``limit_bytes`` is what the device enforces and ``limit_source`` says where it was read;
    ``limit_high_bytes`` is above it when only a range is known (macOS version unknown).
    ``available_bytes`` is what other programs leave now.
    """

    name: str
    kind: PoolKind
    backend: Backend
    memory_bytes: int
    limit_bytes: int
    limit_source: str
    limit_high_bytes: int | None = None
    available_bytes: int | None = None
    max_buffer_bytes: int | None = None
    chip: str | None = None
    gpu_cores: int | None = None
    cpu: str | None = None
    os: str | None = None
    os_version: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """The two lines a peak is held against, and which rule drew the lower one."""

    limit_bytes: int
    budget_bytes: int
    winner: str
    user: bool = False


def verdict(peak_bytes: int, budget: Budget) -> Verdict:
    """``fits`` within the budget, ``tight`` within the limit, else ``exceeds``.

    A budget that the user set is a limit: above it is ``exceeds``.
    """
    if peak_bytes <= budget.budget_bytes:
        return "fits"
    if budget.user or peak_bytes > budget.limit_bytes:
        return "exceeds"
    return "tight"
