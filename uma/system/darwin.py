"""macOS: what the system's own tools and libSystem say, and its meaning.

``read_*`` functions touch the machine and return what it answered; the rest is pure and tested on
recorded answers. Every reading is unprivileged.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from uma.errors import UmaError
from uma.system.darwin_memory import (
    decode_host_statistics,
    decode_swapusage,
    figures,
    parse_memory_pressure,
    parse_swapusage,
    parse_vm_stat,
)
from uma.system.process import Process
from uma.units import MIB, format_gib

_SYSCTL_NAMES = (
    "hw.memsize",
    "hw.optional.arm64",
    "machdep.cpu.brand_string",
    "kern.osproductversion",
    "iogpu.wired_limit_mb",
    "debug.iogpu.wired_limit",  # the older key, macOS 13; in bytes
    "hw.nperflevels",
    *(f"hw.perflevel{level}.{key}" for level in (0, 1) for key in ("name", "physicalcpu")),
)
_TIMEOUT_S = 5
_LEVEL = re.compile(r"hw\.perflevel([0-9])\.")


@dataclass(frozen=True, slots=True)
class Readings:
    """Text of ``sysctl``, ``vm_stat`` and ``ioreg``; empty where a tool gave none."""

    sysctl: str
    vm_stat: str
    ioreg: str


def read() -> Readings:
    """Ask this Mac: about 30 ms, most of it ``ioreg``."""
    return Readings(
        sysctl=_output("/usr/sbin/sysctl", *_SYSCTL_NAMES),
        vm_stat=_output("/usr/bin/vm_stat"),
        ioreg=read_ioreg(),
    )


def read_ioreg() -> str:
    """The GPU's entry in the IORegistry, as text: 24 ms."""
    return _output("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")


def _output(*command: str) -> str:
    """What a tool prints; a name that ``sysctl`` does not know is left out by it."""
    import os
    import subprocess

    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def parse_sysctl(text: str) -> dict[str, str]:
    """``name: value`` lines by name.

    >>> parse_sysctl("hw.memsize: 17179869184\\nmachdep.cpu.brand_string: Apple M4\\n")
    {'hw.memsize': '17179869184', 'machdep.cpu.brand_string': 'Apple M4'}
    """
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def installed_bytes(sysctl: Mapping[str, str]) -> int | None:
    """Installed memory (``hw.memsize``), or ``None`` where it was not told.

    It is whole MiB on every Mac; digits cut off by a broken pipe are not.
    """
    text = sysctl.get("hw.memsize", "")
    size = int(text) if re.fullmatch(r"\d{1,18}", text) else 0
    return size if size > 0 and size % MIB == 0 else None


def macos_major(version: str | None) -> int | None:
    """The first number of a version such as ``15.6.1``.

    >>> macos_major("26.4"), macos_major("unknown")
    (26, None)
    """
    match = re.match(r"([0-9]{1,4})(?:\.|$)", version or "")
    return int(match[1]) if match else None


def raised_limit(sysctl: Mapping[str, str], memory_bytes: int) -> tuple[int | None, str | None]:
    """The GPU limit that somebody set by ``sysctl``, and a note on a value that cannot be one.

    0 means the default of macOS, not "no memory". A value that is no number, or is not between
    512 MiB and the installed memory, is not believed: the default then counts.
    """
    for key, unit in (("iogpu.wired_limit_mb", MIB), ("debug.iogpu.wired_limit", 1)):
        text = sysctl.get(key, "0")
        limit = int(text) * unit if re.fullmatch(r"\d{1,15}", text) else -1
        if limit == 0:
            continue
        if 512 * MIB <= limit <= memory_bytes:
            return limit, None
        return None, (
            f"{key} is {text!r}, which is no limit within {format_gib(memory_bytes)} of memory; "
            f"the default of macOS is assumed; sudo sysctl {key}=0 restores it"
        )
    return None, None


def available_bytes(vm_stat: str) -> int | None:
    """Memory that programs can have without anything being compressed or swapped out.

    Free pages, and those that hold only file data or purgeable data, which macOS drops when
    asked. ``None`` when ``vm_stat`` lacks one of the lines.
    """
    return figures(parse_vm_stat(vm_stat))["reclaimable"]


def gpu_cores(ioreg: str) -> int | None:
    """``gpu-core-count`` of the accelerator; absent in virtual machines.

    >>> gpu_cores('  "gpu-core-count" = 10 ')
    10
    """
    match = re.search(r'"gpu-core-count"\s*=\s*([0-9]{1,4})\s', ioreg)
    return int(match[1]) if match else None


def performance_levels(sysctl: Mapping[str, str]) -> list[tuple[str | None, int | None]]:
    """Name and cores of each kind of core, the fastest first.

    The fastest is "Performance" up to M4 and "Super" on M5; older systems name none.
    """
    indices = {int(match[1]) for key in sysctl if (match := _LEVEL.match(key))}
    told = sysctl.get("hw.nperflevels", "")
    count = int(told) if re.fullmatch("[0-9]", told) else max(indices, default=-1) + 1
    return [(sysctl.get(f"hw.perflevel{i}.name"), _cores(sysctl, i)) for i in range(count)]


def cores_text(sysctl: Mapping[str, str]) -> str | None:
    """The processor's cores in words, or ``None`` where they are not told.

    >>> cores_text({"hw.perflevel0.physicalcpu": "6", "hw.perflevel0.name": "Super"})
    '6 Super cores'
    """
    levels = [(name, cores) for name, cores in performance_levels(sysctl) if cores is not None]
    words = (f"{cores} {name}" if name else str(cores) for name, cores in levels)
    return f"{' + '.join(words)} cores" if levels else None


def _cores(sysctl: Mapping[str, str], level: int) -> int | None:
    text = sysctl.get(f"hw.perflevel{level}.physicalcpu", "")
    return int(text) if re.fullmatch("[0-9]{1,4}", text) else None


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """The machine's memory: structures where the kernel gave them, text where it did not.

    ``pressure_level`` is 1, 2 or 4, ``memory_level`` a percentage; ``wired_collector_off`` is the
    ``sysctl`` that keeps macOS 26 from unwiring GPU memory that is idle.
    """

    pages: dict[str, int]
    pages_source: str
    swap: dict[str, int]
    pressure_level: int | None = None
    memory_level: int | None = None
    wired_collector_off: int | None = None


def read_memory() -> MemoryReadings:
    """Ask this Mac; once per second at most, because the kernel repeats its answers if hurried."""
    pages, pages_source = _read_pages()
    swap = decode_swapusage(_sysctl_bytes("vm.swapusage"))
    swap_text = "" if swap else _output("/usr/sbin/sysctl", "vm.swapusage")
    return MemoryReadings(
        pages=pages,
        pages_source=pages_source,
        swap=swap or parse_swapusage(swap_text),
        pressure_level=sysctl_int("kern.memorystatus_vm_pressure_level"),
        memory_level=sysctl_int("kern.memorystatus_level"),
        wired_collector_off=sysctl_int("iogpu.disable_wired_collector"),
    )


def _read_pages() -> tuple[dict[str, int], str]:
    from uma.system import darwin_native

    try:
        buffer = darwin_native.host_statistics()
        return decode_host_statistics(buffer, darwin_native.page_size()), "host_statistics64"
    except OSError:
        pages = parse_vm_stat(_output("/usr/bin/vm_stat"))
    if "page_size" in pages:
        return pages, "vm_stat"
    return parse_memory_pressure(_output("/usr/bin/memory_pressure")), "memory_pressure"


def _sysctl_bytes(name: str) -> bytes:
    from uma.system import darwin_native

    try:
        return darwin_native.sysctl(name)
    except OSError:
        return b""


def sysctl_int(name: str) -> int | None:
    """An integer of 4 or 8 bytes; ``None`` where the system has no such name."""
    buffer = _sysctl_bytes(name)
    return int.from_bytes(buffer, "little", signed=True) if len(buffer) in (4, 8) else None


def read_footprint(pid: int) -> str:
    """What the tool ``footprint`` says of a process of this user: 40 to 110 ms.

    Without ``-f bytes`` it rounds a process of 13.9 GB to 13.
    """
    return _output("/usr/bin/footprint", "-p", str(pid), "-f", "bytes")


def read_displays() -> str:
    """``system_profiler`` on the GPU, as JSON: some seconds."""
    return _output("/usr/sbin/system_profiler", "-json", "SPDisplaysDataType")


def read_rusage(pid: int) -> bytes:
    """``proc_pid_rusage`` of a process of this user.

    Raises:
        UmaError: If the system refuses: no such process, or another user's.
    """
    from uma.system import darwin_native

    try:
        return darwin_native.rusage(pid)
    except OSError as error:
        raise UmaError(f"no memory figures of process {pid}: {error.strerror}") from None


def read_processes() -> list[Process]:
    """All processes of this Mac, by ``ps``."""
    return parse_ps(_output("/bin/ps", "-axo", "pid=,ppid=,rss=,state=,comm="))


def parse_ps(text: str) -> list[Process]:
    """Lines of process id, parent, resident KiB, state and command, whose last part is kept.

    Those that have ended and wait to be reaped (Z) are left out.

    >>> parse_ps("  88     1  4096 Ss   /Applications/A B.app/Contents/MacOS/A B")
    [Process(pid=88, parent=1, name='A B', resident_bytes=4194304)]
    """
    number = r"[ \t]*([0-9]{1,15})[ \t]+"
    lines = re.findall(rf"^{number * 3}[^Z\s]\S*[ \t]+(\S.*?)[ \t]*$", text, re.MULTILINE)
    return [
        Process(int(pid), int(parent), command.rsplit("/", 1)[-1], int(kib) * 1024)
        for pid, parent, kib, command in lines
    ]
