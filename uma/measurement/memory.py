"""The memory of the machine by kind: what each system calls it, under one name.

``PARTS`` name the kinds that divide the whole; what they leave is shown as ``unaccounted``.
"""

import sys
from collections.abc import Mapping

from uma.measurement.metric import Metric, Unit, measured, unavailable
from uma.system import darwin, linux, linux_memory
from uma.system.darwin_memory import figures

Metrics = dict[str, Metric]

PARTS = {
    "darwin": ("wired", "app", "compressed", "cached", "free"),
    "linux": ("app", "kernel", "compressed", "cached", "free"),
}
_MEMINFO = {
    "total": "MemTotal",
    "app": "AnonPages",
    "kernel": "SUnreclaim KernelStack PageTables ?Percpu ?SecPageTables",
    "cached": "Buffers Cached SReclaimable ?SwapCached",
    "free": "MemFree",
    "reclaimable": "MemAvailable",
    "swap_used": "SwapTotal -SwapFree",
    "swap_total": "SwapTotal",
}
_LEVELS = {1: "normal", 2: "warning", 4: "critical"}
_PSI_WARNING, _PSI_CRITICAL = 10.0, 5.0  # percent: of some tasks waiting, of all; our judgment


def read_memory() -> Metrics:
    """The memory of this machine now; under 1 ms on Linux, about 30 ms on a Mac.

    Twice within a second tells a Mac nothing new: its kernel repeats its answers.
    """
    if sys.platform == "darwin":
        return darwin_memory(darwin.read_memory(), _installed())
    if sys.platform == "linux":
        return linux_memory_of(linux_memory.read_memory(), tuple(linux.read_groups()))
    return _psutil_memory()


def _installed() -> int | None:
    return darwin.sysctl_int("hw.memsize")


def darwin_memory(readings: darwin.MemoryReadings, installed_bytes: int | None) -> Metrics:
    """What these readings of a Mac say, kind by kind."""
    kinds = figures(readings.pages)
    source = readings.pages_source
    found: Metrics = {
        "total": measured(installed_bytes, "hw.memsize", "sysctl hw.memsize gave no number"),
        **{
            name: measured(value, source, f"{source} lacks a count that this needs")
            for name, value in kinds.items()
        },
    }
    found["unaccounted"] = _unaccounted(found, PARTS["darwin"])
    for name in ("used", "total"):
        found[f"swap_{name}"] = measured(
            readings.swap.get(name), "vm.swapusage", "vm.swapusage was not readable"
        )
    for name in ("compressions", "decompressions", "swapins", "swapouts"):
        missing = f"{source} does not count them"
        found[name] = measured(readings.pages.get(name), source, missing, "count")
    level = readings.pressure_level
    found["pressure"] = measured(
        _LEVELS.get(level or 0),
        "kern.memorystatus_vm_pressure_level",
        "not readable" if level is None else f"level {level} is not a known one",
        "level",
    )
    found["available_percent"] = measured(
        readings.memory_level, "kern.memorystatus_level", "not readable", "percent"
    )
    found["wired_collector_off"] = measured(
        readings.wired_collector_off,
        "iogpu.disable_wired_collector",
        "this macOS has no such setting",
        "level",
    )
    return found


def linux_memory_of(
    readings: linux_memory.MemoryReadings, groups: tuple[linux.Group, ...] = ()
) -> Metrics:
    """What these readings of a Linux machine say, kind by kind.

    ``wired`` is its nearest relative, memory that may not be paged out, which is also in the
    other kinds. Files and the kernel's own caches count as ``cached``, as in ``free``.
    """
    info = linux.parse_kib(readings.meminfo)
    zram = [sizes for text in readings.zram if (sizes := linux_memory.parse_zram(text))]
    found = {name: _of_meminfo(info, lines) for name, lines in _MEMINFO.items()}
    found["compressed"] = _compressed(info, "Zswap", [occupied for _, occupied in zram])
    found["compressed_logical"] = _compressed(info, "Zswapped", [stored for stored, _ in zram])
    found["wired"] = _unevictable(info)
    counts = linux_memory.parse_counts(readings.vmstat)
    for name, key in (("swapins", "pswpin"), ("swapouts", "pswpout")):
        found[name] = measured(counts.get(key), "/proc/vmstat", f"no {key}", "count")
    found["unaccounted"] = _unaccounted(found, PARTS["linux"])
    found |= _pressure(linux_memory.parse_pressure(readings.pressure))
    if groups:
        tightest = min(groups, key=lambda group: group.limit_bytes)
        found["group_limit"] = Metric(tightest.limit_bytes, source=tightest.source)
        found["group_used"] = Metric(tightest.used_bytes, source="control group, droppable less")
    return found


def _of_meminfo(info: Mapping[str, int], lines: str) -> Metric:
    """The sum of lines of ``/proc/meminfo``: ``-`` takes one off, ``?`` adds one if it is there."""
    words = lines.split()
    missing = [name for word in words if (name := word.lstrip("-")) not in info and word[0] != "?"]
    value = sum((-1 if word[0] == "-" else 1) * info.get(word.lstrip("-?"), 0) for word in words)
    reason = f"/proc/meminfo has no {' or no '.join(missing)}"
    source = ", ".join(words).replace(", -", " - ").replace("?", "")
    return measured(None if missing else value, source, reason)


def _compressed(info: Mapping[str, int], name: str, zram: list[int]) -> Metric:
    """zswap's bytes and those of the zram devices; kernels before 5.19 do not tell the former."""
    known = [*([info[name]] if name in info else []), *zram]
    missing = f"no {name} in /proc/meminfo, and no zram device"
    return measured(sum(known) if known else None, f"{name}, zram mm_stat", missing)


def _unevictable(info: Mapping[str, int]) -> Metric:
    name = "Unevictable" if "Unevictable" in info else "Mlocked"
    missing = "/proc/meminfo has neither Unevictable nor Mlocked"
    return measured(info.get(name), f"{name}: what may not be paged out", missing)


def _pressure(stalls: Mapping[str, Mapping[str, float]]) -> Metrics:
    """PSI over the last 10 seconds, and in a word."""
    some, full = (stalls.get(kind, {}).get("avg10") for kind in ("some", "full"))
    word = None
    if some is not None:
        word = "warning" if some > _PSI_WARNING else "normal"
        word = "critical" if (full or 0.0) > _PSI_CRITICAL else word
    missing = "this kernel has no /proc/pressure (PSI)"
    return {
        "pressure": measured(word, "PSI avg10", missing, "level", estimated=True),
        "pressure_some": measured(some, "PSI some avg10", missing, "percent"),
        "pressure_full": measured(full, "PSI full avg10", missing, "percent"),
    }


def _unaccounted(found: Metrics, parts: tuple[str, ...]) -> Metric:
    """What the known parts leave of the whole: firmware, and what the kernel does not attribute."""
    whole = found["total"].size
    sizes = {part: size for part in parts if (size := found[part].size) is not None}
    if whole is None or "free" not in sizes:
        return unavailable("the total, or what is free, is unknown")
    return Metric(whole - sum(sizes.values()), source=f"total less {', '.join(sizes)}")


def _psutil_memory() -> Metrics:
    """Other systems: what psutil tells."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = {
        "total": memory.total,
        "used": memory.used,
        "free": memory.free,
        "reclaimable": memory.available,
        "swap_used": swap.used,
        "swap_total": swap.total,
    }
    metrics = {name: Metric(value, source="psutil") for name, value in found.items()}
    units: dict[str, Unit] = {"wired": "bytes", "compressed": "bytes", "pressure": "level"}
    reason = "psutil does not tell it on this system"
    return metrics | {name: unavailable(reason, unit) for name, unit in units.items()}
