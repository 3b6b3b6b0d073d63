"""A machine as the memory plan sees it: its pools, the device's limit, the budget within it."""

from typing import TYPE_CHECKING, Literal

from uma.errors import UsageError
from uma.frozen import dataclass
from uma.ledger import Verdict
from uma.units import GIB, format_gib
from uma.workload import Backend

if TYPE_CHECKING:
    from uma.machine.calibration import Calibration
    from uma.memory.term import MemoryTerm

PoolKind = Literal["unified", "discrete", "host"]


@dataclass(frozen=True, slots=True)
class Device:
    """A card with memory of its own: what its driver reports, and what of it is free now.

    ``flops_per_s`` is dense, in 16 bits, accumulated in float32.
    """

    name: str
    memory_bytes: int
    available_bytes: int | None = None
    bandwidth_bytes_per_s: int | None = None
    flops_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of one machine; ``None`` where nothing could tell.

    ``limit_bytes`` is what the device enforces and ``limit_source`` says where it was read;
    ``limit_high_bytes`` is above it when only a range is known (macOS version unknown).
    ``available_bytes`` is what other programs leave now. ``name`` is never the host's name.
    ``backend`` is the one MLX would use.

    A ``discrete`` machine has ``devices``, whose memory is ``memory_bytes`` together, and a second
    pool, the host's, behind a link of ``link_bytes_per_s`` in one direction: so has GH200, whose
    tiers share their addresses but not their speed.

    ``calibration`` is what ``uma doctor`` measured, if this is the machine that it ran on.
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
    devices: tuple[Device, ...] = ()
    host_memory_bytes: int | None = None
    host_available_bytes: int | None = None
    link_bytes_per_s: int | None = None
    bandwidth_bytes_per_s: int | None = None
    flops_per_s: int | None = None
    price_usd: int | None = None
    calibration: "Calibration | None" = None

    @property
    def host_room_bytes(self) -> int:
        """What the host leaves to a model: all but a sixteenth, at least 1 GiB, for the system."""
        if self.host_available_bytes is not None:
            return self.host_available_bytes
        memory = self.host_memory_bytes or 0
        return max(0, memory - max(GIB, memory // 16))

    @property
    def overhead(self) -> "tuple[MemoryTerm, ...]":
        """What a process holds beside MLX's counters here, if that was measured."""
        return () if self.calibration is None else self.calibration.terms

    @property
    def overhead_bytes(self) -> int:
        return sum(term.size_bytes for term in self.overhead)


@dataclass(frozen=True, slots=True)
class Budget:
    """The two lines a peak is held against, and which rule drew the lower one.

    ``lines`` are all rules and their bytes, the winner among them. ``user`` says that the user's
    own budget is the lowest; ``user_bytes`` is that budget, the lowest or not. Where the device's
    limit is a range, ``limit_bytes`` is its upper end: refusal needs certainty.
    """

    limit_bytes: int
    budget_bytes: int
    winner: str
    user: bool = False
    user_bytes: int | None = None
    reserve_bytes: int | None = None
    lines: tuple[tuple[str, int], ...] = ()

    @property
    def ceiling_bytes(self) -> int:
        """What nothing may pass: the device's limit, or the user's own budget below it."""
        return min(self.limit_bytes, self.user_bytes or self.limit_bytes)


def verdict(peak_bytes: int, budget: Budget) -> Verdict:
    """``fits`` within the budget, ``tight`` within the limit, else ``exceeds``.

    A budget that the user set is a limit: above it is ``exceeds``.
    """
    if peak_bytes <= budget.budget_bytes:
        return "fits"
    over_own = budget.user_bytes is not None and peak_bytes > budget.user_bytes
    if budget.user or over_own or peak_bytes > budget.limit_bytes:
        return "exceeds"
    return "tight"


def default_reserve_bytes(machine: Machine) -> int:
    """Memory kept for the system and other programs when nobody says otherwise.

    On a Mac half of the memory, at most 8 GiB, and an eighth from 64 GiB on. 16 GiB Macs froze
    with 10.6 GB wired, and another project's remedy was to leave 8 GB (vmlx-swift pull request
    421); 128 GiB Macs crashed with 125 GB in use (omlx issue 3065). Between the two it is our
    judgment, and taken for other machines of one memory too. On a card 1 GiB, at most an eighth,
    as llama.cpp leaves (common/common.h, ``fit_params_target``). Elsewhere, where nothing is wired
    and the limit is all the memory there is, a quarter, at most 1 GiB, and a sixteenth from 16 GiB
    on.
    """
    if machine.kind == "unified":
        return max(min(machine.memory_bytes // 2, 8 * GIB), machine.memory_bytes // 8)
    if machine.kind == "discrete":
        return min(max(1, len(machine.devices)) * GIB, machine.limit_bytes // 8)
    return max(min(machine.limit_bytes // 4, GIB), machine.limit_bytes // 16)


def budget_of(
    machine: Machine, *, user_budget_bytes: int | None = None, reserve_bytes: int | None = None
) -> Budget:
    """The smallest of the device's limit, what the reserve leaves, what others leave, the user's.

    The reserve stands for the system and the usual programs; when those hold more than it, what
    they leave counts, less 1/32 of the memory (at most 1 GiB) so that nothing is paged out at
    the first allocation.

    Raises:
        UsageError: If the user's budget is not positive, or the reserve leaves nothing.
    """
    if user_budget_bytes is not None and user_budget_bytes <= 0:
        raise UsageError(f"a budget of {user_budget_bytes} bytes leaves no room for a model")
    reserve = default_reserve_bytes(machine) if reserve_bytes is None else reserve_bytes
    pool = machine.memory_bytes if machine.kind == "unified" else machine.limit_bytes
    if not 0 <= reserve < pool:
        raise UsageError(
            f"a reserve of {format_gib(reserve)} does not leave anything of the "
            f"{format_gib(pool)} of memory; give a smaller one"
        )
    lines = [
        (f"limit: {machine.limit_source}", machine.limit_bytes),
        (f"memory less a reserve of {format_gib(reserve)} for the system", pool - reserve),
    ]
    if machine.available_bytes is not None:
        left = machine.available_bytes - min(pool // 32, GIB)
        lines.append(("memory that other programs leave now", max(0, left)))
    if user_budget_bytes is not None:
        lines.append(("your budget", user_budget_bytes))
    winner, budget = min(lines, key=lambda line: line[1])
    return Budget(
        limit_bytes=machine.limit_high_bytes or machine.limit_bytes,
        budget_bytes=budget,
        winner=winner,
        user=winner == "your budget",
        user_bytes=user_budget_bytes,
        reserve_bytes=reserve,
        lines=tuple(lines),
    )
