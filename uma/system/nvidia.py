"""NVIDIA cards: what the driver says of their memory and link.

NVML is asked through ``nvidia-ml-py``, else the tool ``nvidia-smi``, both with the meanings of
NVML's ``nvmlMemory_v2_t``: ``used`` is held by programs, ``reserved`` by the driver itself, and a
program can have the rest.
"""

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from uma.units import MIB

# Signs of a driver: Linux, WSL.
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
# Where the tool is when no PATH names it: WSL mounts it, older Windows drivers kept it apart.
_TOOLS = (
    "/usr/lib/wsl/lib/nvidia-smi",
    r"C:\Windows\System32\nvidia-smi.exe",
    r"C:\Program Files\NVIDIA Corporation\NVSMI\nvidia-smi.exe",
)
_TIMEOUT_S = 5

# A driver that does not know a field refuses the whole query: memory.reserved is from R510 on.
_FIELDS = (
    "name,memory.total,memory.used,memory.reserved,pcie.link.gen.max,pcie.link.width.max,"
    "mig.mode.current,utilization.gpu,power.draw"
)
_OLD_FIELDS = "name,memory.total,memory.used"

# PCI Express, bytes per second of one lane in one direction, after its line coding.
_LANE_BYTES_PER_S = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_600_000,
    4: 1_969_200_000,
    5: 3_938_400_000,
    6: 7_563_000_000,
}


@dataclass(frozen=True, slots=True)
class Card:
    """A card and its memory; ``None`` where it shares the machine's memory (GB10), or unknown.

    ``link_bytes_per_s`` is what its PCI Express carries in one direction at most. With ``mig`` the
    card is divided, and a program sees less than this. ``busy_percent`` is the share of the time
    in which any kernel ran.
    """

    name: str
    memory_bytes: int | None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    link_bytes_per_s: int | None = None
    mig: bool = False
    busy_percent: float | None = None
    power_w: float | None = None


def read_cards() -> tuple[Card, ...]:
    """The cards of this machine; none, at no cost, where there is no driver."""
    tool = _tool()
    if tool is None and sys.platform != "win32" and not any(map(_exists, _DEVICE_FILES)):
        return ()
    cards = _read_nvml()
    if cards is None and tool is not None:
        cards = read_with_tool(tool)
    return cards or ()


def _read_nvml() -> tuple[Card, ...] | None:
    """The cards that NVML lists, or ``None`` where it cannot be loaded or does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(_nvml_card(pynvml, handle) for handle in handles)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_card(pynvml, handle) -> Card:  # type: ignore[no-untyped-def]
    """One card; GB10 answers "not supported" where others tell their memory."""
    name = pynvml.nvmlDeviceGetName(handle)
    total = used = reserved = link = None
    mig = False
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        total, used, reserved = memory.total, memory.used, memory.reserved
    except pynvml.NVMLError_NotSupported:
        pass
    except pynvml.NVMLError_FunctionNotFound:  # a driver before R510
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = memory.total, memory.used
    with contextlib.suppress(pynvml.NVMLError):
        link = link_bytes_per_s(
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )
    with contextlib.suppress(pynvml.NVMLError):
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    busy = power = None
    with contextlib.suppress(pynvml.NVMLError):
        busy = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(pynvml.NVMLError):
        power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return Card(name, total, used, reserved, link, mig, busy, power)


def read_process_bytes() -> dict[int, int]:
    """Memory of the cards by process, where the driver tells it (GB10 does, Windows does not)."""
    pynvml = _kept_nvml() if any(map(_exists, _DEVICE_FILES)) else None
    return {} if pynvml is None else process_bytes(pynvml)


@cache
def _kept_nvml() -> Any:
    """NVML, initialized until this process ends, because that takes longer than to ask it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def process_bytes(pynvml: Any) -> dict[int, int]:
    """What NVML says that each process holds, of all cards together."""
    sizes: dict[int, int] = {}
    too_old = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)  # the driver
    with contextlib.suppress(pynvml.NVMLError, too_old):
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                known = known_bytes(process.usedGpuMemory)
                if known is not None:
                    sizes[process.pid] = sizes.get(process.pid, 0) + known
    return sizes


def known_bytes(size: int | None) -> int | None:
    """``size``, or ``None`` for NVML's "not available", all bits set in older bindings.

    >>> known_bytes(5), known_bytes(2**64 - 1)
    (5, None)
    """
    return None if size is None or size >= 1 << 63 else size


def read_with_tool(tool: str) -> tuple[Card, ...]:
    """The cards that ``nvidia-smi`` lists; none where it fails."""
    for names in (_FIELDS, _OLD_FIELDS):
        text = _output(tool, f"--query-gpu={names}", "--format=csv,noheader")
        if text is not None:
            return parse_cards(text)
    return ()


def parse_cards(text: str) -> tuple[Card, ...]:
    """Lines of ``name, total[, used[, reserved, generation, lanes, mig, busy, power]]``.

    >>> parse_cards("NVIDIA GB10, [N/A]\\n")[0].memory_bytes is None
    True
    >>> parse_cards("NVIDIA H100, 81559 MiB, 0 MiB, 479 MiB, 5, 16, Disabled\\n")[0].reserved_bytes
    502267904
    """
    return tuple(
        _card([cell.strip() for cell in line.split(",")])
        for line in text.splitlines()
        if "," in line
    )


def _card(cells: Sequence[str]) -> Card:
    name, total, used, reserved, generation, lanes, mig, busy, power = [*cells, *[""] * 8][:9]
    link = None
    if re.fullmatch("[0-9]{1,2}", generation) and re.fullmatch("[0-9]{1,2}", lanes):
        link = link_bytes_per_s(int(generation), int(lanes))
    sizes = (_mib(total), _mib(used), _mib(reserved))
    return Card(name, *sizes, link, mig == "Enabled", number(busy), number(power))


def number(cell: str) -> float | None:
    """What a cell measures, without its unit; ``None`` for ``[N/A]`` and ``Not Supported``.

    >>> number("11.17 W"), number("0 %"), number("[N/A]")
    (11.17, 0.0, None)
    """
    match = re.match(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)(?![0-9.,])", cell)
    return float(match[1]) if match else None


def link_bytes_per_s(generation: int, lanes: int) -> int | None:
    """What PCI Express of that generation and width carries in one direction, or ``None``.

    >>> link_bytes_per_s(4, 16)
    31507200000
    """
    lane = _LANE_BYTES_PER_S.get(generation)
    return None if lane is None else lane * lanes


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows: the driver sees the card, not what Windows holds."""
    try:
        release = Path("/proc/sys/kernel/osrelease").read_text()
    except OSError:
        return False
    return "microsoft" in release.lower()


def _mib(cell: str) -> int | None:
    size = re.fullmatch(r"([0-9]{1,12}) MiB", cell)
    return int(size[1]) * MIB if size else None


def _tool() -> str | None:
    """Where ``nvidia-smi`` is; without ``shutil``, whose import takes longer than the search."""
    name = "nvidia-smi.exe" if sys.platform == "win32" else "nvidia-smi"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    paths = [os.path.join(folder, name) for folder in folders if folder]
    found = (path for path in (*paths, *_TOOLS) if os.path.isfile(path))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def _exists(path: str) -> bool:
    return Path(path).exists()


def _output(*command: str) -> str | None:
    """What a tool prints, or ``None`` where it fails or hangs."""
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
