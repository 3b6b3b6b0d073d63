"""Checks of this installation and machine that need no model: each a state, a line, a remedy."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uma.catalog.observed import KnownBad, known_bad
from uma.machine import Budget, Machine
from uma.units import GIB, format_gib

State = Literal["ok", "note", "warning", "failure"]

HUB_TIMEOUT_S = 3.0
PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "transformers", "gguf", "numpy", "huggingface_hub")
LOW_DISK_BYTES = 10 * GIB
HEAVY_BYTES = GIB  # a program that holds as much may compete with a model


@dataclass(frozen=True, slots=True)
class Check:
    """``text`` is shown here; it may name a folder or a program, and is in no bundle."""

    name: str
    state: State
    text: str
    remedy: str | None = None


def installed_versions() -> dict[str, str]:
    """Of the packages that running a model needs, those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_python(machine: Machine) -> Check:
    """Python's version, and on a Mac whether it is built for it: Rosetta's Python has no MLX."""
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if machine.backend == "metal" and platform.machine() == "x86_64":
        return Check(
            "python",
            "failure",
            f"{text}: built for Intel, so that MLX cannot be installed",
            "install Python for Apple silicon, and uma with that",
        )
    return Check("python", "ok", text)


def check_packages(installed: Mapping[str, str]) -> Check:
    """MLX and mlx-lm are there; on macOS MLX's two packages are of one version."""
    text = ", ".join(f"{name} {number}" for name, number in installed.items()) or "none installed"
    missing = [name for name in ("mlx", "mlx-lm") if name not in installed]
    if missing:
        remedy = (
            "pip install mlx mlx-lm"
            if sys.platform == "darwin"
            else "pip install 'mlx[cpu]' mlx-lm"
        )
        return Check(
            "packages",
            "warning",
            f"{text}; {', '.join(missing)} missing: models can be estimated, not run",
            remedy,
        )
    metal = installed.get("mlx-metal")
    if metal not in (None, installed["mlx"]):
        return Check(
            "packages",
            "failure",
            f"{text}: MLX's two packages differ",
            "pip install --force-reinstall mlx mlx-metal",
        )
    return Check("packages", "ok", text)


def check_known_bad(
    installed: Mapping[str, str], machine: Machine, rows: Iterable[KnownBad] | None = None
) -> list[Check]:
    """What is known of these versions on this machine (``uma/data/known_bad.csv``)."""
    versions = dict(installed)
    if machine.os == "macOS" and machine.os_version:
        versions["macOS"] = machine.os_version
    chip = (machine.chip or "").removeprefix("Apple ")
    found = [
        Check(
            "versions",
            row.severity,
            f"{row.package} {versions[row.package]}: {row.effect} ({row.source.split(' ; ')[0]})",
            row.remedy,
        )
        for row in (known_bad() if rows is None else rows)
        if _affects(row, versions) and row.os in ("", machine.os) and chip.startswith(row.chip)
    ]
    return found or [Check("versions", "ok", "no known fault of these versions on this machine")]


def _affects(row: KnownBad, versions: Mapping[str, str]) -> bool:
    if row.package not in versions:
        return False
    if not _within(versions[row.package], row.from_version, row.before_version):
        return False
    beside = re.fullmatch(r"(.+?)(<|>=)(.+)", row.beside)
    if beside is None:
        return True
    package, sign, number = beside.groups()
    first, before = (number, "") if sign == ">=" else ("", number)
    return package in versions and _within(versions[package], first, before)


def _within(version: str, first: str, before: str) -> bool:
    """Whether ``first <= version < before``; an empty bound is none.

    >>> _within("0.32.1.dev2026", "0.32", "0.32.2"), _within("26.4", "26.0", "")
    (True, True)
    """
    number = _numbers(version)
    return (not first or number >= _numbers(first)) and (not before or number < _numbers(before))


def _numbers(version: str) -> tuple[int, ...]:
    numbers = map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
    return (*numbers, 0, 0, 0)[:3]


def check_memory(machine: Machine, budget: Budget) -> list[Check]:
    """The limit in force and the budget within it; an override that was not believed."""
    text = (
        f"{format_gib(machine.memory_bytes)} of memory, limit {format_gib(budget.limit_bytes)} "
        f"({machine.limit_source}), budget {format_gib(budget.budget_bytes)} ({budget.winner})"
    )
    checks = [Check("memory", "ok", text)]
    checks += [Check("memory", "warning", note) for note in machine.notes]
    if budget.budget_bytes < GIB:
        remedy = "close other programs"
        checks.append(Check("memory", "warning", "less than 1 GiB is left for a model", remedy))
    return checks


def check_disk(name: str, folder: Path) -> Check:
    """Whether a folder can be written, and what its disk has left."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    text = f"{format_gib(free)} free for {name}, in {folder}"
    if not os.access(place, os.W_OK):
        return Check(
            "disk",
            "warning",
            f"{text}: cannot be written",
            "give another folder: UMA_CACHE_DIR, UMA_STATE_DIR",
        )
    if free < LOW_DISK_BYTES:
        return Check(
            "disk",
            "warning",
            f"{text}: little for models",
            "free some, or give another disk: UMA_CACHE_DIR",
        )
    return Check("disk", "ok", text)


def check_hub(timeout_s: float = HUB_TIMEOUT_S) -> Check:
    """Whether the hub answers within ``timeout_s`` in all, name lookup included."""
    import threading

    from uma.checkpoint.hub import endpoint, is_offline

    if is_offline():
        return Check("hub", "note", "HF_HUB_OFFLINE is set: models come from this disk alone")
    answers: list[str] = []
    # A name lookup has no timeout of its own, so the whole question stands in a thread.
    asking = threading.Thread(
        target=lambda: answers.append(_ask(endpoint(), timeout_s)), daemon=True
    )
    asking.start()
    asking.join(timeout_s)
    answer = answers[0] if answers else f"no answer within {timeout_s:g} s"
    if answer == "":
        return Check("hub", "ok", f"{endpoint()} answers")
    remedy = "models on this disk still run; a proxy is set as HTTPS_PROXY, a mirror as HF_ENDPOINT"
    return Check("hub", "warning", f"{endpoint()}: {answer}", remedy)


def _ask(url: str, timeout_s: float) -> str:
    """Nothing if a server answers, whatever it says; else why not."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=timeout_s):
            return ""
    except HTTPError as error:
        return "" if error.code < 500 else f"error {error.code}"
    except (URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def check_processes() -> Check:
    """Other programs that hold 1 GiB and more, the largest first."""
    from uma.measurement.tree import held_bytes, read_largest, read_processes

    rows = read_largest(read_processes(), 6)
    sizes = [(held_bytes(row.metrics), row.label) for row in rows if row.pid != os.getpid()]
    heavy = [f"{label} {format_gib(size)}" for size, label in sizes if size >= HEAVY_BYTES]
    if not heavy:
        return Check("programs", "ok", "no other program holds 1 GiB or more")
    held = ", ".join(heavy)
    return Check("programs", "note", f"held by others: {held}", "close what is not needed")
