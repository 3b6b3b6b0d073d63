"""Linux: ``/proc`` and the limits of control groups.

Functions that read take the root of the file tree, so that recorded trees can stand in for it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from uma.errors import UmaError

_ROOT = Path("/")
_KIB_LINE = re.compile(r"^(\w[^:\s]*):\s+([0-9]{1,15}) kB\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that limits memory: its limit, and what it holds that cannot be dropped."""

    limit_bytes: int
    used_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Readings:
    """Text of ``/proc`` and the limiting control groups, outermost last."""

    meminfo: str
    cpuinfo: str
    release: str
    groups: tuple[Group, ...]


def read(root: Path = _ROOT) -> Readings:
    """Ask this machine; under 1 ms."""
    return Readings(
        meminfo=read_text(root / "proc/meminfo") or "",
        cpuinfo=read_text(root / "proc/cpuinfo") or "",
        release=(read_text(root / "proc/sys/kernel/osrelease") or "").strip(),
        groups=tuple(read_groups(root)),
    )


def parse_kib(text: str) -> dict[str, int]:
    """Bytes by name, of ``/proc/meminfo``, ``/proc/PID/status`` or ``smaps_rollup``.

    The kernel writes "kB" and means KiB; lines without a unit are counts and are left out.

    >>> parse_kib("MemTotal:       24684092 kB\\nHugePages_Total:       0\\n")
    {'MemTotal': 25276510208}
    """
    return {name: int(value) * 1024 for name, value in _KIB_LINE.findall(text)}


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name; the kernel gives none on arm64.

    >>> cpu_model("processor\\t: 0\\nmodel name\\t: AMD EPYC\\n")
    'AMD EPYC'
    """
    match = re.search(r"^model name\s*:\s*(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    return match[1] if match else None


def read_groups(root: Path = _ROOT) -> Iterator[Group]:
    """The control groups of this process, and those around them, that limit its memory.

    Version 2 is preferred by the kernel's layout (``0::/path``), version 1 has a hierarchy for
    memory alone. In a container the path may be the host's: folders that are not there are passed
    over, and the mount's own root is always looked at.
    """
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        inside = PurePosixPath(*(p for p in PurePosixPath(path).parts if p not in ("/", "..")))
        for folder in (inside, *inside.parents):
            group = _group(mount / folder, names)
            if group is not None:
                yield group


# Files of a memory control group: limit, use, and the line of memory.stat that counts file data
# not used lately, which the kernel drops first (kernel docs, cgroup-v1/memory and cgroup-v2).
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 62  # version 1 writes the largest page-aligned 63-bit number for "none"


def _group(folder: Path, names: tuple[str, str, str]) -> Group | None:
    limit_file, use_file, droppable = names
    text = (read_text(folder / limit_file) or "max").strip()
    if text == "max":
        return None
    if not text.isdecimal():
        raise UmaError(f"{folder / limit_file} says {text!r}, which is neither a number nor 'max'")
    if int(text) >= _NO_LIMIT:
        return None
    used = int((read_text(folder / use_file) or "0").strip() or 0)
    match = re.search(
        rf"^{droppable} (\d+)$", read_text(folder / "memory.stat") or "", re.MULTILINE
    )
    dropped = int(match[1]) if match else 0
    return Group(int(text), max(0, used - dropped), f"control group, {limit_file}")


def read_own_memory(root: Path = _ROOT) -> tuple[int, int | None]:
    """Resident size of this process now and at its highest, in bytes.

    ``smaps_rollup`` counts pages; ``status`` keeps counters that lag by some pages per thread,
    and the high-water mark.

    Raises:
        UmaError: If ``/proc`` is not there.
    """
    status = parse_kib(read_text(root / "proc/self/status") or "")
    resident = parse_kib(read_text(root / "proc/self/smaps_rollup") or "").get("Rss")
    resident = resident or status.get("VmRSS")
    if resident is None:
        raise UmaError("no memory figures of this process: /proc/self/status has no VmRSS")
    highest = status.get("VmHWM")
    return resident, max(highest, resident) if highest is not None else None


def read_text(path: Path | str) -> str | None:
    """What a file says, or ``None`` where it is not there or may not be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None
