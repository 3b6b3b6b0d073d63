"""Findings, on machines as the case list describes them. Sizes are of the reports, where given."""

import os
from dataclasses import replace

import pytest

from uma.machine import Machine, budget_of
from uma.measurement.change import (
    default_pool_bytes,
    ended_by_signal,
    growing_pool,
    kept_after_unload,
)
from uma.measurement.diagnosis import diagnose
from uma.measurement.gpu import no_gpu
from uma.measurement.growth import growth
from uma.measurement.metric import Metric, unavailable
from uma.measurement.process import NAMES
from uma.measurement.snapshot import MlxCounters, Snapshot, mlx_metrics
from uma.measurement.tree import ProcessTree
from uma.units import GIB, MIB

MAC = Machine(
    name="Apple M4 Max, 128 GiB",
    kind="unified",
    backend="metal",
    memory_bytes=128 * GIB,
    limit_bytes=107 * GIB,
    limit_source="the default of macOS 26.1 for this memory",
    available_bytes=90 * GIB,
    os="macOS",
    os_version="26.1",
)
CALM = {
    "wired": 4 * GIB,
    "compressed_logical": 0,
    "swap_used": 0,
    "reclaimable": 90 * GIB,
    "pressure": "normal",
    "swapins": 0,
    "swapouts": 0,
    "wired_collector_off": 0,
}


def process(pid: int, label: str, footprint: int, resident: int | None = None) -> ProcessTree:
    metrics = {name: unavailable("not told") for name in NAMES}
    metrics["footprint"] = Metric(footprint)
    metrics["resident"] = Metric(footprint if resident is None else resident)
    return ProcessTree(pid, label, (pid,), metrics)


def snapshot(
    machine: Machine = MAC,
    *,
    seconds: float = 0.0,
    gpu: dict[str, object] | None = None,
    processes: tuple[ProcessTree, ...] = (),
    counters: MlxCounters | None = None,
    whole: bool = True,
    **memory: object,
) -> Snapshot:
    units = {"swapins": "count", "swapouts": "count", "pressure": "level"}
    kinds = {
        name: Metric(value, units.get(name, "bytes"), "here")  # type: ignore[arg-type]
        for name, value in {**CALM, **memory}.items()
    }
    gpu_units = {"utilization": "percent", "power": "W", "recoveries": "count"}
    figures = {
        name: Metric(value, gpu_units.get(name, "bytes"))  # type: ignore[arg-type]
        for name, value in (gpu or {}).items()
    }
    return Snapshot(
        seconds=seconds,
        machine=machine,
        budget=budget_of(machine),
        memory=kinds,
        gpu=no_gpu() | figures,
        processes=processes,
        mlx=mlx_metrics(counters),
        whole=whole,
    )


def names(*history: Snapshot) -> list[str]:
    return [finding.name for finding in diagnose(history)]


def test_a_calm_machine_has_no_findings() -> None:
    server = process(7, "python3 mlx_lm.server", 60 * GIB)
    busy = {"allocated": 60 * GIB, "utilization": 99, "power": 45.0}
    assert names(snapshot(gpu=busy, wired=64 * GIB, processes=(server,))) == []
    assert diagnose([]) == []


# case of the case list, a machine in that state, the finding
CASES = [
    (
        "A1",
        snapshot(gpu={"allocated": 60 * GIB, "utilization": 80}, compressed_logical=30 * GIB),
        "not_wired",
    ),
    (
        "A7",
        snapshot(gpu={"allocated": 60 * GIB, "utilization": 0}, wired=5 * GIB),
        "wired_collector",
    ),
    ("B8", snapshot(swap_used=12 * GIB, pressure="critical"), "memory_pressure"),
    (
        "D1",
        snapshot(
            processes=(process(os.getpid(), "python3", 6 * GIB),),
            counters=MlxCounters(active=2 * GIB, peak=3 * GIB, pool=GIB),
        ),
        "beyond_mlx",
    ),
    (
        "D5",
        snapshot(processes=(process(7, "python3", 13 * GIB, resident=66 * MIB),)),
        "misleading_resident",
    ),
    (
        "D14",
        snapshot(processes=(process(7, "trusty", 13 * GIB, resident=66 * MIB),)),
        "misleading_resident",
    ),
    (
        "I2",
        snapshot(
            replace(MAC, limit_source="sysctl iogpu.wired_limit_mb", limit_bytes=120 * GIB),
            counters=MlxCounters(0, 0, 0, working_set=107 * GIB),
        ),
        "limit_override_ignored",
    ),
    (
        "I3",
        snapshot(
            processes=(
                process(7, "python3 mlx_lm.server", 20 * GIB),
                process(8, "llama-server", 30 * GIB),
            )
        ),
        "several_models",
    ),
    (
        "I4",
        snapshot(
            gpu={"allocated": 100 * GIB, "utilization": 100, "power": 3.2},
            wired=102 * GIB,
            processes=(process(7, "Safari", GIB),),
        ),
        "held_by_nobody",
    ),
    (
        "I5",
        snapshot(
            replace(MAC, available_bytes=10 * GIB),
            processes=(process(7, "ollama", 90 * GIB),),
            reclaimable=10 * GIB,
        ),
        "others_hold_the_budget",
    ),
    ("GPU reset", snapshot(gpu={"recoveries": 21}), "gpu_reset"),
]


@pytest.mark.parametrize(("case", "state", "name"), CASES, ids=[f"{c}-{n}" for c, _, n in CASES])
def test_a_reported_state_is_found_with_its_evidence(case: str, state: Snapshot, name: str) -> None:
    (finding,) = [found for found in diagnose([state]) if found.name == name]
    assert finding.evidence
    assert finding.remedy
    assert finding.text.endswith(".")


def test_work_of_a_killed_process_is_critical_and_its_power_is_shown() -> None:
    state = next(state for _, state, name in CASES if name == "held_by_nobody")
    (finding,) = diagnose([state])
    assert finding.severity == "critical"
    assert "GPU power: 3.2 W" in finding.evidence
    assert "a restart returns it" in finding.remedy


def test_memory_held_by_a_process_that_is_listed_is_held_by_somebody() -> None:
    owner = process(7, "python3", 99 * GIB)
    gpu = {"allocated": 100 * GIB, "utilization": 100, "power": 3.2}
    assert "held_by_nobody" not in names(snapshot(gpu=gpu, wired=102 * GIB, processes=(owner,)))


def test_where_only_some_processes_were_asked_for_nobody_else_is_accused() -> None:
    gpu = {"allocated": 100 * GIB, "utilization": 100, "power": 3.2}
    asked = (process(7, "Safari", GIB),)
    assert names(snapshot(gpu=gpu, wired=102 * GIB, processes=asked, whole=False)) == []


def test_where_no_process_was_listed_nobody_is_accused_either() -> None:
    gpu = {"allocated": 100 * GIB, "utilization": 100, "power": 3.2}
    assert names(snapshot(gpu=gpu, wired=102 * GIB)) == []


def test_an_idle_model_that_was_unwired_and_compressed_is_explained_and_not_blamed() -> None:
    gpu = {"allocated": 60 * GIB, "utilization": 0}
    assert names(snapshot(gpu=gpu, compressed_logical=30 * GIB)) == ["wired_collector"]


def test_this_process_is_not_another_one_that_holds_the_budget() -> None:
    own = process(os.getpid(), "python3", 90 * GIB)
    machine = replace(MAC, available_bytes=10 * GIB)
    assert names(snapshot(machine, processes=(own,))) == []


def test_idle_unwiring_is_a_note_and_never_a_leak() -> None:
    state = next(state for _, state, name in CASES if name == "wired_collector")
    (finding,) = diagnose([state])
    assert finding.severity == "note"
    assert "no leak" in finding.text


@pytest.mark.parametrize(
    "change",
    [
        {"machine": replace(MAC, os_version="15.5")},
        {"wired_collector_off": 1},
        {"gpu": {"allocated": 60 * GIB, "utilization": 90}},
    ],
    ids=["macOS 15", "collector off", "GPU busy"],
)
def test_without_the_collector_nothing_is_explained_by_it(change: dict[str, object]) -> None:
    state = {"gpu": {"allocated": 60 * GIB, "utilization": 0}, "wired": 5 * GIB} | change
    assert "wired_collector" not in names(snapshot(**state))  # type: ignore[arg-type]


def test_what_is_unknown_makes_no_finding() -> None:
    nothing = snapshot()
    unknown = {name: unavailable("not told") for name in nothing.memory}
    assert names(replace(nothing, memory=unknown)) == []
    gpu = {"allocated": 100 * GIB, "utilization": 100, "power": 3.2}
    held = snapshot(gpu=gpu, compressed_logical=30 * GIB, processes=(process(7, "Safari", GIB),))
    without = {**held.memory, "wired": unavailable("not told")}
    assert names(replace(held, memory=without)) == []


def test_swapping_is_seen_by_what_moved_between_two_looks() -> None:
    before = snapshot(seconds=0, swap_used=GIB, swapouts=100)
    after = snapshot(seconds=10, swap_used=3 * GIB, swapouts=90_000)
    (finding,) = diagnose([before, after])
    assert (finding.name, finding.severity) == ("swapping", "critical")
    assert "swap grew by: 2.00 GiB" in finding.evidence
    assert "swapouts in 10 s: 89,900" in finding.evidence


def test_old_swap_that_does_not_move_is_a_note_on_a_page_and_nothing_in_a_watch() -> None:
    page = snapshot(swap_used=3 * GIB)
    assert [f.severity for f in diagnose([page])] == ["note"]
    assert names(page, replace(page, seconds=5)) == []


# --- growth ---------------------------------------------------------------------------------


def line(
    rate: float, *, noise: int = 0, seconds: int = 60, start: int = 4 * GIB
) -> list[tuple[float, int]]:
    """A size that grows by ``rate`` bytes a second, up and down by ``noise``."""
    return [(float(t), round(start + rate * t) + noise * (-1) ** t) for t in range(seconds)]


def test_the_slope_is_the_one_that_statistics_computes() -> None:
    import statistics

    samples = line(3 * MIB, noise=20 * MIB)
    found = growth(samples)
    assert found is not None
    theirs = statistics.linear_regression([t for t, _ in samples], [s for _, s in samples])
    assert found.bytes_per_s == pytest.approx(theirs.slope, rel=1e-9)


def test_growth_by_0_15_gib_a_minute_is_sure_within_a_minute() -> None:
    found = growth(line(0.15 * GIB / 60, noise=2 * MIB))
    assert found is not None
    assert found.sure
    assert found.bytes_per_minute == pytest.approx(0.15 * GIB, rel=0.01)


@pytest.mark.parametrize("noise", [0, 50 * MIB, GIB])
def test_what_only_swings_does_not_grow(noise: int) -> None:
    found = growth(line(0.0, noise=noise))
    assert found is not None
    assert not found.sure


def test_too_few_looks_tell_nothing() -> None:
    assert growth(line(GIB, seconds=7)) is None
    assert growth([(i / 10, i * GIB) for i in range(50)]) is None


def test_growth_that_fills_a_pool_levels_off() -> None:
    samples = [(float(t), 4 * GIB + min(t, 30) * 100 * MIB) for t in range(60)]
    found = growth(samples)
    assert found is not None
    assert found.levels_off


def test_a_growing_process_is_named_with_its_rate() -> None:
    history = [
        snapshot(seconds=t, processes=(process(7, "python3 train.py", size),))
        for t, size in line(0.15 * GIB / 60)
    ]
    (finding,) = diagnose(history)
    assert finding.name == "grows"
    assert "python3 train.py (7) grows 153.6 MiB a minute" in finding.text


def test_a_pool_that_grows_is_cache_and_told_where_it_stops() -> None:
    samples = [(float(t), 4 * GIB, t * 50 * MIB) for t in range(60)]
    found = growing_pool(samples, 8 * GIB)
    assert found is not None
    assert found.name == "pool_grows"
    assert "cache, no leak; it will stop at 8.00 GiB" in found.text


def test_active_memory_that_grows_is_no_cache() -> None:
    samples = [(float(t), 4 * GIB + t * 50 * MIB, t * 50 * MIB) for t in range(60)]
    found = growing_pool(samples, 8 * GIB)
    assert found is not None
    assert found.name == "active_grows"


def test_memory_that_swings_between_active_and_pool_is_neither() -> None:
    samples = [(float(t), (3 + t % 2) * GIB, (2 - t % 2) * GIB) for t in range(60)]
    assert growing_pool(samples, 8 * GIB) is None


def test_a_pool_without_a_limit_of_its_own_stops_at_mlxs_default() -> None:
    assert default_pool_bytes(MAC) == 128 * GIB * 95 // 100
    assert default_pool_bytes(replace(MAC, limit_bytes=50 * GIB)) == 75 * GIB


def test_mlx_on_a_cpu_keeps_the_default_pool_that_it_says() -> None:
    mx = pytest.importorskip("mlx.core")
    if "max_recommended_working_set_size" in mx.device_info():
        pytest.skip("this MLX runs on a GPU")
    default = mx.set_cache_limit(1 << 20)
    mx.set_cache_limit(default)
    assert default == default_pool_bytes(replace(MAC, backend="cpu"))


@pytest.mark.parametrize(
    ("code", "lowest", "swap", "severity", "word"),
    [
        (-9, 200 * MIB, 0, "critical", "SIGKILL"),
        (-6, 20 * GIB, 9 * GIB, "critical", "SIGABRT"),
        (-15, 20 * GIB, 0, "note", "SIGTERM"),
        (-63, None, 0, "note", "signal 63"),
    ],
)
def test_a_signal_that_ended_a_command_is_told_with_the_memory_there_was(
    code: int, lowest: int | None, swap: int, severity: str, word: str
) -> None:
    found = ended_by_signal(code, lowest, swap)
    assert found is not None
    assert found.severity == severity
    assert found.text.startswith(word)
    assert ("memory was short" in found.text) == (severity == "critical")


def test_a_command_that_ended_by_itself_was_ended_by_no_signal() -> None:
    assert ended_by_signal(1, 0, 9 * GIB) is None


def test_memory_that_stays_wired_after_a_model_was_unloaded_is_told() -> None:
    before, after = snapshot(wired=4 * GIB), snapshot(wired=20 * GIB)
    found = kept_after_unload(before, after, freed_bytes=17 * GIB)
    assert found is not None
    assert "16.00 GiB stay wired" in found.text
    assert kept_after_unload(before, snapshot(wired=5 * GIB), freed_bytes=17 * GIB) is None
