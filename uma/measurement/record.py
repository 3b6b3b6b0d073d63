"""A measurement of any code: what it held at most, and what changed meanwhile."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from uma.machine import read_machine
from uma.measurement.change import (
    default_pool_bytes,
    ended_by_signal,
    growing,
    growing_pool,
    kept_after_unload,
    size_of,
)
from uma.measurement.diagnosis import diagnose
from uma.measurement.finding import Finding
from uma.measurement.metric import Metric
from uma.measurement.peaks import INTERVAL_S, Sampler, thin_out
from uma.measurement.process import process_metrics
from uma.measurement.snapshot import MlxCounters, Snapshot, mlx_metrics, read_snapshot

Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class Record:
    """What something took: metrics by name, of the process tree, the machine, and MLX.

    ``tree`` has peaks, and ``footprint_change`` or ``resident_change`` from beginning to end.
    """

    seconds: float
    samples: int
    processes: int
    tree: Metrics
    machine: Metrics
    mlx: Metrics = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


class Measurement:
    """Measures this process, and what it starts, from ``with`` to the end of the block.

    ::

        with measure() as run:
            ...
        run.record.tree["footprint_peak"]

    ``counters`` reads MLX's counters; by default those of MLX where it is loaded. MLX's peak is
    not reset: it is of the whole process, unless the code resets it.
    """

    record: Record

    def __init__(
        self,
        *,
        interval_s: float = INTERVAL_S,
        counters: Callable[[], MlxCounters | None] | None = None,
    ) -> None:
        self._counters = counters or loaded_mlx_counters
        self._interval_s = interval_s

    def __enter__(self) -> "Measurement":
        self._machine = read_machine()
        self._before = self._now()
        self._first = process_metrics(os.getpid())
        self._sampler = _PoolSampler(
            os.getpid(), self._machine, self._interval_s, counters=self._counters
        )
        self._began = time.monotonic()
        self._sampler.start()
        return self

    def __exit__(self, *failure: object) -> None:
        seconds = time.monotonic() - self._began
        self._sampler.stop()
        self._sampler.look()
        self._sampler.look_at_machine()
        counters, after = self._counters(), self._now()
        freed = counters.peak - counters.active if counters else 0
        extra = (
            growing_pool(self._sampler.pool, self._pool_limit(counters)),
            kept_after_unload(self._before, after, freed) if freed else None,
        )
        self.record = Record(
            seconds=seconds,
            samples=self._sampler.samples,
            processes=self._sampler.processes,
            tree=self._sampler.tree | changes(self._first, process_metrics(os.getpid())),
            machine=dict(self._sampler.here),
            mlx=mlx_metrics(counters),
            findings=tuple(diagnose([self._before, after]) + [f for f in extra if f]),
        )

    def _pool_limit(self, counters: MlxCounters | None) -> int:
        told = None if counters is None else counters.cache_limit
        return default_pool_bytes(self._machine) if told is None else told

    def _now(self) -> Snapshot:
        counters = self._counters()
        return read_snapshot([os.getpid()], counters=counters, machine=self._machine)


measure = Measurement


@dataclass(slots=True)
class _PoolSampler(Sampler):
    """Also notes MLX's active memory and pool, to tell one's growth from the other's."""

    counters: Callable[[], MlxCounters | None] = lambda: None
    pool: list[tuple[float, int, int]] = field(default_factory=list)

    def look(self) -> None:
        Sampler.look(self)
        found = self.counters()
        if found is not None:
            self.pool.append((time.monotonic(), found.active, found.pool))
            thin_out(self.pool)


def loaded_mlx_counters() -> MlxCounters | None:
    """MLX's counters where some module of this process has loaded it; it is not loaded for this."""
    mlx = sys.modules.get("mlx.core")
    if mlx is None or not hasattr(mlx, "device_info"):  # or it is being imported just now
        return None
    info = mlx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    return MlxCounters(
        active=mlx.get_active_memory(),
        peak=mlx.get_peak_memory(),
        pool=mlx.get_cache_memory(),
        working_set=int(working_set) if working_set else None,
    )


def changes(before: Metrics, after: Metrics) -> Metrics:
    """How much the footprint and the resident size differ, where both are known."""
    found = {}
    for name in ("footprint", "resident"):
        first, last = before[name].size, after[name].size
        if first is not None and last is not None:
            source = f"{after[name].source}, at the end less at the beginning"
            found[f"{name}_change"] = Metric(last - first, source=source)
    return found


def record_of(sampler: Sampler, seconds: float, before: Snapshot, code: int) -> Record:
    """The record of a command that has ended with ``code``, and that ``sampler`` watched."""
    after = read_snapshot(largest=0, machine=sampler.machine)
    held = sampler.tree["footprint_peak"].size
    lowest, swap = sampler.here["reclaimable_low"].size, sampler.here["swap_used_peak"].size
    extra = (
        kept_after_unload(before, after, held) if held else None,
        # Its beginning, when a model is loaded, says nothing.
        growing("the command", sampler.course[len(sampler.course) // 2 :], sampler.machine),
        ended_by_signal(code, lowest, max(0, (swap or 0) - (size_of(before, "swap_used") or 0))),
    )
    return Record(
        seconds=seconds,
        samples=sampler.samples,
        processes=sampler.processes,
        tree=dict(sampler.tree),
        machine=dict(sampler.here),
        findings=tuple(diagnose([before, after]) + [f for f in extra if f]),
    )
