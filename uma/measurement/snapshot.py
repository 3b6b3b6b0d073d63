"""Everything that can be read of this machine at one moment."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from uma.machine import Budget, Machine, budget_of, read_machine
from uma.measurement.dram import read_gpu_power, read_traffic
from uma.measurement.gpu import read_gpu, with_profiler
from uma.measurement.memory import read_memory
from uma.measurement.metric import Metric, measured
from uma.measurement.tree import ProcessTree, read_largest, read_processes, read_trees

Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class MlxCounters:
    """What MLX says of this process, in bytes, and its limits where they are known.

    ``peak`` is of active memory alone; ``pool`` (``mlx.core.get_cache_memory``) holds buffers
    that were freed and wait to be used again.
    """

    active: int
    peak: int
    pool: int
    cache_limit: int | None = None
    working_set: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment: ``seconds`` on a clock that only runs forward, all else by name.

    ``traffic`` of the memory is read on a page only, since a rate takes time. ``whole`` if
    ``processes`` are the largest of the machine, and not those asked for; not ``listed`` if none
    were wanted.
    """

    seconds: float
    machine: Machine
    budget: Budget
    memory: Metrics
    gpu: Metrics
    processes: tuple[ProcessTree, ...] = ()
    mlx: Metrics = field(default_factory=dict)
    traffic: Metrics = field(default_factory=dict)
    whole: bool = True
    listed: bool = True


def read_snapshot(
    pids: Sequence[int] = (),
    names: Sequence[str] = (),
    *,
    largest: int = 10,
    counters: MlxCounters | None = None,
    machine: Machine | None = None,
    missing_ok: bool = False,
    exact: bool = True,
) -> Snapshot:
    """This machine now, with the processes asked for and their trees, else the largest.

    The largest are looked into only if ``exact``; those asked for always are.

    ``machine`` saves asking for what does not change; what is free now is read anew.

    Raises:
        UsageError: If there is no such process, and that is not ``missing_ok``.
    """
    memory = read_memory()
    here = read_machine() if machine is None else _as_it_is_now(machine, memory)
    processes = read_processes() if pids or names or largest else []
    asked = bool(pids or names)
    trees = (
        read_trees(processes, pids, names, missing_ok=missing_ok)
        if asked
        else read_largest(processes, largest, exact=exact)
    )
    return Snapshot(
        seconds=time.monotonic(),
        machine=here,
        budget=budget_of(here),
        memory=memory,
        gpu=read_gpu(here),
        processes=tuple(trees),
        mlx=mlx_metrics(counters),
        whole=not asked,
        listed=asked or largest > 0,
    )


def _as_it_is_now(machine: Machine, memory: Metrics) -> Machine:
    """``machine`` with what other programs leave now, inside the control group if there is one."""
    left = [memory["reclaimable"].size]
    if "group_limit" in memory:
        limit, used = memory["group_limit"].size, memory["group_used"].size
        left.append(max(0, (limit or 0) - (used or 0)))
    return replace(machine, available_bytes=min((x for x in left if x is not None), default=None))


def with_rates(snapshot: Snapshot) -> Snapshot:
    """``snapshot`` with what takes its time: rates are half a second each, on a Mac only."""
    gpu = snapshot.gpu
    if snapshot.machine.backend == "metal":
        gpu = gpu | {"power": read_gpu_power(), "cores": with_profiler(gpu["cores"])}
    return replace(snapshot, gpu=gpu, traffic=read_traffic())


def mlx_metrics(counters: MlxCounters | None) -> Metrics:
    """MLX's counters of this process as metrics."""
    missing = "MLX is not loaded in this process, and no other process's counters can be read"

    def of(name: str, source: str) -> Metric:
        return measured(getattr(counters, name, None), source, missing)

    return {
        "active": of("active", "mlx.core.get_active_memory"),
        "peak": of("peak", "mlx.core.get_peak_memory: active memory alone"),
        "pool": of("pool", "mlx.core.get_cache_memory"),
        "working_set": of("working_set", "mlx.core.device_info"),
    }
