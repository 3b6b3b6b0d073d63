"""macOS: what the system's own tools and libSystem say, and its meaning.

``read_*`` functions touch the machine and return what it answered; the rest is pure and tested on
recorded answers. Every reading is unprivileged.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from uma.errors import UmaError
from uma.units import MIB, format_gib

_SYSCTL_NAMES = (
    "hw.memsize",
    "hw.optional.arm64",
    "machdep.cpu.brand_string",
    "kern.osproductversion",
    "iogpu.wired_limit_mb",
    "debug.iogpu.wired_limit",  # the older key, macOS 13; in bytes
)
_TIMEOUT_S = 5


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
        ioreg=_output("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"),
    )


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
    match = re.match(r"(\d+)(?:\.|$)", version or "")
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
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    counts = dict(re.findall(r'^"?([A-Z][^":]*)"?:\s+(\d+)\.?\s*$', vm_stat, re.MULTILINE))
    names = ("Pages free", "File-backed pages", "Pages purgeable")
    if page is None or not all(name in counts for name in names):
        return None
    return int(page[1]) * sum(int(counts[name]) for name in names)


def gpu_cores(ioreg: str) -> int | None:
    """``gpu-core-count`` of the accelerator; absent in virtual machines.

    >>> gpu_cores('  "gpu-core-count" = 10')
    10
    """
    match = re.search(r'"gpu-core-count"\s*=\s*(\d+)', ioreg)
    return int(match[1]) if match else None


# struct rusage_info_vN: 16 bytes of uuid, then 64-bit counters (xnu-11417.101.15,
# bsd/sys/resource.h). A kernel that lacks a version answers EINVAL.
_RUSAGE_SIZES = {4: 296, 2: 160, 0: 96}
_PHYS_FOOTPRINT = 72
_LIFETIME_MAX_PHYS_FOOTPRINT = 240


def footprint(rusage: bytes) -> tuple[int, int | None]:
    """Current and highest ``phys_footprint`` in a ``rusage_info`` of any version, in bytes.

    The highest is ``None`` before version 4. The footprint contains Metal's buffers; resident
    size does not.

    Raises:
        ValueError: If the structure is shorter than version 0.
    """
    if len(rusage) < _RUSAGE_SIZES[0]:
        raise ValueError(f"rusage_info of {len(rusage)} bytes; version 0 has {_RUSAGE_SIZES[0]}")
    (now,) = struct.unpack_from("<Q", rusage, _PHYS_FOOTPRINT)
    if len(rusage) < _RUSAGE_SIZES[4]:
        return now, None
    (highest,) = struct.unpack_from("<Q", rusage, _LIFETIME_MAX_PHYS_FOOTPRINT)
    return now, highest


def read_rusage(pid: int) -> bytes:
    """``proc_pid_rusage`` of a process of this user: version 4, else 2, else 0.

    Raises:
        UmaError: If the system refuses: no such process, or another user's.
    """
    import ctypes
    import errno
    import os

    call = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True).proc_pid_rusage
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_int
    for version, size in _RUSAGE_SIZES.items():
        buffer = ctypes.create_string_buffer(size)
        if call(pid, version, buffer) == 0:
            return buffer.raw
        if ctypes.get_errno() != errno.EINVAL:
            break
    raise UmaError(f"no memory figures of process {pid}: {os.strerror(ctypes.get_errno())}")
