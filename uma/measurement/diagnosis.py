"""What is the matter with this machine's memory: findings with the figures that show them.

Each rule is a function of one snapshot, or of a row of them, that gives a finding or ``None``. A
figure that is unknown never makes a finding.
"""

import os
import re
from collections.abc import Callable, Sequence

from uma.measurement.change import growing_process, size_of, swapping
from uma.measurement.finding import Finding, said
from uma.measurement.snapshot import Snapshot
from uma.measurement.tree import ProcessTree, held_bytes
from uma.system.darwin import macos_major
from uma.units import GIB, MIB, format_gib

# Our judgment, on the side of silence.
_BUSY_PERCENT = 90
_IDLE_PERCENT = 5
_LOW_W = 5.0  # 3.2 W at "100 %" in ml-explore/mlx issue 3830
_LARGE_PART = 4  # a quarter of the memory is a lot for one program
_MODEL_SERVERS = re.compile(r"(?i)\b(?:mlx|llama|ollama|lm.?studio|vllm|omlx|exo\b)")


def diagnose(history: Sequence[Snapshot]) -> list[Finding]:
    """Findings of the last snapshot, and of what changed since the first, the worst first."""
    if not history:
        return []
    found = [rule(history[-1]) for rule in _RULES]
    found += [rule(history) for rule in _CHANGES]
    order = ("critical", "warning", "note")
    return sorted((f for f in found if f is not None), key=lambda f: order.index(f.severity))


def _number(snapshot: Snapshot, name: str) -> float | None:
    metric = snapshot.gpu.get(name) or snapshot.memory.get(name)
    return None if metric is None else metric.number


def under_pressure(snapshot: Snapshot) -> Finding | None:
    """The system itself says that memory is short."""
    metric = snapshot.memory.get("pressure")
    if metric is None or metric.value not in ("warning", "critical"):
        return None
    return Finding(
        "memory_pressure",
        "critical" if metric.value == "critical" else "warning",
        f"The system reports memory pressure: {metric.value}.",
        (f"{metric.source}: {metric.value}", said("swap used", size_of(snapshot, "swap_used"))),
        "End what holds most below, before anything new is loaded.",
    )


def not_wired(snapshot: Snapshot) -> Finding | None:
    """A model that the GPU needs is being compressed instead of wired: 40 to 150 times slower."""
    held = snapshot.gpu["allocated"].size
    wired, logical = size_of(snapshot, "wired"), size_of(snapshot, "compressed_logical")
    memory = snapshot.machine.memory_bytes
    if snapshot.machine.backend != "metal" or held is None or held < memory // _LARGE_PART:
        return None
    if wired is None or logical is None:
        return None
    if wired >= held // 2 or logical < max(GIB, held // 8) or wired_collector(snapshot):
        return None
    return Finding(
        "not_wired",
        "warning",
        "GPU memory is not wired, and memory is being compressed: generation will be many times "
        "slower than it could be.",
        (
            said("the GPU's allocations", held),
            said("wired memory of the machine", wired),
            said("compressed, as it was before", logical),
        ),
        "Run it with `uma run`, which wires a model, or under mlx_lm's wired_limit (macOS 15 or "
        "later); if it does not fit, take fewer bits or a shorter context.",
    )


def wired_collector(snapshot: Snapshot) -> Finding | None:
    """macOS 26 unwires GPU memory about a second after its last use; nothing is lost."""
    held = snapshot.gpu["allocated"].size
    busy, off = _number(snapshot, "utilization"), _number(snapshot, "wired_collector_off")
    major = macos_major(snapshot.machine.os_version)
    if snapshot.machine.backend != "metal" or (major or 0) < 26 or off != 0 or held is None:
        return None
    wired = size_of(snapshot, "wired")
    large = held >= snapshot.machine.memory_bytes // _LARGE_PART
    if not large or wired is None or wired >= held // 2:
        return None
    if busy is None or busy > _IDLE_PERCENT:
        return None
    return Finding(
        "wired_collector",
        "note",
        "The GPU is idle and macOS has unwired its memory, as macOS 26 does about a second after "
        "use. This is no leak and no loss; the next answer begins later.",
        (
            said("the GPU's allocations", held),
            said("wired memory of the machine", wired),
            f"GPU utilization: {busy:.0f} %",
            "iogpu.disable_wired_collector: 0",
        ),
        "Nothing is needed. `sudo sysctl iogpu.disable_wired_collector=1` stops it until the next "
        "start, but can make a small Mac hang.",
    )


def held_by_nobody(snapshot: Snapshot) -> Finding | None:
    """The GPU keeps memory of a process that is gone (ml-explore/mlx issue 3830)."""
    held, wired = snapshot.gpu["allocated"].size, size_of(snapshot, "wired")
    busy, watts = _number(snapshot, "utilization"), _number(snapshot, "power")
    if snapshot.machine.backend != "metal" or not _listed(snapshot):
        return None
    if held is None or wired is None:
        return None
    owned = sum(held_bytes(tree.metrics) for tree in snapshot.processes)
    nobody = min(held, wired) - owned
    if nobody < snapshot.machine.memory_bytes // _LARGE_PART:
        return None
    spinning = busy is not None and busy >= _BUSY_PERCENT and (watts is None or watts < _LOW_W)
    evidence = [
        said("the GPU's allocations", held),
        said("wired memory of the machine", wired),
        said("footprint of the listed processes", owned),
    ]
    if busy is not None:
        evidence.append(f"GPU utilization: {busy:.0f} %")
    if watts is not None:
        evidence.append(f"GPU power: {watts:.1f} W")
    return Finding(
        "held_by_nobody",
        "critical" if spinning else "warning",
        "The GPU holds memory that belongs to no process listed here"
        + (
            ", and is busy at little power: work of a process that was killed." if spinning else "."
        ),
        tuple(evidence),
        "If no other user runs a model, only a restart returns it. A process with "
        "MLX_METAL_FAST_SYNCH=1 that is killed can leave it so.",
    )


def gpu_was_reset(snapshot: Snapshot) -> Finding | None:
    """The GPU was restarted after errors."""
    count = _number(snapshot, "recoveries")
    if not count:
        return None
    return Finding(
        "gpu_reset",
        "warning",
        f"The GPU was reset {count:.0f} times since the machine started.",
        (f"recoveryCount: {count:.0f}",),
        "Look into the log of the program that ran then: a command took too long, or failed.",
    )


def others_hold_the_budget(snapshot: Snapshot) -> Finding | None:
    """Another program holds so much that a model no longer has the budget the limit allows."""
    available, machine = snapshot.machine.available_bytes, snapshot.machine
    others = [tree for tree in snapshot.processes if not _is_own(tree)]
    largest = max(others, key=lambda tree: held_bytes(tree.metrics), default=None)
    if (
        largest is None
        or not snapshot.whole
        or available is None
        or available >= machine.limit_bytes // 2
    ):
        return None
    held = held_bytes(largest.metrics)
    if held < machine.limit_bytes // _LARGE_PART:
        return None
    return Finding(
        "others_hold_the_budget",
        "warning",
        f"{largest.label} (process {largest.pid}) holds {format_gib(held)}: what it leaves is "
        "less than half of what this machine could give a model.",
        (
            said(f"process {largest.pid}", held),
            said("left to other programs", available),
            said(machine.limit_source, machine.limit_bytes),
        ),
        "End it, or unload its model, before another is loaded.",
    )


def several_models(snapshot: Snapshot) -> Finding | None:
    """Two programs with models at once: short of memory, and on some Macs a crash of the system."""
    found = [tree for tree in snapshot.processes if _serves_models(tree)]
    if len(found) < 2:
        return None
    rows = tuple(said(f"{tree.label} ({tree.pid})", held_bytes(tree.metrics)) for tree in found)
    return Finding(
        "several_models",
        "warning",
        f"{len(found)} programs hold models at the same time.",
        rows,
        "Unload one: two that use the GPU at once have brought down whole Macs "
        "(ml-explore/mlx issue 3186).",
    )


def _serves_models(tree: ProcessTree) -> bool:
    return bool(_MODEL_SERVERS.search(tree.label)) and held_bytes(tree.metrics) >= GIB


def override_ignored(snapshot: Snapshot) -> Finding | None:
    """The limit somebody set is not the one in force."""
    machine, seen = snapshot.machine, snapshot.mlx["working_set"].size
    note = next((n for n in machine.notes if "wired_limit" in n), None)
    if note is None and seen not in (None, machine.limit_bytes):
        note = f"MLX in this process works with {format_gib(seen or 0)}"
    if note is None:
        return None
    return Finding(
        "limit_override_ignored",
        "warning",
        "The GPU limit that somebody set is not in force.",
        (
            note,
            said(f"in force, by {snapshot.machine.limit_source}", snapshot.machine.limit_bytes),
        ),
        "A program sees a new limit only when it starts: start it again. The value counts in MiB.",
    )


def beyond_mlx(snapshot: Snapshot) -> Finding | None:
    """The process holds much more than MLX knows of."""
    active, pool = (snapshot.mlx[name].size for name in ("active", "pool"))
    own = next((t for t in snapshot.processes if _is_own(t)), None)
    if active is None or pool is None or own is None:
        return None
    footprint = own.metrics["footprint"].size
    if footprint is None or footprint - active - pool < max(512 * MIB, footprint // 10):
        return None
    return Finding(
        "beyond_mlx",
        "note",
        f"This process holds {format_gib(footprint - active - pool)} that MLX does not count.",
        (
            said("footprint", footprint),
            said("MLX active", active),
            said("MLX buffer pool", pool),
        ),
        "The system judges by the footprint: hold that against the limit, not MLX's peak.",
    )


def _is_own(tree: ProcessTree) -> bool:
    return tree.pid == os.getpid()


def _listed(snapshot: Snapshot) -> bool:
    """Whether the processes that hold most are there, and not just those asked for."""
    return snapshot.whole and bool(snapshot.processes)


def misleading_resident(snapshot: Snapshot) -> Finding | None:
    """A process whose resident size hides most of what it holds (Metal's buffers)."""
    for tree in snapshot.processes:
        footprint, resident = tree.metrics["footprint"].size, tree.metrics["resident"].size
        if footprint is not None and resident is not None and footprint > GIB + 2 * resident:
            return Finding(
                "misleading_resident",
                "note",
                f"The resident size of {tree.label} ({tree.pid}) shows "
                f"{format_gib(resident)} of the {format_gib(footprint)} it holds.",
                (said("footprint", footprint), said("resident (RSS)", resident)),
                "Judge it by the footprint: Metal's buffers and compressed memory are not in RSS.",
            )
    return None


_RULES: tuple[Callable[[Snapshot], Finding | None], ...] = (
    under_pressure,
    not_wired,
    held_by_nobody,
    gpu_was_reset,
    others_hold_the_budget,
    several_models,
    override_ignored,
    wired_collector,
    beyond_mlx,
    misleading_resident,
)
_CHANGES: tuple[Callable[[Sequence[Snapshot]], Finding | None], ...] = (swapping, growing_process)
