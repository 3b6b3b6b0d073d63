"""Every recorded answer decodes to its values, and a damaged one costs figures, never the run.

``data/measure/expected.json`` holds values that another program read from the same recordings.
"""

import csv
import ctypes
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.system import (
    amdgpu,
    darwin,
    darwin_gpu,
    darwin_memory,
    darwin_process,
    darwin_profiler,
    dram_traffic,
    linux,
    linux_memory,
    linux_process,
    llama_log,
    nvidia,
)

DATA = Path(__file__).parent / "data" / "measure"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def vm_stat(content: str) -> dict[str, Any]:
    pages = darwin_memory.parse_vm_stat(content)
    return {"parsed": pages, "derived": darwin_memory.figures(pages)}


def swapusage(content: str) -> dict[str, Any]:
    return darwin_memory.parse_swapusage(content) | {"encrypted": True}  # of no use here


def sysctl(content: str) -> dict[str, Any]:
    found = darwin.parse_sysctl(content)
    limit, memory = (found.get(name) for name in ("iogpu.wired_limit_mb", "hw.memsize"))
    return {
        "keys": len(found),
        "perf_levels": [list(level) for level in darwin.performance_levels(found)],
        "iogpu.wired_limit_mb": None if limit is None else int(limit),
        "hw.memsize": None if memory is None else darwin.installed_bytes(found),
    }


def ioreg(content: str) -> dict[str, Any]:
    found = darwin_gpu.parse_ioreg(content)
    return {"error": "ioreg: no PerformanceStatistics"} if found is None else asdict(found)


def footprint(content: str) -> dict[str, Any]:
    processes, failed = darwin_process.parse_footprint(content)
    return {"processes": [asdict(process) for process in processes], "failed_pids": failed}


def counters(content: str) -> dict[str, int | None]:
    """Values by channel, in either form in which people post what IOReport counted."""
    found = re.findall(r"Chn: (\S.*?) {2,}Int: (-?\d+)", content)
    found += re.findall(r"^(\S.*?) {2,}Simple .* (INT64_MIN|-?\d+)$", content, re.MULTILINE)
    unpopulated = {"INT64_MIN": dram_traffic.UNPOPULATED}
    return {name: dram_traffic.counter(unpopulated.get(n) or int(n)) for name, n in found}


def dcs(content: str) -> dict[str, Any]:
    found = counters(content)
    names = [name for name in ("DCS", "DCS RD", "DCS WR") if found[name] is not None]
    return {name: found[name] for name in names or ("DCS RD", "DCS WR")} | {"channels": len(found)}


def histograms(content: str) -> dict[str, Any]:
    means = {}
    for channel in json.loads(content)["channels"]:
        found = dram_traffic.traffic_of_steps(channel["states"])
        assert found is not None
        assert found.estimated
        means[channel["channel"]] = [round(found.total, 4), found.floor, round(found.top_share, 4)]
    return means


def meminfo(content: str) -> dict[str, Any]:
    found = linux.parse_kib(content)
    counts = 0 if "HugePages_Total:       0\n" in content else None  # a count, left out by design
    names = ("MemTotal", "MemAvailable", "Unevictable", "Mlocked", "SwapTotal", "Zswapped")
    return {name: found.get(name) for name in names} | {"HugePages_Total": counts}


def nvidia_csv(content: str) -> list[dict[str, Any]]:
    head, *rows = csv.reader(content.splitlines(), skipinitialspace=True)
    names = [name.partition(" [")[0] for name in head]
    return [dict(zip(names, map(nvidia.number, row), strict=True)) for row in rows]


DECODERS: dict[str, Callable[[str], Any]] = {
    "macos/vm_stat_": vm_stat,
    "macos/memory_pressure_": darwin_memory.parse_memory_pressure,
    "macos/swapusage": swapusage,
    "macos/top_": darwin_memory.parse_top_physmem,
    "macos/sysctl_": sysctl,
    "macos/ioreg_": ioreg,
    "macos/footprint_": footprint,
    "macos/sp_hardware_": darwin_profiler.parse_hardware,
    "macos/sp_displays_": darwin_profiler.parse_displays,
    "macos/llama_": llama_log.working_set_mb,
    "ioreport/amc_": dcs,
    "ioreport/pmp_histograms_": histograms,
    "linux/proc_meminfo_": meminfo,
    "linux/smaps_rollup": linux.parse_kib,
    "linux/proc_status": linux.parse_kib,
    "linux/pressure_": linux_memory.parse_pressure,
    "linux/nvidia_smi_gb10.csv": nvidia_csv,
}


def decoder(name: str) -> Callable[[str], Any]:
    return next(decode for prefix, decode in DECODERS.items() if name.startswith(prefix))


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "linux/sysfs_strix_halo"])
def test_a_recorded_answer_decodes_to_its_values(name: str) -> None:
    found, expected = decoder(name)(text(name)), EXPECTED[name]
    if name in ("linux/smaps_rollup.txt", "linux/proc_status.txt"):
        found = {key: found[key] for key in expected}
    assert found == expected


def test_the_pools_of_strix_halo_are_read_and_what_is_used_of_them_is_unknown() -> None:
    (card,) = amdgpu.read_cards(DATA / "linux" / "sysfs_strix_halo")
    assert [asdict(card) | {"busy_percent": None}] == [
        EXPECTED["linux/sysfs_strix_halo"][0] | {"busy_percent": None}
    ]
    assert card.gtt_total == 96 << 30


def test_every_recording_is_decoded_by_some_test() -> None:
    others = {
        "README.md",
        "expected.json",
        "linux/mlx_device_info_cpu.json",
        "linux/nvidia_smi_cards.csv",
        "linux/nvidia_smi_gb10_table.txt",
        "linux/nvml_gb10.json",
        "macos/mlx_device_info.jsonl",
        "macos/rusage_v0_4gb_process.json",
        "ioreport/inventory_m5max_macos26_excerpt.txt",
        "ioreport/pmp_afi_amcc_states_excerpt.txt",
        "ioreport/pmp_dcs_bw_m3max_macos27.txt",
    }
    files = {str(path.relative_to(DATA)) for path in DATA.rglob("*") if path.is_file()}
    files = {name for name in files if "sysfs" not in name}
    assert files - others == set(EXPECTED) - {"linux/sysfs_strix_halo"}


# --- IOReport -------------------------------------------------------------------------------


def test_counted_bytes_become_rates_and_the_parts_are_not_added_again() -> None:
    counted = counters(text("ioreport/amc_stats_neoasitop_cumulative.txt"))
    found = dram_traffic.traffic_of_bytes("Perf Counters", counted, 1000.0)
    assert found is not None
    assert counted["DCS"] is not None
    assert found.total == pytest.approx(counted["DCS"] / 1000 / 1e9, rel=1e-5)
    assert (found.estimated, found.read, found.write) == (
        False,
        pytest.approx(5524.665006223872),
        pytest.approx(3249.285783074304),
    )


def test_unpopulated_counters_give_no_rate() -> None:
    counted = counters(text("ioreport/amc_stats_m3max_macos27_unpopulated.txt"))
    assert dram_traffic.traffic_of_bytes("Perf Counters", counted, 1.0) is None


def test_names_with_a_die_in_front_count_too() -> None:
    counted = {"DIE0 DCS RD": 3_000_000_000, "DIE0 DCS WR": 1_000_000_000}
    found = dram_traffic.traffic_of_bytes("Perf Counters", counted, 2.0)
    assert found is not None
    assert (found.total, found.read) == (2.0, 1.5)


def test_the_a18_counts_by_channel_without_a_split() -> None:
    counted = {"F1 RD": 10**9, "F1 WR": 10**9, "F5 RD": 10**9, "other": 10**12}
    found = dram_traffic.traffic_of_bytes("DRAM BW", counted, 1.0)
    assert found == dram_traffic.Traffic(3.0)


def test_steps_without_any_time_in_them_give_no_rate() -> None:
    excerpt = text("ioreport/pmp_afi_amcc_states_excerpt.txt")
    states = {label: int(n) for label, n in re.findall(r"State: (.*?) {2,}Res: (\d+)", excerpt)}
    assert {dram_traffic.step_gb_per_s(label) for label in states} >= {144, 448}
    assert dram_traffic.traffic_of_steps(states) is None


def test_channels_of_an_m5_max_have_the_names_that_are_looked_for() -> None:
    lines = text("ioreport/inventory_m5max_macos26_excerpt.txt").splitlines()
    groups = {tuple(part.strip() for part in line.split("|")[:2]) for line in lines if "|" in line}
    assert ("AMC Stats", "Perf Counters") in groups & set(dram_traffic.CANDIDATES)


# --- structures -----------------------------------------------------------------------------

U32, U64, I64, I32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32


def named(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


def structure(fields: list[tuple[str, Any]], pack: int | None = None) -> Any:
    """A C structure laid out by ctypes; ours are offsets typed from the headers."""
    layout = {"_pack_": pack, "_layout_": "ms"} if pack else {}
    return type("Structure", (ctypes.Structure,), {**layout, "_fields_": fields})


# osfmk/mach/vm_statistics.h, struct vm_statistics64 (revision 1), in its order.
VM_STATISTICS64 = structure(
    [
        *named(U32, "free_count active_count inactive_count wire_count"),
        *named(
            U64,
            "zero_fill_count reactivations pageins pageouts faults cow_faults lookups hits purges",
        ),
        *named(U32, "purgeable_count speculative_count"),
        *named(U64, "decompressions compressions swapins swapouts"),
        *named(
            U32, "compressor_page_count throttled_count external_page_count internal_page_count"
        ),
        ("total_uncompressed_pages_in_compressor", U64),
    ]
)
AS_VM_STAT = {
    "active_count": "pages_active",
    "inactive_count": "pages_inactive",
    "wire_count": "pages_wired_down",
    "zero_fill_count": "pages_zero_filled",
    "reactivations": "pages_reactivated",
    "faults": "translation_faults",
    "cow_faults": "pages_copy_on_write",
    "purges": "pages_purged",
    "purgeable_count": "pages_purgeable",
    "speculative_count": "pages_speculative",
    "compressor_page_count": "pages_occupied_by_compressor",
    "throttled_count": "pages_throttled",
    "external_page_count": "file_backed_pages",
    "internal_page_count": "anonymous_pages",
    "total_uncompressed_pages_in_compressor": "pages_stored_in_compressor",
}


def host_statistics(pages: Mapping[str, int]) -> bytes:
    """The structure of a machine whose ``vm_stat`` said ``pages``."""
    values = {
        name: pages[AS_VM_STAT.get(name, name)]
        for name, _ in VM_STATISTICS64._fields_
        if AS_VM_STAT.get(name, name) in pages
    }
    values["free_count"] = pages["pages_free"] + pages["pages_speculative"]
    values["faults"] &= (1 << 64) - 1
    return bytes(VM_STATISTICS64(**values))


def test_the_kernels_structure_says_what_vm_stat_said_of_the_same_machine() -> None:
    assert ctypes.sizeof(VM_STATISTICS64) == darwin_memory.VM_STATISTICS64_SIZE == 152
    told = EXPECTED["macos/vm_stat_32g_macos26.txt"]["parsed"]
    decoded = darwin_memory.decode_host_statistics(host_statistics(told), 16384)
    assert decoded == told
    assert darwin_memory.figures(decoded) == darwin_memory.figures(told)


@pytest.mark.parametrize("extra", [8, 96, 4096])
def test_a_longer_structure_of_a_newer_kernel_says_the_same(extra: int) -> None:
    told = EXPECTED["macos/vm_stat_48g_mte.txt"]["parsed"]
    buffer = host_statistics(told)
    decode = darwin_memory.decode_host_statistics
    assert decode(buffer + b"\xff" * extra, 16384) == decode(buffer, 16384)


def test_a_shorter_structure_costs_the_fields_that_it_lacks() -> None:
    told = EXPECTED["macos/vm_stat_32g_macos26.txt"]["parsed"]
    buffer = host_statistics(told)
    for length in range(len(buffer)):
        cut = darwin_memory.decode_host_statistics(buffer[:length], 16384)
        assert cut.items() <= told.items() | {("page_size", 16384)}
    figures = darwin_memory.figures(darwin_memory.decode_host_statistics(buffer[:132], 16384))
    assert figures["wired"] == 134298 * 16384
    assert figures["app"] is None


def test_the_swap_structure_says_what_sysctl_prints() -> None:
    usage = structure(
        [("total", U64), ("avail", U64), ("used", U64), ("pagesize", U32), ("encrypted", I32)]
    )
    assert ctypes.sizeof(usage) == darwin_memory.XSW_USAGE_SIZE == 32
    told = darwin_memory.parse_swapusage(text("macos/swapusage.txt"))
    buffer = bytes(usage(told["total"], told["free"], told["used"], 16384, 1))
    assert darwin_memory.decode_swapusage(buffer) == told
    assert darwin_memory.decode_swapusage(buffer[:31]) == {}


# bsd/sys/resource.h: what each version of struct rusage_info adds.
RUSAGE = """
user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size resident_size
phys_footprint proc_start_abstime proc_exit_abstime
| child_user_time child_system_time child_pkg_idle_wkups child_interrupt_wkups child_pageins
child_elapsed_abstime
| diskio_bytesread diskio_byteswritten
| cpu_time_qos_default cpu_time_qos_maintenance cpu_time_qos_background cpu_time_qos_utility
cpu_time_qos_legacy cpu_time_qos_user_initiated cpu_time_qos_user_interactive billed_system_time
serviced_system_time
| logical_writes lifetime_max_phys_footprint instructions cycles billed_energy serviced_energy
interval_max_phys_footprint runnable_time
| flags
| user_ptime system_ptime pinstructions pcycles energy_nj penergy_nj secure_time_in_system
secure_ptime_in_system neural_footprint lifetime_max_neural_footprint
interval_max_neural_footprint
"""
RUSAGE_NAMES = {
    "pageins": "pageins",
    "wired": "wired_size",
    "resident": "resident_size",
    "footprint": "phys_footprint",
    "start_abstime": "proc_start_abstime",
    "footprint_peak": "lifetime_max_phys_footprint",
    "footprint_interval_peak": "interval_max_phys_footprint",
    "neural_footprint": "neural_footprint",
}


@pytest.mark.parametrize("version", range(7))
def test_every_version_of_a_processs_structure_is_read_as_far_as_it_goes(version: int) -> None:
    names = " ".join(RUSAGE.split("|")[: version + 1]).split()
    fields = [("uuid", ctypes.c_uint8 * 16), *((name, U64) for name in names)]
    kind = structure(fields + ([("reserved", U64 * 9)] if version == 6 else []))
    assert ctypes.sizeof(kind) == darwin_process.RUSAGE_SIZES[version]
    values = {name: 1000 + i for i, name in enumerate(names)}
    decoded = darwin_process.decode_rusage(bytes(kind(**values)))
    if version < 6:
        assert decoded == {ours: values.get(theirs) for ours, theirs in RUSAGE_NAMES.items()}
    assert decoded["footprint"] == values["phys_footprint"]
    assert darwin_process.decode_rusage(b"") == dict.fromkeys(RUSAGE_NAMES)


# osfmk/mach/task_info.h, struct task_vm_info, packed to 4 bytes.
TASK_VM_INFO = structure(
    [
        ("virtual_size", U64),
        ("region_count", I32),
        ("page_size", I32),
        *named(
            U64,
            "resident_size resident_size_peak device device_peak internal internal_peak "
            "external external_peak reusable reusable_peak purgeable_volatile_pmap "
            "purgeable_volatile_resident purgeable_volatile_virtual compressed "
            "compressed_peak compressed_lifetime phys_footprint min_address max_address",
        ),
        *named(
            I64,
            "phys_footprint_peak purgeable_nonvolatile purgeable_nonvolatile_compressed "
            "purgeable_volatile purgeable_volatile_compressed network_nonvolatile "
            "network_nonvolatile_compressed network_volatile network_volatile_compressed "
            "media_footprint media_footprint_compressed media_nofootprint "
            "media_nofootprint_compressed graphics_footprint graphics_footprint_compressed "
            "graphics_nofootprint graphics_nofootprint_compressed neural_footprint "
            "neural_footprint_compressed neural_nofootprint neural_nofootprint_compressed",
        ),
        ("limit_bytes_remaining", U64),
        ("decompressions", I32),
        ("swapins", I64),
        ("neural_nofootprint_total", I64),
        ("neural_nofootprint_peak", I64),
    ],
    pack=4,
)


def test_the_graphics_ledger_lies_where_the_kernel_puts_it() -> None:
    assert ctypes.sizeof(TASK_VM_INFO) == darwin_process.TASK_VM_INFO_SIZE == 372
    info = TASK_VM_INFO(
        resident_size=1,
        internal=2,
        compressed=3,
        phys_footprint=4,
        phys_footprint_peak=5,
        graphics_footprint=6,
        graphics_footprint_compressed=7,
        graphics_nofootprint=8,
        limit_bytes_remaining=9,
    )
    decoded = darwin_process.decode_task_vm_info(bytes(info))
    assert list(decoded.values()) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    older = darwin_process.decode_task_vm_info(bytes(info)[:276])
    assert (older["footprint"], older["graphics"]) == (4, None)


# --- damage ---------------------------------------------------------------------------------


def flat(found: Any) -> dict[str, Any]:
    """Figures by a path of names; a figure that is missing is not in it."""
    if isinstance(found, Mapping):
        rows = {str(k): flat(v) for k, v in found.items()}
    elif isinstance(found, list | tuple):
        rows = {str(i): flat(v) for i, v in enumerate(found)}
    else:
        return {} if found is None else {"": found}
    return {f"{k}/{path}": value for k, row in rows.items() for path, value in row.items()}


CUT = [
    name
    for name in EXPECTED
    if name.startswith(
        ("macos/vm_stat", "macos/memory_p", "macos/swap", "macos/top", "macos/llama", "macos/ioreg",
         "linux/proc", "linux/smaps")
    )
]  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_an_answer_that_is_cut_anywhere_gives_right_figures_or_none(name: str) -> None:
    content, decode = text(name), decoder(name)
    whole = flat(decode(content))
    for length in range(0, len(content), 3):
        figures = flat(decode(content[:length]))
        wrong = {k: v for k, v in figures.items() if k in whole and whole[k] != v and k != "error/"}
        assert not wrong, content[:length][-60:]


TEXT_DECODERS: dict[str, Callable[[str], Any]] = {
    **{prefix: decode for prefix, decode in DECODERS.items() if "ioreport" not in prefix},
    "stat": lambda t: linux_process.parse_stat(t, 4096),
    "fdinfo": linux_process.parse_fdinfo,
    "zram": linux_memory.parse_zram,
    "vmstat": linux_memory.parse_counts,
    "ps": darwin.parse_ps,
    "cards": nvidia.parse_cards,
    "cpuinfo": linux.cpu_model,
    "available": darwin.available_bytes,
    "cores": lambda t: darwin.cores_text(darwin.parse_sysctl(t)),
    "limit": lambda t: darwin.raised_limit(darwin.parse_sysctl(t), 64 << 30),
    "nvidia": nvidia.number,
}
for put_together_here in ("linux/nvidia_smi_gb10.csv", "macos/sysctl_"):
    del TEXT_DECODERS[put_together_here]
RECORDED = [
    path.read_text(encoding="utf-8")
    for path in sorted(DATA.rglob("*"))
    if path.is_file() and path.suffix in (".txt", ".csv", ".json")
]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Any text, or a recorded answer with a piece cut out, or replaced."""
    if draw(st.booleans()):
        return draw(st.text(max_size=400))
    content = draw(st.sampled_from(RECORDED))
    begin = draw(st.integers(0, len(content)))
    end = draw(st.integers(begin, min(len(content), begin + 200)))
    middle = draw(
        st.sampled_from(["", "\n", "9" * 5000, "-1", "1e9", "٣", "²", "1.2.3", ",", "\0"])
    )
    return (
        content[:begin]
        + (draw(st.text(max_size=20)) if draw(st.booleans()) else middle)
        + content[end:]
    )


@pytest.mark.parametrize("name", TEXT_DECODERS)
def test_no_text_makes_a_decoder_fail_or_give_a_negative_size(name: str) -> None:
    decode = TEXT_DECODERS[name]

    @settings(max_examples=60, deadline=None)
    @given(damaged())
    def check(content: str) -> None:
        for path, value in flat(decode(content)).items():
            if isinstance(value, int | float):
                assert 0 <= value < float("inf"), path

    check()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=700))
def test_no_structure_makes_a_decoder_fail(buffer: bytes) -> None:
    assert all(v is None or v >= 0 for v in darwin_process.decode_rusage(buffer).values())
    darwin_process.decode_task_vm_info(buffer)
    darwin_memory.decode_swapusage(buffer)
    figures = darwin_memory.figures(darwin_memory.decode_host_statistics(buffer, 16384))
    assert all(value is None or value >= 0 for value in figures.values())


def test_a_gpu_client_is_not_taken_for_an_accelerator() -> None:
    assert darwin_gpu.parse_ioreg(text("macos/ioreg_agx_userclients_shape.txt")) is None


def test_the_drivers_own_share_is_not_taken_for_the_gpus() -> None:
    found = darwin_gpu.parse_ioreg(text("macos/ioreg_agx_m3.txt"))
    assert found is not None
    assert (found.in_use, found.in_use_driver) == (862388224, 0)


def test_the_table_of_nvidia_smi_is_no_list_of_cards() -> None:
    assert nvidia.parse_cards(text("linux/nvidia_smi_gb10_table.txt")) == ()


def test_pages_of_four_kib_count_as_such() -> None:
    pages = darwin_memory.parse_vm_stat(text("macos/vm_stat_intel_4k.txt"))
    assert pages["page_size"] == 4096
    assert darwin_memory.figures(pages)["wired"] == 715958 * 4096


@pytest.mark.parametrize("name", ["32g_macos26", "48g_mte"])
def test_anonymous_and_file_pages_are_the_active_inactive_and_speculative_ones(name: str) -> None:
    pages = darwin_memory.parse_vm_stat(text(f"macos/vm_stat_{name}.txt"))
    queues = sum(pages[f"pages_{kind}"] for kind in ("active", "inactive", "speculative"))
    assert queues == pages["anonymous_pages"] + pages["file_backed_pages"]


def test_a_rounded_footprint_is_marked_as_such() -> None:
    (rounded,), _ = darwin_process.parse_footprint(text("macos/footprint_gb_rounded.txt"))
    assert (rounded.exact, rounded.footprint) == (False, 13 << 30)


def test_the_structure_of_a_process_with_a_4_gib_array_shows_it_where_rss_did_not() -> None:
    recorded = json.loads(text("macos/rusage_v0_4gb_process.json"))
    footprint = recorded["proc_pid_rusage_v0.ri_phys_footprint_bytes"]
    resident = round(recorded["ps_rss_gb"] * 1e9)
    buffer = bytes(16) + struct.pack("<10Q", 0, 0, 0, 0, 0, 0, resident, footprint, 0, 0)
    decoded = darwin_process.decode_rusage(buffer)
    assert decoded["footprint"] == footprint == pytest.approx(3914 << 20, rel=1e-3)
    assert decoded["footprint"] > 100 * (decoded["resident"] or 0)
