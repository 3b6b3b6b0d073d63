"""The figures of machines and processes, of recordings and of this machine against its kernel."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from uma.machine import linux_of, mac_of
from uma.measurement import memory as machine_memory
from uma.measurement.dram import traffic_metrics, traffic_of
from uma.measurement.gpu import amd_gpu, darwin_gpu, no_gpu, nvidia_gpu
from uma.measurement.memory import _psutil_memory
from uma.measurement.metric import Metric, measured, total, unavailable
from uma.measurement.process import (
    _psutil_metrics,
    darwin_process_metrics,
    graphics_metric,
    linux_process_metrics,
    process_metrics,
    sum_metrics,
)
from uma.measurement.tree import read_processes, read_trees, roots_named, tree_of
from uma.system import amdgpu, darwin, linux, linux_memory, nvidia
from uma.system.darwin_gpu import parse_ioreg
from uma.system.darwin_ioreport import Channel
from uma.system.darwin_memory import parse_swapusage, parse_vm_stat
from uma.system.dram_traffic import CANDIDATES
from uma.system.process import Process
from uma.units import GIB, MIB

DATA = Path(__file__).parent / "data" / "measure"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def mac_memory(vm_stat: str, **more: object) -> darwin.MemoryReadings:
    pages = parse_vm_stat(text(f"macos/{vm_stat}"))
    swap = parse_swapusage(text("macos/swapusage.txt"))
    return replace(darwin.MemoryReadings(pages, "vm_stat", swap), **more)  # type: ignore[arg-type]


def sizes(metrics: dict[str, Metric]) -> dict[str, int | None]:
    return {name: metric.size for name, metric in metrics.items()}


# --- the machine ----------------------------------------------------------------------------


def test_the_parts_of_a_macs_memory_and_what_they_leave_are_all_of_it() -> None:
    for name, installed in (("vm_stat_32g_macos26.txt", 32), ("vm_stat_48g_mte.txt", 48)):
        found = sizes(machine_memory.darwin_memory(mac_memory(name), installed * GIB))
        parts = sum(found[part] or 0 for part in machine_memory.PARTS["darwin"])
        assert parts + (found["unaccounted"] or 0) == found["total"] == installed * GIB
        assert (
            0.015 < (found["unaccounted"] or 0) / (installed * GIB) < 0.025
        )  # of a firmware's size


def test_a_mac_that_compresses_much_has_less_than_its_inactive_pages_promise() -> None:
    found = machine_memory.darwin_memory(mac_memory("vm_stat_48g_mte.txt"), 48 * GIB)
    pages = parse_vm_stat(text("macos/vm_stat_48g_mte.txt"))
    as_psutil_has_it = (pages["pages_inactive"] + pages["pages_free"]) * 16384
    assert found["reclaimable"].size == (167743 + 431704 + 14563) * 16384
    assert as_psutil_has_it > 2 * (found["reclaimable"].size or 0)


def test_a_missing_line_costs_the_figures_that_need_it_and_says_so() -> None:
    found = machine_memory.darwin_memory(mac_memory("vm_stat_8g_swapping_partial.txt"), 8 * GIB)
    assert found["free"].value is None
    assert found["free"].reason == "vm_stat lacks a count that this needs"
    assert found["unaccounted"].value is None
    assert found["wired"].size == 84856 * 16384
    assert found["swapouts"].value == 85936


def test_no_answer_at_all_leaves_every_figure_unknown_and_none_zero() -> None:
    nothing = darwin.MemoryReadings({}, "vm_stat", {})
    for metric in machine_memory.darwin_memory(nothing, None).values():
        assert metric.value is None
        assert metric.reason
    for name, metric in machine_memory.linux_memory_of(
        linux_memory.MemoryReadings("", "", "")
    ).items():
        assert metric.value is None, name
        assert metric.reason


@pytest.mark.parametrize(
    ("level", "word"), [(1, "normal"), (2, "warning"), (4, "critical"), (3, None), (None, None)]
)
def test_pressure_is_the_kernels_own_word_and_unknown_otherwise(
    level: int | None, word: str | None
) -> None:
    readings = mac_memory("vm_stat_32g_macos26.txt", pressure_level=level, memory_level=88)
    found = machine_memory.darwin_memory(readings, 32 * GIB)
    assert found["pressure"].value == word
    assert (found["pressure"].reason is None) == (word is not None)
    assert found["available_percent"].value == 88  # on a machine of which 31 % were free
    assert (found["free"].size or 0) / (32 * GIB) == pytest.approx(0.31, abs=0.005)


def linux_readings(**more: object) -> linux_memory.MemoryReadings:
    readings = linux_memory.MemoryReadings(
        meminfo=text("linux/proc_meminfo_x86_24g.txt"),
        vmstat="pswpin 3\npswpout 5\n",
        pressure=text("linux/pressure_memory.txt"),
    )
    return replace(readings, **more)  # type: ignore[arg-type]


def test_the_parts_of_a_linux_machine_and_what_they_leave_are_all_of_it() -> None:
    found = sizes(machine_memory.linux_memory_of(linux_readings()))
    parts = sum(found[part] or 0 for part in machine_memory.PARTS["linux"])
    assert parts + (found["unaccounted"] or 0) == found["total"] == 24684092 * 1024
    assert abs(found["unaccounted"] or 0) < (found["total"] or 0) // 50
    assert found["reclaimable"] == 23664504 * 1024
    assert found["kernel"] == (56000 + 1896 + 4084 + 976) * 1024
    assert found["cached"] == (112868 + 7659552 + 587796) * 1024
    assert found["wired"] == 21432 * 1024


def test_used_swap_is_what_is_not_free() -> None:
    meminfo = text("linux/proc_meminfo_x86_24g.txt")
    meminfo = meminfo.replace("SwapTotal:             0", "SwapTotal:          8192")
    meminfo = meminfo.replace("SwapFree:              0", "SwapFree:           2048")
    found = machine_memory.linux_memory_of(linux_readings(meminfo=meminfo))
    assert (found["swap_total"].size, found["swap_used"].size) == (8 * MIB, 6 * MIB)
    assert (found["swapins"].value, found["swapouts"].value) == (3, 5)


def test_zram_and_zswap_count_by_what_they_take_and_by_what_they_hold() -> None:
    meminfo = text("linux/proc_meminfo_x86_24g.txt")
    meminfo = meminfo.replace("Zswap:                 0", "Zswap:              1024")
    meminfo = meminfo.replace("Zswapped:              0", "Zswapped:           4096")
    zram = (f"{6 * MIB} 900 {2 * MIB} 0 {2 * MIB} 0 0 0 0\n",)
    found = machine_memory.linux_memory_of(linux_readings(meminfo=meminfo, zram=zram))
    assert found["compressed"].size == 1 * MIB + 2 * MIB
    assert found["compressed_logical"].size == 4 * MIB + 6 * MIB


def test_a_kernel_without_those_lines_says_which_it_lacks() -> None:
    readings = linux_readings(meminfo=text("linux/proc_meminfo_gb10_partial.txt"), pressure="")
    found = machine_memory.linux_memory_of(readings)
    assert found["total"].size == 127600748 * 1024
    assert found["reclaimable"].size == 118566368 * 1024
    assert found["compressed"].reason == "no Zswap in /proc/meminfo, and no zram device"
    assert found["pressure"].reason == "this kernel has no /proc/pressure (PSI)"
    assert found["app"].reason == "/proc/meminfo has no AnonPages"


@pytest.mark.parametrize(
    ("some", "full", "word"), [(0.0, 0.0, "normal"), (10.5, 1.0, "warning"), (2.0, 5.5, "critical")]
)
def test_stalls_become_a_word_by_our_own_thresholds(some: float, full: float, word: str) -> None:
    stall = "{} avg10={:.2f} avg60=0.00 avg300=0.00 total=0\n"
    readings = linux_readings(pressure=stall.format("some", some) + stall.format("full", full))
    found = machine_memory.linux_memory_of(readings)["pressure"]
    assert (found.value, found.estimated) == (word, True)


@on_linux
def test_this_machines_memory_is_what_psutil_says() -> None:
    import psutil

    found, theirs = machine_memory.read_memory(), psutil.virtual_memory()
    assert found["total"].size == theirs.total
    assert found["reclaimable"].size == pytest.approx(theirs.available, abs=256 * MIB)
    assert found["free"].size == pytest.approx(theirs.free, abs=256 * MIB)
    assert found["swap_total"].size == psutil.swap_memory().total


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_the_limit_of_a_control_group_is_a_figure_and_the_budget(tmp_path: Path) -> None:
    from uma.machine import budget_of

    root = write(
        tmp_path,
        {
            "proc/meminfo": text("linux/proc_meminfo_x86_24g.txt"),
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(4 * GIB),
            "sys/fs/cgroup/job/memory.current": str(GIB),
        },
    )
    groups = tuple(linux.read_groups(root))
    found = machine_memory.linux_memory_of(linux_memory.read_memory(root), groups)
    assert (found["group_limit"].size, found["group_used"].size) == (4 * GIB, GIB)
    budget = budget_of(linux_of(linux.read(root)))
    assert budget.limit_bytes == 4 * GIB
    assert budget.budget_bytes <= 3 * GIB


@on_linux
def test_a_real_control_group_is_honored_as_the_budget() -> None:
    """In a group that this test makes, where it may: version 2, or version 1's memory tree."""
    import subprocess

    with own_group(512 * MIB) as folder:
        program = (
            "from uma.machine import read_machine, budget_of; m = read_machine(); "
            "print(m.limit_bytes, budget_of(m).budget_bytes, m.limit_source)"
        )
        join = f'echo $$ > "{folder}/cgroup.procs" && exec "$0" -c "$1"'
        done = subprocess.run(
            ["sh", "-c", join, sys.executable, program], capture_output=True, text=True, check=True
        )
    limit, budget, source = done.stdout.split(maxsplit=2)
    assert int(limit) == 512 * MIB
    assert 0 < int(budget) < 512 * MIB
    assert source.startswith("control group")


@contextlib.contextmanager
def own_group(limit: int) -> Iterator[Path]:
    """A control group with that limit, removed at the end; skips where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            mount, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            mount, name = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        for parent in (mount / path.lstrip("/"), mount):
            folder = parent / f"uma-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                folder.mkdir()
                try:
                    (folder / name).write_text(str(limit))
                    yield folder
                    return
                finally:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
    pytest.skip("no control group can be made here")


# --- processes ------------------------------------------------------------------------------


@on_linux
def test_a_processs_figures_are_the_kernels_own_counts_and_near_psutils() -> None:
    import psutil

    block = bytearray(64 * MIB)
    block[::4096] = b"1" * len(block[::4096])
    found, theirs = sizes(process_metrics(os.getpid())), psutil.Process().memory_full_info()
    assert found["resident"] == pytest.approx(theirs.rss, abs=4 * MIB)
    assert found["footprint"] == pytest.approx(theirs.pss, abs=4 * MIB)
    assert (found["resident_peak"] or 0) >= (found["resident"] or 0) > len(block)
    assert found["swapped"] is not None


@on_linux
def test_where_the_exact_count_is_refused_the_resident_size_is_an_estimate() -> None:
    found = linux_process_metrics({}, linux.parse_kib(text("linux/proc_status.txt")))
    assert found["resident"] == Metric(2208 * 1024, source="status VmRSS", estimated=True)
    assert found["footprint"].value is None
    assert "root" in (found["footprint"].reason or "")


def test_figures_of_a_recorded_process() -> None:
    rollup = linux.parse_kib(text("linux/smaps_rollup.txt"))
    found = sizes(linux_process_metrics(rollup, {"VmHWM": 1}))
    assert (found["footprint"], found["resident"]) == (235 * 1024, 1676 * 1024)
    assert found["resident_peak"] == 1676 * 1024  # a mark below what is there now is out of date


def test_of_another_users_process_every_figure_is_unknown_with_one_reason() -> None:
    for found in (darwin_process_metrics(b""), linux_process_metrics({}, {})):
        assert all(metric.value is None and metric.reason for metric in found.values())


def test_the_gpus_part_of_a_macs_process_is_what_footprint_calls_graphics() -> None:
    found = graphics_metric(text("macos/footprint_categories_mseries.txt"))
    assert found.size == (4464 + 2624) * 1024
    assert found.estimated
    assert graphics_metric("Unable to analyze process with pid 5\n").value is None


def test_a_sum_of_resident_sizes_is_an_estimate_and_one_of_proportional_sizes_is_not() -> None:
    one = linux_process_metrics({"Rss": 10, "Pss": 6, "SwapPss": 0}, {"VmLck": 0})
    together = sum_metrics([one, one])
    assert (together["resident"].size, together["resident"].estimated) == (20, True)
    assert (together["footprint"].size, together["footprint"].estimated) == (12, False)
    alone = sum_metrics([one])
    assert not alone["resident"].estimated


def test_a_sum_with_an_unknown_part_is_an_estimate() -> None:
    known, unknown = measured(5, "here", ""), unavailable("refused")
    assert total([known, unknown]) == Metric(5, source="here", estimated=True)
    assert total([unknown]).reason == "refused"


PROCESSES = [
    Process(1, 0, "launchd", 0),
    Process(10, 1, "zsh", 0),
    Process(11, 10, "uv", 0),
    Process(12, 11, "python3", 0),
    Process(13, 12, "python3", 0),
    Process(20, 1, "other", 0),
]


def test_a_tree_is_all_that_a_launcher_started() -> None:
    assert set(tree_of(PROCESSES, 11)) == {11, 12, 13}
    assert tree_of(PROCESSES, 20) == (20,)
    assert tree_of([Process(1, 1, "self", 0)], 1) == (1,)


def test_a_loop_of_parents_ends() -> None:
    assert set(tree_of([Process(5, 6, "a", 0), Process(6, 5, "b", 0)], 5)) == {5, 6}


def test_a_process_that_another_one_of_the_name_started_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import uma.measurement.tree as trees

    monkeypatch.setattr(trees, "command_line", lambda pid: [])
    assert roots_named(PROCESSES, "PYTHON") == [12]
    assert roots_named(PROCESSES, "nothing") == []


@on_linux
def test_a_child_counts_with_the_process_that_started_it() -> None:
    import subprocess

    program = (
        "import time; b = bytearray(32 << 20); b[::4096] = b'1' * len(b[::4096]); "
        "print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            (tree,) = read_trees(read_processes(), [os.getpid()])
            (alone,) = read_trees(read_processes(), [child.pid])
        finally:
            child.kill()
    assert child.pid in tree.pids
    assert (alone.metrics["footprint"].size or 0) > 32 * MIB
    own = process_metrics(os.getpid())["footprint"].size or 0
    assert (tree.metrics["footprint"].size or 0) > own + 30 * MIB


def test_elsewhere_figures_are_psutils_and_say_so() -> None:
    import psutil

    found, own = _psutil_memory(), _psutil_metrics(os.getpid())
    assert found["total"] == Metric(psutil.virtual_memory().total, source="psutil")
    assert found["pressure"].reason == "psutil does not tell it on this system"
    assert (own["resident"].source, own["resident"].estimated) == ("psutil", True)
    assert own["resident"].size == pytest.approx(psutil.Process().memory_info().rss, abs=8 * MIB)
    assert all(metric.reason for metric in _psutil_metrics(2**22 + 1).values())


# --- GPUs -----------------------------------------------------------------------------------


def mac(ioreg: str, memory_gib: int = 32) -> object:
    sysctl = f"hw.memsize: {memory_gib * GIB}\nhw.optional.arm64: 1\nkern.osproductversion: 26.1\n"
    return mac_of(darwin.Readings(sysctl, text("macos/vm_stat_32g_macos26.txt"), ioreg))


def test_a_macs_gpu_is_what_the_registry_says_and_its_limit_what_is_in_force() -> None:
    ioreg = text("macos/ioreg_agx_m5_llm_busy.txt")
    found = darwin_gpu(parse_ioreg(ioreg), mac(ioreg))  # type: ignore[arg-type]
    assert found["allocated"].size == 31368167424
    assert found["utilization"].value == 99
    assert found["limit"].size == 26800603136
    assert found["limit"].estimated  # by the rule of macOS 26, since Metal was not asked
    assert found["cores"].value is None


def test_the_page_of_a_recorded_mac_names_where_each_figure_was_read() -> None:
    from uma.machine import budget_of
    from uma.measurement.snapshot import Snapshot, mlx_metrics
    from uma.report.measure import measure_text

    ioreg = text("macos/ioreg_agx_m3.txt")
    sysctl = (
        f"hw.memsize: {32 * GIB}\nhw.optional.arm64: 1\nkern.osproductversion: 26.1\n"
        "machdep.cpu.brand_string: Apple M3\n" + text("macos/sysctl_m5max_perflevels.txt")
    )
    vm_stat = text("macos/vm_stat_32g_macos26.txt")
    machine = mac_of(darwin.Readings(sysctl, vm_stat, ioreg))
    memory = machine_memory.darwin_memory(mac_memory("vm_stat_32g_macos26.txt"), 32 * GIB)
    gpu = darwin_gpu(parse_ioreg(ioreg), machine)
    state = Snapshot(0.0, machine, budget_of(machine), memory, gpu, (), mlx_metrics(None))
    page = measure_text(state, [])
    head, *lines = page.splitlines()
    assert head == "Apple M3, 32 GiB, macOS 26.1, 6 Super + 12 Performance cores, 10 GPU cores"
    words = [line.split(maxsplit=3) for line in lines]
    assert ["wired", "2.05", "GiB", "vm_stat"] in words
    assert [
        "unaccounted",
        "542.0",
        "MiB",
        "total less wired, app, compressed, cached, free",
    ] in words
    assert ["limit", "~24.96", "GiB", "the default of macOS 26.1 for this memory"] in words
    assert ["pressure", "?", "unknown:", "not readable"] in words


def test_a_mac_without_statistics_says_so() -> None:
    found = darwin_gpu(None, mac(""))  # type: ignore[arg-type]
    assert found["allocated"].reason == "ioreg shows no accelerator's statistics"


def test_gb10_has_the_machines_memory_and_says_why() -> None:
    told = json.loads(text("linux/nvml_gb10.json"))
    assert told["nvmlDeviceGetMemoryInfo"]["name"] == "NVML_ERROR_NOT_SUPPORTED"
    here = linux_of(linux.Readings(text("linux/proc_meminfo_gb10_partial.txt"), "", "", ()))
    found = nvidia_gpu([nvidia.Card(told["name"], None, power_w=11.17, busy_percent=0.0)], here)
    assert found["limit"] == Metric(127600748 * 1024, source="meminfo (UMA)")
    assert found["allocated"].reason == "NVML: not supported, the card shares the machine's memory"
    assert (found["power"].value, found["utilization"].value) == (11.17, 0.0)


def test_two_cards_count_together() -> None:
    cards = nvidia.parse_cards(text("linux/nvidia_smi_cards.csv"))[:2]
    found = nvidia_gpu(cards, linux_of(linux_readings_machine()))
    assert found["limit"].size == sum(card.memory_bytes or 0 for card in cards)
    assert found["allocated"].size == sum(card.used_bytes or 0 for card in cards)


def linux_readings_machine() -> linux.Readings:
    return linux.Readings(text("linux/proc_meminfo_x86_24g.txt"), "", "", ())


def test_strix_halo_has_two_pools_of_one_memory_and_tells_not_what_is_used() -> None:
    cards = amdgpu.read_cards(DATA / "linux" / "sysfs_strix_halo")
    found = amd_gpu(cards, linux_of(linux_readings_machine()))
    assert found["limit"].size == 100 * GIB
    assert found["allocated"].value is None


def test_used_pools_of_an_amd_card_are_added(tmp_path: Path) -> None:
    folder = "class/drm/card0/device/"
    files = {
        "vendor": "0x1002\n",
        "device": "0x1586\n",
        "mem_info_vram_total": str(4 * GIB),
        "mem_info_vram_used": str(GIB),
        "mem_info_gtt_total": str(8 * GIB),
        "mem_info_gtt_used": str(2 * GIB),
        "gpu_busy_percent": "37\n",
    }
    write(tmp_path, {folder + name: content for name, content in files.items()})
    write(tmp_path, {"class/drm/card0-DP-1/device/vendor": "0x1002"})
    found = amd_gpu(amdgpu.read_cards(tmp_path), linux_of(linux_readings_machine()))
    assert (found["allocated"].size, found["utilization"].value) == (3 * GIB, 37)


def test_without_a_gpu_every_figure_says_so() -> None:
    assert all(metric.reason for metric in no_gpu().values())


def channel(name: str, value: int | None = None, **states: int) -> Channel:
    steps = {f"  {label[1:]}GB/s": time for label, time in states.items()}
    return Channel(name, "", value, steps)


def test_traffic_is_of_the_memory_itself_and_not_of_one_unit_of_the_chip() -> None:
    channels = [channel("AGX RD+WR", _32=100), channel("AMCC RD+WR", _16=50, _200=50)]
    groups = [subgroup for group, subgroup in CANDIDATES if group.startswith("PMP")]
    found = [traffic_of(channels, subgroup, 1.0) for subgroup in groups]
    assert [traffic and traffic.total for traffic in found] == [None, 108.0, 108.0]
    assert traffic_of(channels[:1], "DCS BW", 1.0) is None


def test_counted_bytes_are_exact_and_steps_are_estimates() -> None:
    counted = traffic_of([channel("DCS RD", 10**9), channel("DCS WR", 10**9)], "Perf Counters", 1.0)
    stepped = traffic_of([channel("AMCC RD+WR", _16=50, _200=50)], "DCS BW", 1.0)
    assert counted is not None
    assert stepped is not None
    assert traffic_metrics(counted, "here")["total"] == Metric(2.0, "GB/s", "here")
    found = traffic_metrics(stepped, "here")
    assert found["total"] == Metric(108.0, "GB/s", "here", estimated=True)
    assert found["read"].reason == "this chip counts the total only"


def test_an_idle_histogram_says_at_most_and_not_zero() -> None:
    idle = traffic_of([channel("AMCC RD+WR", _16=100, _32=0)], "DCS BW", 1.0)
    assert idle is not None
    found = traffic_metrics(idle, "here")["total"]
    assert (found.value, found.estimated) == (32.0, True)
    assert "at most 32" in found.source


@on_linux
def test_every_figure_that_only_a_mac_has_is_unknown_here_with_a_reason() -> None:
    from uma.measurement.dram import read_gpu_power, read_traffic

    assert read_gpu_power().reason == "macOS only"
    assert all(metric.reason for metric in read_traffic().values())
