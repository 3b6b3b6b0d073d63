"""``uma measure bandwidth``: what the memory gives, and what the disk and decode reach."""

import json as json_module
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from uma.cli import options as opt
from uma.cli.options import size_option

if TYPE_CHECKING:
    from uma.catalog.observed import BandwidthFigure
    from uma.machine import Machine
    from uma.measurement.bandwidth import Bandwidth, DeviceName
    from uma.measurement.storage import StorageRead
    from uma.report.bandwidth import BandwidthReport

NOISY = 0.3  # samples that differ by more were disturbed
BUSY = 0.25  # of the cores


def bandwidth(
    device: Annotated[
        Literal["gpu", "cpu", "host"] | None,
        typer.Option(
            help="gpu or cpu: through MLX; host: the processor's threads. [default: gpu, else host]"
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Bytes of an array, such as 256MiB. [default: 512MiB]")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=3, max=1000, help="Samples of a kernel.")] = 10,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Of the host's kernels. [default: cores]")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also read this model's files, or a file, from disk."),
    ] = None,
    no_record: opt.NoRecord = False,
    json: opt.Json = False,
    wait: opt.Wait = False,
    allow_concurrent: opt.AllowConcurrent = False,
) -> None:
    """Measure memory bandwidth: read, write, copy and triad, best and median.

    Arrays are far larger than the caches and random; what is faster than the memory can be is
    refused. The chip's specified bandwidth and published figures stand beside it, and what the
    last recorded uma run reached in decode.

    \b
    Examples:
      uma measure bandwidth
      uma measure bandwidth --disk llama-3-8b --json
    """
    from uma.cli.progress import say
    from uma.paths import state_folder
    from uma.report.bandwidth import bandwidth_json, bandwidth_text
    from uma.system.lock import heavy_command

    files = [] if disk is None else model_files(disk)
    asked = size_option(size, "--size")
    with heavy_command(
        "uma measure bandwidth",
        state_folder(),
        wait=wait,
        allow_concurrent=allow_concurrent,
        on_wait=lambda holder: say(f"waiting for {holder}"),
    ) as note:
        if note is not None:
            say(f"note: {note}")
        busy = is_busy()
        machine = this_machine()
        main, *others = measured(machine, device, asked, repetitions, threads)
        read = read_disk(files)
    report = _report(machine, main, tuple(others), read, busy)
    if not no_record:
        _keep(report)
    print(json_module.dumps(bandwidth_json(report), indent=2) if json else bandwidth_text(report))


def this_machine() -> "Machine":
    """This machine with what its chip is specified for."""
    from uma.machine import read_machine
    from uma.machine.here import with_speed

    return with_speed(read_machine())


def machine_bandwidth(machine: "Machine", repetitions: int) -> "Bandwidth":
    """What speaks for the machine: its GPU where MLX has one, else the processor's threads."""
    return _one(_device(machine), machine, None, repetitions, None)


def _device(machine: "Machine") -> "DeviceName":
    metal = machine.backend == "metal" and find_spec("mlx") is not None
    return "gpu" if metal else "host"


def measured(
    machine: "Machine",
    asked: "DeviceName | None",
    asked_bytes: int | None,
    repetitions: int,
    threads: int | None,
) -> "tuple[Bandwidth, ...]":
    """The device asked for; or the one that speaks for the machine, and the other.

    Raises:
        RuntimeUnavailable: If MLX is needed and not there, or has no GPU.
    """
    from uma.errors import RuntimeUnavailable

    first = asked or _device(machine)
    devices = [first]
    if asked is None and first == "gpu":
        devices.append("host")
    elif asked is None and find_spec("mlx") is not None:
        devices.append("cpu")
    if first == "gpu" and _device(machine) != "gpu":
        raise RuntimeUnavailable("--device gpu: MLX has no GPU here; host measures the processor")
    return tuple(_one(one, machine, asked_bytes, repetitions, threads) for one in devices)


def _one(
    device: "DeviceName",
    machine: "Machine",
    asked_bytes: int | None,
    repetitions: int,
    threads: int | None,
) -> "Bandwidth":
    from uma.measurement.bandwidth import array_size, host_kernels, measure
    from uma.system.caches import last_level_cache_bytes

    cache = last_level_cache_bytes(machine.chip)
    available, peak = machine.available_bytes, machine.bandwidth_bytes_per_s
    if device == "host":
        size = array_size(available, cache, 3, asked_bytes)
        threads = threads or len(_cores())
        with host_kernels(size, threads) as kernels:
            return measure(
                "host",
                kernels,
                size,
                repetitions=repetitions,
                peak_bytes_per_s=peak,
                threads=threads,
            )
    from uma.cli.session import require_mlx

    require_mlx(quiet=True)
    import uma.runtime.bandwidth as mlx

    size = array_size(available, cache, mlx.ARRAYS, asked_bytes)
    with mlx.on_device("gpu" if device == "gpu" else "cpu"), mlx.mlx_kernels(size) as kernels:
        return measure(device, kernels, size, repetitions=repetitions, peak_bytes_per_s=peak)


def _cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def is_busy() -> bool:
    """Whether more than a quarter of the cores was busy during the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * len(_cores())


def model_files(text: str) -> list[Path]:
    """A file, or those of a model that is on this disk.

    Raises:
        UsageError: If it is not here.
    """
    from uma.checkpoint.source import locate
    from uma.errors import UsageError

    path = Path(text)
    path = path if path.exists() else locate(text).path or path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UsageError(f"--disk {text}: no file of that model is on this disk")
    return files


def read_disk(files: list[Path]) -> "StorageRead | None":
    from uma.measurement.storage import read_from_disk

    return read_from_disk(files) if files else None


def _report(
    machine: "Machine",
    main: "Bandwidth",
    others: "tuple[Bandwidth, ...]",
    disk: "StorageRead | None",
    busy: bool,
) -> "BandwidthReport":
    from uma.measurement.decode import last_decode
    from uma.paths import records_folder
    from uma.records import read_records
    from uma.report.bandwidth import BandwidthReport

    return BandwidthReport(
        machine=machine,
        main=main,
        others=others,
        disk=disk,
        decode=last_decode(read_records(records_folder())),
        published=published(machine),
        notes=tuple(_notes(main, others, busy)),
    )


def _notes(main: "Bandwidth", others: "tuple[Bandwidth, ...]", busy: bool) -> list[str]:
    from uma.measurement.bandwidth import CPU_NOTE

    notes = []
    if any(one.device == "cpu" for one in (main, *others)):
        notes.append(CPU_NOTE)
    if busy:
        notes.append("other programs kept the cores busy before: close them, and run it again")
    if main.spread > NOISY:
        notes.append(f"samples differ by up to {100 * main.spread:.0f} %: the machine is noisy")
    return notes


def published(machine: "Machine") -> "tuple[BandwidthFigure, ...]":
    """What others reached with this chip, or with any bin of it."""
    from uma.catalog.observed import bandwidth_figures

    chip = (machine.chip or "").removeprefix("Apple ")
    return tuple(
        figure
        for figure in bandwidth_figures()
        if figure.chip == chip and figure.gpu_cores in (None, machine.gpu_cores)
    )


def _keep(report: "BandwidthReport") -> None:
    from uma.cli.progress import say
    from uma.paths import records_folder
    from uma.records import write_record
    from uma.report.plan import machine_json
    from uma.runtime.versions import versions

    rates = {
        f"{one.device}_{kernel.name}_bytes_per_s": round(kernel.best_bytes_per_s)
        for one in (report.main, *report.others)
        for kernel in one.kernels
    }
    if report.disk is not None:
        rates["disk_bytes_per_s"] = round(report.disk.bytes_per_s)
    record = {
        "command": "uma measure bandwidth",
        "machine": machine_json(report.machine),
        "versions": versions(),
        "speeds": rates,
    }
    note = write_record(record, records_folder()).note
    if note is not None:
        say(f"note: {note}")
