"""Peaks of a process tree and of the machine while something runs, sampled by a thread.

What the kernel keeps by itself (the high-water mark of each process) is read too, so that a peak
between two samples is not lost for a process that is alive at the next one.
"""

import os
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from uma.machine import Machine
from uma.measurement.gpu import read_gpu
from uma.measurement.memory import read_memory
from uma.measurement.metric import Metric, unavailable
from uma.measurement.process import nvidia_bytes, process_metrics, sum_metrics
from uma.measurement.tree import held_bytes, read_processes, tree_of

INTERVAL_S = 0.1
MACHINE_INTERVAL_S = 1.0  # a Mac's kernel repeats its answers to those who ask more often
_MOST = 1200  # samples that are kept of the course
_SHARE = 1 / 400  # of one core, at most, on average
_SUMMED = ("footprint", "resident", "wired", "swapped", "gpu")
_HIGHEST = {"footprint": "footprint_peak", "resident": "resident_peak"}
_WORSE = ("normal", "warning", "critical")


@dataclass(slots=True)
class Sampler:
    """Samples the tree of ``pid`` until it is stopped; readings are kept as peaks, and as a course.

    It takes about half a percent of a core at most: where a look is costly, it looks more seldom.
    New processes of the tree are looked for less often than the known ones are looked at.
    """

    pid: int
    machine: Machine
    interval_s: float = INTERVAL_S
    samples: int = 0
    tree: dict[str, Metric] = field(default_factory=dict)
    here: dict[str, Metric] = field(default_factory=dict)
    processes: int = 0
    course: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _pids: tuple[int, ...] = ()
    _tree_due: float = 0.0
    _machine_due: float = 0.0

    def start(self) -> None:
        self.look()
        self._thread = threading.Thread(target=self._run, daemon=True, name="uma-measure")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = self.interval_s
        while not self._stop.wait(pause):
            before = spent_s()
            self.look()
            pause = max(self.interval_s, (spent_s() - before) / _SHARE)

    def look(self) -> None:
        """Take one sample now."""
        with self._lock:
            self._look_at_tree()
            if time.monotonic() >= self._machine_due:
                self.look_at_machine()

    def _look_at_tree(self) -> None:
        if time.monotonic() >= self._tree_due:
            before = spent_s()
            self._pids = tree_of(read_processes(), self.pid)
            pause = max(self.interval_s, (spent_s() - before) / _SHARE)
            self._tree_due = time.monotonic() + pause
        cards = nvidia_bytes()
        each = [process_metrics(pid, cards) for pid in self._pids]
        each = [metrics for metrics in each if metrics["resident"].size is not None] or each[:1]
        together = sum_metrics(each)
        for name, kept in _HIGHEST.items():  # the kernel's own first: a sample has to exceed it
            for metrics in each:
                keep_highest(self.tree, f"{name}_peak", metrics[kept])
        for name in _SUMMED:
            keep_highest(self.tree, f"{name}_peak", sampled(together[name]))
        self.processes = max(self.processes, len(each))
        self.samples += 1
        self.course.append((time.monotonic(), held_bytes(together)))
        thin_out(self.course)

    def look_at_machine(self) -> None:
        """Note the machine's memory; a Mac's once a second at most."""
        self._machine_due = time.monotonic() + MACHINE_INTERVAL_S
        memory = read_memory()
        for name in ("wired", "compressed", "swap_used"):
            metric = memory.get(name) or unavailable("not told")
            keep_highest(self.here, f"{name}_peak", sampled(metric))
        keep_highest(self.here, "gpu_allocated_peak", sampled(read_gpu(self.machine)["allocated"]))
        keep_lowest(self.here, "reclaimable_low", sampled(memory["reclaimable"]))
        pressure = memory["pressure"]
        worst = self.here.get("pressure_worst")
        if worst is None or worst.value not in _WORSE or _level(pressure) > _level(worst):
            self.here["pressure_worst"] = pressure


def spent_s() -> float:
    """CPU seconds of this thread, and of the tools that it called (and of other children)."""
    times = os.times()
    return time.thread_time() + times.children_user + times.children_system


def thin_out(samples: list[Any]) -> None:
    """Keep a long row of samples short: every second one of them is enough then."""
    if len(samples) > _MOST:
        del samples[::2]


def sampled(metric: Metric) -> Metric:
    """A sample among others: what the highest of them is, the peak may exceed."""
    if metric.value is None:
        return metric
    return replace(metric, source=f"{metric.source}, sampled", estimated=True)


def _level(metric: Metric) -> int:
    return _WORSE.index(metric.value) if metric.value in _WORSE else -1


def keep_highest(kept: dict[str, Metric], name: str, metric: Metric) -> None:
    former = kept.get(name)
    if former is None or former.size is None or (metric.size or 0) > former.size:
        kept[name] = metric


def keep_lowest(kept: dict[str, Metric], name: str, metric: Metric) -> None:
    former = kept.get(name)
    if former is None or former.size is None or (metric.size or former.size) < former.size:
        kept[name] = metric
