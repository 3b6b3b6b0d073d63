"""Snapshots as they come: a screen with sparklines, a line each for a pipe, rows for a log."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from uma.measurement.metric import Metric
from uma.measurement.tree import held_bytes
from uma.report.measure import findings_text, value_text
from uma.report.text import table
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.measurement.finding import Finding
    from uma.measurement.snapshot import Snapshot

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"
_SHOWN = ("wired", "app", "compressed", "cached", "free", "reclaimable", "swap_used")
_LINE = ("reclaimable", "wired", "compressed", "swap_used")


def sparkline(values: Sequence[float | None], width: int, *, blocks: bool = True) -> str:
    """The last ``width`` values between their lowest and highest; a space where one is unknown.

    >>> sparkline([0, 1, None, 7], 4)
    '▁▂ █'
    """
    marks = _BLOCKS if blocks else _ASCII
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = (high - low) or 1.0
    last = len(marks) - 1
    return "".join(" " if v is None else marks[int((v - low) / span * last)] for v in shown)


def live_text(
    history: Sequence["Snapshot"],
    findings: Sequence["Finding"],
    *,
    width: int = 80,
    blocks: bool = True,
) -> str:
    """A screen: each kind of memory with its course, the GPU, the processes, the findings."""
    now, first = history[-1], history[0]
    room = max(8, width - 34)
    shown = list(history)[-room:]
    rows = [
        [
            f"  {name.replace('_', ' ')}",
            value_text(now.memory[name]),
            _course(shown, name, room, blocks),
        ]
        for name in _SHOWN
        if name in now.memory and now.memory[name].value is not None
    ]
    allocated = now.gpu["allocated"]
    if allocated.value is not None:
        course = [snapshot.gpu["allocated"].number for snapshot in shown]
        rows.append(["  GPU", value_text(allocated), sparkline(course, room, blocks=blocks)])
    for tree in now.processes:
        held = [_held(snapshot, tree.pid) for snapshot in shown]
        name = f"  {tree.label[:14]} {tree.pid}"
        size = format_gib(held_bytes(tree.metrics))
        rows.append([name, size, sparkline(held, room, blocks=blocks)])
    pressure = now.memory["pressure"]
    head = (
        f"{now.machine.name}  {now.seconds - first.seconds:.0f} s  pressure {value_text(pressure)}"
    )
    lines = [head[:width], *table(rows, "<><").splitlines()]
    if findings:
        lines += ["", *findings_text(findings).splitlines()]
    return "\n".join(line[:width] for line in lines)


def _course(history: Sequence["Snapshot"], name: str, width: int, blocks: bool) -> str:
    unknown = Metric(None)
    values = [snapshot.memory.get(name, unknown).number for snapshot in history]
    return sparkline(values, width, blocks=blocks)


def _held(snapshot: "Snapshot", pid: int) -> float | None:
    return next((float(held_bytes(t.metrics)) for t in snapshot.processes if t.pid == pid), None)


def line_text(snapshot: "Snapshot") -> str:
    """One line: the time, the machine, and the processes that were asked for or hold most."""
    parts = [time.strftime("%H:%M:%S")]
    for name in _LINE:
        metric = snapshot.memory.get(name)
        if metric is not None and metric.value is not None:
            parts.append(f"{name.replace('_', ' ')} {value_text(metric)}")
    if snapshot.gpu["allocated"].value is not None:
        parts.append(f"GPU {value_text(snapshot.gpu['allocated'])}")
    parts.append(f"pressure {value_text(snapshot.memory['pressure'])}")
    trees = snapshot.processes[:1] if snapshot.whole else snapshot.processes
    parts += [f"{t.label} ({t.pid}) {format_gib(held_bytes(t.metrics))}" for t in trees]
    return ", ".join(parts)


def log_row(snapshot: "Snapshot", began_s: float) -> dict[str, Any]:
    """One row of a log: sizes in ``_bytes``, shares in ``_percent``; unknown is ``None``.

    ``began_s`` is the watch's beginning, on the snapshot's clock. The same columns in every row of
    a watch. Where no process was asked for, it is the largest of the moment.
    """
    row: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "elapsed_s": round(snapshot.seconds - began_s, 3),
    }
    for prefix, metrics in (("", snapshot.memory), ("gpu_", snapshot.gpu)):
        row |= {_column(prefix + name, metric): metric.value for name, metric in metrics.items()}
    if snapshot.whole:
        trees = {"largest": snapshot.processes[0]} if snapshot.processes else {}
        row["largest_pid"] = trees["largest"].pid if trees else None
    else:
        trees = {f"process_{tree.pid}": tree for tree in snapshot.processes}
    for prefix, tree in trees.items():
        for name in ("footprint", "resident"):
            row[f"{prefix}_{name}_bytes"] = tree.metrics[name].value
    return row


def _column(name: str, metric: Metric) -> str:
    suffix = {"bytes": "_bytes", "percent": "_percent", "GB/s": "_gb_per_s", "W": "_w"}
    return name + suffix.get(metric.unit, "")
