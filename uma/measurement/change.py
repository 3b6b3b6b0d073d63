"""What changed between moments: swapping, growth, memory that stays after a model is gone."""

import signal
from collections.abc import Sequence

from uma.machine import Machine
from uma.measurement.finding import Finding, said
from uma.measurement.growth import growth
from uma.measurement.snapshot import Snapshot
from uma.measurement.tree import held_bytes
from uma.units import GIB, MIB, format_gib

_PICKED = 60  # of a long history, as many looks as a slope needs
_RECENT = 30  # looks within which swapping is "at the moment"
_PAGES = 256  # fewer are not worth a word
_SWAP_USED = GIB  # below it what was swapped out some time ago is not worth a word


def size_of(snapshot: Snapshot, name: str) -> int | None:
    """Bytes of a kind of memory, or ``None``."""
    metric = snapshot.memory.get(name)
    return None if metric is None else metric.size


def swapping(history: Sequence[Snapshot]) -> Finding | None:
    """Memory goes to the disk and back at the moment, or a lot of it is there."""
    recent = list(history)[-_RECENT:]
    first, last = recent[0], recent[-1]
    moved = {
        name: now - before
        for name in ("swapins", "swapouts")
        if (now := _count(last, name)) is not None and (before := _count(first, name)) is not None
    }
    used, before_used = size_of(last, "swap_used"), size_of(first, "swap_used")
    grown = (used or 0) - (before_used or 0)
    active = max(moved.values(), default=0) >= _PAGES
    if not active and ((used or 0) < _SWAP_USED or len(history) > 1):
        return None
    evidence = [said("swap used", used)]
    if active:
        seconds = last.seconds - first.seconds
        evidence += [f"{name} in {seconds:.0f} s: {count:,}" for name, count in moved.items()]
    if grown > 0:
        evidence.append(said("swap grew by", grown))
    return Finding(
        "swapping",
        "critical" if grown > 0 else "warning" if active else "note",
        "Memory is being swapped." if active else "Memory was swapped out, now or earlier.",
        tuple(evidence),
        "Free memory before a model is loaded: one that is partly on the disk answers at the "
        "disk's speed.",
    )


def _count(snapshot: Snapshot, name: str) -> int | None:
    metric = snapshot.memory.get(name)
    return metric.value if metric is not None and isinstance(metric.value, int) else None


def growing_process(history: Sequence[Snapshot]) -> Finding | None:
    """A process that holds more and more."""
    picked = list(history)[:: max(1, len(history) // _PICKED)]
    looks = [(s.seconds, {t.pid: held_bytes(t.metrics) for t in s.processes}) for s in picked]
    machine = history[-1].machine
    found = (
        growing(
            f"{tree.label} ({tree.pid})",
            [(seconds, held[tree.pid]) for seconds, held in looks if tree.pid in held],
            machine,
        )
        for tree in history[-1].processes
    )
    return next((finding for finding in found if finding is not None), None)


def growing(name: str, samples: Sequence[tuple[float, int]], machine: Machine) -> Finding | None:
    """Whether what is called ``name`` grows, by samples of seconds and bytes."""
    found = growth(samples)
    if found is None or not found.sure:
        return None
    rate = f"{format_gib(found.bytes_per_minute)} a minute"
    return Finding(
        "levels_off" if found.levels_off else "grows",
        "note" if found.levels_off else "warning",
        f"{name} grows {rate} over {found.seconds:.0f} s"
        + (", and is levelling off." if found.levels_off else "."),
        (
            said("at first", samples[0][1]),
            said("now", samples[-1][1]),
            f"slope: {rate}, give or take {format_gib(round(found.error_bytes_per_s * 60))}",
        ),
        "From outside, MLX's buffer pool and a leak look alike; the pool stops at its limit, which "
        f"is {format_gib(default_pool_bytes(machine))} here unless mlx.core.set_cache_limit set "
        "another.",
    )


def default_pool_bytes(machine: Machine) -> int:
    """MLX's limit of its pool where nobody set one: on Metal its memory limit, else 32 MiB.

    Source: mlx 846d176, ``mlx/backend/metal/allocator.cpp`` and ``no_gpu/allocator.cpp``.
    """
    if machine.backend != "metal":
        return 32 * MIB
    return min(machine.limit_bytes * 3 // 2, machine.memory_bytes * 95 // 100)


def growing_pool(samples: Sequence[tuple[float, int, int]], cache_limit: int) -> Finding | None:
    """Whether growth is MLX's pool, which stops, or active memory, which does not.

    ``samples`` are seconds, active and pool bytes of one process.
    """
    active = growth([(seconds, held) for seconds, held, _ in samples])
    pool = growth([(seconds, held) for seconds, _, held in samples])
    if active is not None and active.sure and not active.levels_off:
        return Finding(
            "active_grows",
            "warning",
            f"Active memory grows {format_gib(active.bytes_per_minute)} a minute: arrays are "
            "being kept.",
            (said("active at first", samples[0][1]), said("active now", samples[-1][1])),
            "Look for arrays that a list, a cache or an unevaluated graph keeps alive.",
        )
    if pool is None or not pool.sure:
        return None
    return Finding(
        "pool_grows",
        "note",
        f"MLX's buffer pool grows {format_gib(pool.bytes_per_minute)} a minute: cache, no leak; "
        f"it will stop at {format_gib(cache_limit)}.",
        (
            said("pool at first", samples[0][2]),
            said("pool now", samples[-1][2]),
            said("active now", samples[-1][1]),
        ),
        "mlx.core.set_cache_limit bounds it, mlx.core.clear_cache empties it.",
    )


def kept_after_unload(before: Snapshot, after: Snapshot, freed_bytes: int) -> Finding | None:
    """Memory that stays wired after a model of ``freed_bytes`` was let go.

    llama.cpp issue 25937: a residency set that was never used is not dropped.
    """
    first, last = size_of(before, "wired"), size_of(after, "wired")
    if first is None or last is None or last - first < max(512 * MIB, freed_bytes // 2):
        return None
    return Finding(
        "kept_after_unload",
        "warning",
        f"{format_gib(last - first)} stay wired although the model was unloaded.",
        (
            said("wired before it was loaded", first),
            said("wired after it was unloaded", last),
        ),
        "End the process: what it wired goes with it.",
    )


def ended_by_signal(code: int, lowest: int | None, grown_swap: int) -> Finding | None:
    """A command that a signal ended; ``code`` is negative then, as in ``subprocess``.

    ``lowest`` is the least memory that was reclaimable meanwhile, ``grown_swap`` what the swap
    grew by.
    """
    if code >= 0:
        return None
    name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
    short = (lowest is not None and lowest < GIB) or grown_swap >= GIB
    remedies = {
        "SIGKILL": "The system ends a process so when memory runs out, and so does kill -9.",
        "SIGABRT": "Give the last lines it printed to uma measure --explain: MLX aborts where the "
        "GPU fails.",
    }
    return Finding(
        "ended_by_signal",
        "critical" if short else "note",
        f"{name} ended the command" + (", when memory was short." if short else "."),
        (said("least that was reclaimable", lowest), said("swap grew by", grown_swap)),
        remedies.get(name, "Look at what it printed last."),
    )
