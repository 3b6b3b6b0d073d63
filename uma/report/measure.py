"""A snapshot of the machine's memory, or a record of something that ran, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from uma.measurement.memory import PARTS
from uma.measurement.metric import Metric
from uma.report import SCHEMA_VERSION
from uma.report.text import table
from uma.units import format_gib, printable

if TYPE_CHECKING:
    from uma.measurement.failures import Explanation
    from uma.measurement.finding import Finding
    from uma.measurement.record import Record
    from uma.measurement.snapshot import Snapshot
    from uma.measurement.tree import ProcessTree

Metrics = Mapping[str, Metric]

_SYSTEMS = {"macOS": "darwin", "Linux": "linux"}
_OTHERS = (
    "used",
    "reclaimable",
    "wired",
    "compressed_logical",
    "swap_used",
    "swap_total",
    "group_limit",
    "group_used",
    "pressure",
    "pressure_some",
    "pressure_full",
    "available_percent",
    "wired_collector_off",
)
_PROCESS = ("footprint", "footprint_peak", "resident", "resident_peak", "wired", "swapped", "gpu")


def measure_text(snapshot: "Snapshot", findings: Sequence["Finding"]) -> str:
    """The page: machine, memory by kind, GPU, processes, MLX, findings."""
    sections = [
        machine_text(snapshot),
        _titled("memory", _memory_rows(snapshot)),
        _section("GPU", snapshot.gpu),
        processes_text(snapshot),
        _section("memory traffic", snapshot.traffic),
        _section("MLX in this process", snapshot.mlx),
        findings_text(findings),
    ]
    return "\n\n".join(section for section in sections if section)


def machine_text(snapshot: "Snapshot") -> str:
    """The machine with the two lines that a plan is held against, and where each is from."""
    machine, budget = snapshot.machine, snapshot.budget
    about = [machine.name, " ".join(word for word in (machine.os, machine.os_version) if word)]
    if machine.cpu is not None and machine.cpu not in machine.name:
        about.append(machine.cpu)
    if machine.gpu_cores is not None:
        about.append(f"{machine.gpu_cores} GPU cores")
    limit = format_gib(budget.limit_bytes)
    if machine.limit_high_bytes is not None:
        limit = f"{format_gib(machine.limit_bytes)} to {format_gib(machine.limit_high_bytes)}"
    rows = [
        ["  memory", format_gib(machine.memory_bytes), "installed"],
        ["  limit", limit, machine.limit_source],
        ["  budget", format_gib(budget.budget_bytes), budget.winner],
    ]
    lines = [", ".join(about), table(rows, "<><")]
    return "\n".join([*lines, *(f"  note: {note}" for note in machine.notes)])


def _memory_rows(snapshot: "Snapshot") -> list[list[str]]:
    """The parts that divide the whole, what they leave, their sum; then the other figures."""
    memory = snapshot.memory
    parts = [*PARTS.get(_SYSTEMS.get(snapshot.machine.os or "", ""), ()), "unaccounted", "total"]
    rows = _rows({name: memory[name] for name in parts if name in memory})
    others = {name: memory[name] for name in _OTHERS if name in memory and name not in parts}
    return [*rows, ["", "", ""], *_rows(others)]


def _section(title: str, metrics: Metrics) -> str:
    """A table, or one line where nothing of it is known and the reason is one."""
    reasons = {metric.reason for metric in metrics.values()}
    if len(reasons) == 1 and None not in reasons:
        return f"{title}\n  unknown: {reasons.pop()}"
    return _titled(title, _rows(metrics))


def _titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{table(rows, '<><')}" if rows else ""


def _rows(metrics: Metrics) -> list[list[str]]:
    return [[f"  {name.replace('_', ' ')}", value_text(m), _why(m)] for name, m in metrics.items()]


def value_text(metric: Metric) -> str:
    """A value with its unit; ``~`` before an estimate, ``?`` where it is unknown.

    >>> value_text(Metric(3 << 30)), value_text(Metric(12.5, "percent")), value_text(Metric(None))
    ('3.00 GiB', '12.5 %', '?')
    """
    if metric.value is None:
        return "?"
    mark = "~" if metric.estimated else ""
    if metric.unit == "bytes" and isinstance(metric.value, int):
        return mark + format_gib(metric.value)
    if metric.unit in ("count", "cores") and isinstance(metric.value, int):
        return f"{mark}{metric.value:,}"
    units = {"percent": " %", "GB/s": " GB/s", "W": " W"}
    number = f"{metric.value:.4g}" if isinstance(metric.value, float) else str(metric.value)
    return mark + number + units.get(metric.unit, "")


def _why(metric: Metric) -> str:
    return metric.source if metric.reason is None else f"unknown: {metric.reason}"


def processes_text(snapshot: "Snapshot") -> str:
    """The processes, each with all that it started where it was asked for."""
    if not snapshot.listed:
        return ""
    if not snapshot.processes:
        return "processes\n  none could be read"
    title = "processes that hold most" if snapshot.whole else "processes, with what they started"
    names = [n for n in _PROCESS if any(t.metrics[n].value is not None for t in snapshot.processes)]
    head = ["  pid", "name", "count", *(name.replace("_", " ") for name in names)]
    rows = [head, *(_process_row(tree, names) for tree in snapshot.processes)]
    order = (*names, *(name for name in _PROCESS if name not in names))
    notes = "\n".join(f"  {name}: {_origin(snapshot, name)}" for name in order)
    return f"{title}\n{table(rows, '><>' + '>' * len(names))}\n{notes}"


def _origin(snapshot: "Snapshot", name: str) -> str:
    """Where the processes' figure of that name was read, and why some or all of them lack it."""
    metrics = [tree.metrics[name] for tree in snapshot.processes]
    source = next((m.source for m in metrics if m.value is not None), None)
    reason = next((m.reason for m in metrics if m.value is None), None)
    if source is None:
        return f"unknown: {reason}"
    return source if reason is None else f"{source}; ? is unknown: {reason}"


def _process_row(tree: "ProcessTree", names: Sequence[str]) -> list[str]:
    sizes = [value_text(tree.metrics[name]) for name in names]
    return [f"  {tree.pid}", tree.label[:40], str(len(tree.pids)), *sizes]


def findings_text(findings: Sequence["Finding"]) -> str:
    """Each finding with what shows it and what to do."""
    if not findings:
        return "findings\n  none"
    lines = ["findings"]
    for finding in findings:
        lines.append(f"  {finding.severity}: {finding.text}")
        lines += [f"      {line}" for line in finding.evidence]
        lines.append(f"    do: {finding.remedy}")
    return "\n".join(lines)


def measure_json(snapshot: "Snapshot", findings: Sequence["Finding"]) -> dict[str, Any]:
    """The document of ``uma measure --json``."""
    budget = snapshot.budget
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": asdict(snapshot.machine)
        | {"budget_bytes": budget.budget_bytes, "budget_source": budget.winner},
        "memory": metrics_json(snapshot.memory),
        "gpu": metrics_json(snapshot.gpu),
        "processes": [tree_json(tree) for tree in snapshot.processes],
        "mlx": metrics_json(snapshot.mlx),
        "traffic": metrics_json(snapshot.traffic),
        "findings": [finding.to_json() for finding in findings],
    }


def metrics_json(metrics: Metrics) -> dict[str, Any]:
    return {name: metric.to_json() for name, metric in metrics.items()}


def tree_json(tree: "ProcessTree") -> dict[str, Any]:
    return {"pid": tree.pid, "name": tree.label, "processes": len(tree.pids)} | metrics_json(
        tree.metrics
    )


def record_text(record: "Record", command: str) -> str:
    """What a command held at most, with what the machine showed meanwhile."""
    head = f"{command}: {record.seconds:.1f} s, {record.samples} samples, up to "
    head += "1 process" if record.processes == 1 else f"{record.processes} processes"
    sections = [
        head,
        _titled("peaks of its processes together", _rows(_known(record.tree)))
        or "  it ended before it could be looked at",
        _titled("the machine meanwhile", _rows(record.machine)),
        findings_text(record.findings) if record.findings else "",
    ]
    return "\n".join(section for section in sections if section)


def _known(metrics: Metrics) -> Metrics:
    return {name: metric for name, metric in metrics.items() if metric.value is not None}


def record_json(record: "Record", command: str, status: int) -> dict[str, Any]:
    """The document of ``uma measure --during --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "exit_code": status,
        "elapsed_s": round(record.seconds, 3),
        "samples": record.samples,
        "processes": record.processes,
        "tree": metrics_json(record.tree),
        "machine": metrics_json(record.machine),
        "findings": [finding.to_json() for finding in record.findings],
    }


def explanation_text(found: "Explanation") -> str:
    """A failure's cause and remedy, with the line that shows it."""
    lines = [
        f"cause: {found.cause.replace('_', ' ')}",
        f"  {found.text}",
        f"do: {found.remedy}",
        *(f"note: {note}" for note in found.notes),
        f"shown by: {printable(found.quote, kept='')}",
        f"source: {found.source}",
    ]
    return "\n".join(lines)
