"""macOS: the memory of a process, from the kernel's structures or the tool ``footprint``.

Pure; a field that a structure or text lacks is ``None``.
"""

import re
import struct
from dataclasses import dataclass, field

from uma.units import GIB, KIB, MIB, TIB

# struct rusage_info_vN: 16 bytes of uuid, then 64-bit counters, so that each version begins with
# the one before (xnu-11417.101.15, bsd/sys/resource.h).
RUSAGE_SIZES = {0: 96, 1: 144, 2: 160, 3: 232, 4: 296, 5: 304, 6: 464}
_RUSAGE = {
    "pageins": 48,
    "wired": 56,
    "resident": 64,
    "footprint": 72,
    "start_abstime": 80,
    "footprint_peak": 240,
    "footprint_interval_peak": 280,
    "neural_footprint": 368,
}

# struct task_vm_info, packed to 4 bytes (osfmk/mach/task_info.h), 372 bytes at revision 7.
TASK_VM_INFO_SIZE = 372
_TASK_VM_INFO = {
    "resident": 16,
    "internal": 48,
    "compressed": 120,
    "footprint": 144,
    "footprint_peak": 168,
    "graphics": 272,
    "graphics_compressed": 280,
    "graphics_outside_footprint": 288,
    "limit_remaining": 336,
}

_UNITS = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB, "TB": TIB}  # of the tool: powers of 1,024
_SIZE = r"([0-9]{1,15}(?:[.,][0-9]{1,6})?) (B|[KMGT]B)"
_HEAD = re.compile(
    rf"(.{{1,1024}}?) \[([0-9]{{1,9}})\]: \S+\s+Footprint: {_SIZE} "
    r"\(([0-9]{1,9}) bytes per page\)"
)
_TOTAL = re.compile(rf"\s*(phys_footprint(?:_peak)?): {_SIZE}\s*")
_CATEGORY = re.compile(rf"\s*{_SIZE}\s+{_SIZE}\s+{_SIZE}\s+[0-9]{{1,12}}\s{{2,}}(\S.*?)\s*")


@dataclass(slots=True)
class Footprint:
    """A process as ``footprint`` prints it; sizes are rounded unless ``exact`` (``-f bytes``)."""

    name: str
    pid: int
    footprint: int
    exact: bool
    page_size: int
    phys_footprint: int | None = None
    phys_footprint_peak: int | None = None
    categories: dict[str, int] = field(default_factory=dict)


def decode_rusage(buffer: bytes) -> dict[str, int | None]:
    """Bytes of a ``rusage_info`` of any version. ``footprint`` contains Metal's buffers.

    ``resident`` does not, and ``wired`` is what the process itself locked (mlock): memory that
    the GPU wires is counted for the whole machine only.
    """
    return {name: _u64(buffer, offset) for name, offset in _RUSAGE.items()}


def decode_task_vm_info(buffer: bytes) -> dict[str, int | None]:
    """Bytes of a ``task_vm_info`` as far as the kernel filled it; of the own process only.

    ``graphics`` is what the GPU's buffers add to the footprint.
    """
    return {name: _u64(buffer, offset) for name, offset in _TASK_VM_INFO.items()}


def _u64(buffer: bytes, offset: int) -> int | None:
    return struct.unpack_from("<Q", buffer, offset)[0] if offset + 8 <= len(buffer) else None


def parse_footprint(text: str) -> tuple[list[Footprint], list[int]]:
    """The processes of ``footprint``'s output, and the process ids that it could not look into."""
    failed = re.findall(r"Unable to analyze process with pid ([0-9]{1,9})", text)
    found: list[Footprint] = []
    for line in text.splitlines():
        if match := _HEAD.match(line):
            name, pid, value, unit, page = match.groups()
            size = _bytes(value, unit)
            found.append(Footprint(name, int(pid), size, unit == "B", int(page)))
        elif not found:
            continue
        elif match := _TOTAL.fullmatch(line):
            setattr(found[-1], match[1], _bytes(match[2], match[3]))
        elif match := _CATEGORY.fullmatch(line):
            found[-1].categories[match[7]] = _bytes(match[1], match[2])
    return found, [int(pid) for pid in failed]


def _bytes(value: str, unit: str) -> int:
    return round(float(value.replace(",", ".")) * _UNITS[unit])
