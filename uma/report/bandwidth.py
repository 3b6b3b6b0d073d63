"""Bandwidth as text and as JSON: what was achieved beside what is specified and published."""

from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from uma.catalog.observed import BandwidthFigure
from uma.machine import Machine
from uma.measurement.bandwidth import Bandwidth, KernelResult
from uma.measurement.decode import DecodeRate
from uma.measurement.storage import StorageRead
from uma.report import SCHEMA_VERSION
from uma.report.text import table
from uma.units import GB, format_gib

UNKNOWN = "no vendor's figure is known for this machine's memory"
LABELS = {"gpu": "GPU, through MLX", "cpu": "MLX's CPU backend", "host": "processor, NumPy"}


@dataclass(frozen=True, slots=True)
class BandwidthReport:
    """Everything that one ``uma measure bandwidth`` shows; ``main`` is about the machine."""

    machine: Machine
    main: Bandwidth
    others: tuple[Bandwidth, ...] = ()
    disk: StorageRead | None = None
    decode: DecodeRate | None = None
    published: tuple[BandwidthFigure, ...] = ()
    notes: tuple[str, ...] = ()


def bandwidth_text(report: BandwidthReport) -> str:
    specified = report.machine.bandwidth_bytes_per_s
    lines = [
        f"{report.machine.name}: "
        + (UNKNOWN if specified is None else f"{_gb(specified)} GB/s specified"),
        "",
    ]
    for one in (report.main, *report.others):
        lines += _section(one)
    lines.append(_achieved(report))
    if report.disk is not None:
        disk = report.disk
        lines.append(
            f"disk: {_gb(disk.bytes_per_s)} GB/s, {format_gib(disk.size_bytes)} read in "
            f"{disk.seconds:.2f} s; {disk.method}"
        )
    if report.decode is not None:
        lines.append(_decode(report.decode, report.main))
    lines += [_figure(figure) for figure in report.published]
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _section(one: Bandwidth) -> list[str]:
    threads = "" if one.threads is None else f", {one.threads} threads"
    title = f"{LABELS[one.device]}{threads}, arrays of {format_gib(one.array_bytes)}"
    head = ["kernel", "best GB/s", "median GB/s", ""]
    return [title, table([head, *map(_row, one.kernels)], "<>><"), ""]


def _row(kernel: KernelResult) -> list[str]:
    best, middle = _gb(kernel.best_bytes_per_s), _gb(kernel.median_bytes_per_s)
    return [kernel.name, best, middle, kernel.invalid or ""]


def _achieved(report: BandwidthReport) -> str:
    best = report.main.achieved
    if best is None:
        return "achieved: unknown, no kernel here shows what the memory gives"
    line = f"achieved: {_gb(best.best_bytes_per_s)} GB/s ({best.name})"
    specified = report.machine.bandwidth_bytes_per_s
    if specified is None:
        return line
    return f"{line}, {100 * best.best_bytes_per_s / specified:.0f} % of what is specified"


def _decode(decode: DecodeRate, main: Bandwidth) -> str:
    line = (
        f"decode: {_gb(decode.bytes_per_s)} GB/s, {format_gib(decode.read_bytes)} a token at "
        f"{decode.tokens_per_s:.1f} tokens/s ({decode.model} in {decode.form}, {decode.date})"
    )
    best = main.achieved
    if best is None:
        return line
    return f"{line}, {100 * decode.bytes_per_s / best.best_bytes_per_s:.0f} % of what is achieved"


def _figure(figure: BandwidthFigure) -> str:
    assert figure.achieved_gb_per_s is not None
    share = ""
    if figure.peak_gb_per_s:
        share = f", {100 * figure.achieved_gb_per_s / figure.peak_gb_per_s:.0f} % of the peak"
    return (
        f"published: {figure.chip} {figure.engine}, {figure.kernel}: "
        f"{figure.achieved_gb_per_s:g} GB/s{share} ({figure.grade}; {figure.source})"
    )


def bandwidth_json(report: BandwidthReport) -> dict[str, Any]:
    """The document of ``uma measure bandwidth --json``; rates in 10^9 bytes per second."""
    specified, best = report.machine.bandwidth_bytes_per_s, report.main.achieved
    disk, decode = report.disk, report.decode
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": {"name": report.machine.name, "chip": report.machine.chip},
        **device_json(report.main),
        "specified_gb_per_s": None if specified is None else specified / GB,
        "specified_reason": UNKNOWN if specified is None else None,
        "achieved_gb_per_s": None if best is None else _rounded(best.best_bytes_per_s),
        "achieved_kernel": None if best is None else best.name,
        "others": [device_json(one) for one in report.others],
        "disk": None
        if disk is None
        else {
            "gb_per_s": _rounded(disk.bytes_per_s),
            "read_bytes": disk.size_bytes,
            "read_s": round(disk.seconds, 4),
            "method": disk.method,
            "perhaps_cached": disk.cached,
        },
        "decode": None
        if decode is None
        else {
            "gb_per_s": _rounded(decode.bytes_per_s),
            "model": decode.model,
            "date": decode.date,
            "form": decode.form,
            "read_bytes": decode.read_bytes,
            "generation_tps": decode.tokens_per_s,
        },
        "published": [figure._asdict() for figure in report.published],
        "notes": list(report.notes),
    }


def device_json(one: Bandwidth) -> dict[str, Any]:
    return {
        "device": one.device,
        "array_bytes": one.array_bytes,
        "threads": one.threads,
        "kernels": [_kernel_json(kernel) for kernel in one.kernels],
    }


def _kernel_json(kernel: KernelResult) -> dict[str, Any]:
    rates = sorted(kernel.size_bytes / seconds for seconds in kernel.times_s)
    tenths = quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else [rates[0]]
    return {
        "name": kernel.name,
        "best_gb_per_s": _rounded(kernel.best_bytes_per_s),
        "median_gb_per_s": _rounded(kernel.median_bytes_per_s),
        "p10_gb_per_s": _rounded(tenths[0]),
        "p90_gb_per_s": _rounded(tenths[-1]),
        "bytes": kernel.size_bytes,
        "repetitions": len(kernel.times_s),
        "invalid": kernel.invalid,
    }


def _rounded(bytes_per_s: float) -> float:
    return round(bytes_per_s / GB, 3)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.1f}"
