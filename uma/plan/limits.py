"""What MLX is told before a run: how much to wire, to keep in its pool, and to hold at once.

Decisions only, from sizes; ``uma.runtime`` sets them and restores what was there.
"""

from collections.abc import Iterable

from uma.frozen import dataclass
from uma.ledger import phase_totals
from uma.machine import Budget, Machine, default_reserve_bytes
from uma.memory.term import MemoryTerm, Phase
from uma.units import GIB, MIB, format_gib


@dataclass(frozen=True, slots=True)
class Limits:
    """Arguments of MLX's three setters; a wired limit of ``None`` is left alone."""

    wired_limit_bytes: int | None
    cache_limit_bytes: int
    memory_limit_bytes: int
    notes: tuple[str, ...] = ()


def mlx_limits(
    predicted_peak_bytes: int,
    weights_bytes: int,
    budget: Budget,
    machine: Machine,
    *,
    wire: bool = True,
    largest_output_bytes: int = 0,
) -> Limits:
    """Limits that keep a run at its predicted peak.

    ``predicted_peak_bytes`` is what MLX holds in arrays, the pool not counted.
    MLX compares active memory with the memory limit after allocating an operation's output
    (mlx 0.32.4, ``transforms.cpp``, ``eval_impl``), so the limit can be passed by one output.
    Where the budget has no room for that, the limit lies lower by the largest one. It is never
    below the weights, where each operation would wait. Answers have limits by phase
    (``phase_limits_bytes``).
    """
    wired: int | None = None
    notes: tuple[str, ...] = ()
    if wire and machine.backend == "metal":
        wired, notes = _wired_limit(predicted_peak_bytes, budget, machine)
    pool = cache_limit_bytes(predicted_peak_bytes, budget, machine)
    held = predicted_peak_bytes
    if held + largest_output_bytes + pool + machine.overhead_bytes > budget.budget_bytes:
        held -= largest_output_bytes
    held = min(held, budget.limit_bytes)
    return Limits(
        wired_limit_bytes=wired,
        cache_limit_bytes=pool,
        memory_limit_bytes=max(weights_bytes, held),
        notes=notes,
    )


def phase_limits_bytes(
    terms: Iterable[MemoryTerm], limits: Limits, machine: Machine, largest_output_bytes: int
) -> dict[Phase, int]:
    """The memory limit of prefill and of decode that keeps each at its own predicted total.

    MLX lets the processor run up to ten tasks of ten dispatches ahead of their frees while active
    memory is below the limit (mlx 0.32.4, ``transforms.cpp``, ``MAX_ACTIVE_TASKS``), so a phase
    fills whatever the larger one was promised, and then one more output. Prefill's limit lies
    lower by the largest output. Decode's outputs are small, and its two steps in flight are part
    of its terms. On Metal, where the terms include what runs ahead, ``limits`` hold as they are.

    SmolLM2-135M in float32, 800 tokens on two cores: 0.0 % above the prediction instead of 1.2 %,
    in 0 to 19 % more time; waiting for every operation took 2 to 3 times as long.
    """
    most = limits.memory_limit_bytes
    if machine.backend == "metal":
        return {"prefill": most, "decode": most}
    held = [term for term in terms if term.name not in ("buffer_pool", "runtime_context")]
    least = sum(term.size_bytes for term in held if term.name == "weights")
    totals = phase_totals(held)
    decode = totals.get("decode", most)
    prefill = totals.get("prefill", decode) - largest_output_bytes
    return {"prefill": max(least, min(prefill, most)), "decode": max(least, min(decode, most))}


def cache_limit_bytes(peak_bytes: int, budget: Budget, machine: Machine) -> int:
    """Bytes of freed buffers that MLX may keep for reuse.

    On the processor 1/32 of the peak, from 8 to 32 MiB (MLX's own default there); on Metal, where
    MLX's default is the whole memory limit, 1/8 of it and at least 64 MiB. Never more than the
    budget leaves above the peak, so that the two together stay within it; a run that is above
    its budget already gets the smallest pool.
    """
    smallest = 8 * MIB
    if machine.backend == "metal":
        wanted = max(peak_bytes // 8, 64 * MIB)
    else:
        wanted = min(max(peak_bytes // 32, smallest), 32 * MIB)
    headroom = budget.budget_bytes - peak_bytes - machine.overhead_bytes
    return min(wanted, headroom) if headroom >= 0 else smallest


def _wired_limit(
    peak_bytes: int, budget: Budget, machine: Machine
) -> tuple[int | None, tuple[str, ...]]:
    """Bytes that macOS must keep resident: what the run needs and an eighth, if there is room.

    Unwired, large models decode 40 to 150 times slower (vmlx-swift issue 418): where not
    everything can be wired, the most that can is. At 16 GiB and below it is all or nothing.
    """
    from uma.system.darwin import macos_major

    major = macos_major(machine.os_version)
    if major is not None and major < 15:
        return None, (f"macOS {machine.os_version} cannot keep a model wired; macOS 15 can",)
    reserve = _reserve_bytes(budget, machine)
    room = machine.memory_bytes - reserve
    ceilings = [
        (machine.limit_bytes, "device ceiling"),
        (room, f"leaves {format_gib(reserve)} to the system"),
    ]
    if budget.user_bytes is not None:
        ceilings.append((budget.user_bytes, "your budget"))
    ceiling, reason = min(ceilings)
    if peak_bytes <= ceiling:
        return min(peak_bytes + peak_bytes // 8, ceiling), ()
    if room < peak_bytes and machine.memory_bytes <= 16 * GIB:
        return None, (
            f"not wired: {format_gib(peak_bytes)} would leave less than {format_gib(reserve)} "
            f"of {format_gib(machine.memory_bytes)} to the system; expect slower answers",
        )
    return ceiling, (
        f"wired limit: requested {format_gib(peak_bytes)}, using {format_gib(ceiling)} ({reason})",
    )


def wired_limit_advice(
    needed_bytes: int, machine: Machine, *, reserve_bytes: int | None = None
) -> str | None:
    """How to raise the GPU limit just enough, for a person to run; ``None`` if that is no help.

    The value is the smallest whole number of MiB that holds ``needed_bytes``. It is withheld,
    and the reason told, when it would take from the system's reserve.
    """
    if machine.backend != "metal":
        return None
    limit = machine.limit_high_bytes or machine.limit_bytes
    if needed_bytes <= limit or needed_bytes > machine.memory_bytes:
        return None
    reserve = default_reserve_bytes(machine) if reserve_bytes is None else reserve_bytes
    value = smallest_wired_limit_mb(needed_bytes)
    left = machine.memory_bytes - value * MIB
    if left < reserve:
        return (
            f"Raising the GPU limit is not advised: {format_gib(needed_bytes)} would leave "
            f"{format_gib(left)} of {format_gib(machine.memory_bytes)} to the system, "
            f"which needs {format_gib(reserve)}."
        )
    return (
        f"sudo sysctl iogpu.wired_limit_mb={value}\n"
        f"  raises the GPU limit from {format_gib(limit)} to {format_gib(value * MIB)} until the "
        f"next restart and leaves {format_gib(left)} to the system.\n"
        "  To keep it, run the same command at start from a LaunchDaemon "
        "(/Library/LaunchDaemons); recent macOS ignores /etc/sysctl.conf.\n"
        "  To undo it: sudo sysctl iogpu.wired_limit_mb=0"
    )


def smallest_wired_limit_mb(needed_bytes: int) -> int:
    """The smallest value of ``iogpu.wired_limit_mb``, in MiB, whose limit holds ``needed_bytes``.

    >>> smallest_wired_limit_mb(100 * MIB), smallest_wired_limit_mb(100 * MIB + 1)
    (100, 101)
    """
    return -(-needed_bytes // MIB)


def _reserve_bytes(budget: Budget, machine: Machine) -> int:
    own = budget.reserve_bytes
    return default_reserve_bytes(machine) if own is None else own
