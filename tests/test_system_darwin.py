"""macOS readings, decoded from what real Macs answered."""

import csv
import json
import struct
from pathlib import Path

import pytest

from uma.system import darwin
from uma.system.darwin_process import decode_rusage
from uma.system.working_set import largest_buffer_bytes, working_set_range
from uma.units import GIB, MIB

MACOS = Path(__file__).parent / "data" / "measure" / "macos"
PAIRS = Path(__file__).parent.parent / "uma" / "data" / "working_set.csv"


def text(name: str) -> str:
    return (MACOS / name).read_text(encoding="utf-8")


def default_pairs() -> list[dict[str, str]]:
    lines = [line for line in PAIRS.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return [row for row in csv.DictReader(lines) if row["default"] == "1"]


def test_the_rule_reproduces_every_reported_default_within_the_rounding_of_its_report() -> None:
    rows = default_pairs()
    assert len(rows) == 35
    for row in rows:
        major = 26 if row["macos"] == "26" else 15
        low, high = working_set_range(int(row["memory_gib"]) * GIB, major)
        assert low == high, row
        # Reports round to 0.01 GiB (10.67 GiB: 320 parts per million) or better.
        tolerance = 0 if row["exact"] == "1" else 320e-6 * low
        assert abs(low - int(row["working_set_bytes"])) <= tolerance, row


def test_an_unknown_macos_version_gives_the_range_of_both_regimes() -> None:
    low, high = working_set_range(32 * GIB, None)
    assert low == 22906503168  # M1 Max before macOS 26
    assert high == 26800603136  # M2 Max under macOS 26


def test_a_size_never_seen_under_macos_26_lies_between_its_neighbors() -> None:
    low, high = working_set_range(192 * GIB, 26)
    assert low / (192 * GIB) == pytest.approx(0.84, abs=1e-6)
    assert high / (192 * GIB) == pytest.approx(0.87, abs=1e-6)
    low, high = working_set_range(512 * GIB, 26)
    assert low / (512 * GIB) == pytest.approx(0.87, abs=1e-6)
    assert high == 464 * GIB  # the limit before macOS 26


def test_the_largest_buffer_is_what_metal_reported_on_every_machine() -> None:
    for line in text("mlx_device_info.jsonl").splitlines():
        info = json.loads(line)
        if "memory_size" not in info:
            continue
        major = 15 if info["_source"] == "before macOS 26" else 26
        default, _ = working_set_range(info["memory_size"], major)
        assert largest_buffer_bytes(default) == info["max_buffer_length"], info


@pytest.mark.parametrize(
    ("name", "pages", "page_size"),
    [
        ("vm_stat_32g_macos26.txt", 652276 + 538942 + 23079, 16384),
        ("vm_stat_48g_mte.txt", 167743 + 431704 + 14563, 16384),
        ("vm_stat_intel_4k.txt", None, 4096),
    ],
)
def test_available_memory_is_free_file_backed_and_purgeable_pages(
    name: str, pages: int | None, page_size: int
) -> None:
    available = darwin.available_bytes(text(name))
    assert available is not None
    assert available % page_size == 0
    if pages is not None:
        assert available == pages * page_size
    else:
        assert available == 29570650112


@pytest.mark.parametrize(
    "cut",
    [
        "",
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n",
        text("vm_stat_8g_swapping_partial.txt"),
        text("vm_stat_32g_macos26.txt").replace("Pages free", "Freie Seiten"),
        text("vm_stat_32g_macos26.txt").partition("\n")[2],
    ],
    ids=["empty", "only the head", "no free pages", "localized", "no page size"],
)
def test_available_memory_is_unknown_rather_than_zero(cut: str) -> None:
    assert darwin.available_bytes(cut) is None


def test_gpu_cores_are_read_where_the_registry_has_them() -> None:
    assert darwin.gpu_cores(text("ioreg_agx_m3.txt")) == 10
    assert darwin.gpu_cores(text("ioreg_agx_m4max.txt")) == 40
    assert darwin.gpu_cores(text("ioreg_agx_userclients_shape.txt")) is None
    assert darwin.gpu_cores("") is None


def test_a_wired_limit_of_zero_is_the_default_and_not_no_memory() -> None:
    sysctl = darwin.parse_sysctl(text("sysctl_iogpu_default.txt"))
    assert darwin.raised_limit(sysctl, 64 * GIB) == (None, None)


def test_a_wired_limit_counts_in_mebibytes() -> None:
    sysctl = darwin.parse_sysctl(text("sysctl_iogpu_override.txt"))
    assert darwin.raised_limit(sysctl, 64 * GIB) == (36864 * MIB, None)


def test_the_older_key_counts_in_bytes() -> None:
    assert darwin.raised_limit({"debug.iogpu.wired_limit": str(12 * GIB)}, 16 * GIB) == (
        12 * GIB,
        None,
    )


@pytest.mark.parametrize("value", ["", "-1", "12GB", "65537", "1", "9" * 30, "0x1000", "1\x00"])
def test_a_wired_limit_that_cannot_be_one_is_told_and_not_believed(value: str) -> None:
    limit, note = darwin.raised_limit({"iogpu.wired_limit_mb": value}, 64 * GIB)
    assert limit is None
    assert note is not None
    assert "iogpu.wired_limit_mb" in note
    assert "64.00 GiB" in note


def test_installed_memory_is_unknown_where_sysctl_was_cut() -> None:
    whole = text("sysctl_m3ultra_96g.txt")
    assert darwin.installed_bytes(darwin.parse_sysctl(whole)) == 96 * GIB
    assert darwin.installed_bytes(darwin.parse_sysctl(whole[:60])) is None
    assert darwin.installed_bytes({"hw.memsize": "0"}) is None
    assert darwin.installed_bytes({"hw.memsize": "96 GB"}) is None


# The fields of struct rusage_info_v4 behind its 16-byte uuid, in the order of xnu's
# bsd/sys/resource.h; all are 64 bits wide.
RUSAGE_INFO_V4 = """
    user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size resident_size
    phys_footprint proc_start_abstime proc_exit_abstime child_user_time child_system_time
    child_pkg_idle_wkups child_interrupt_wkups child_pageins child_elapsed_abstime
    diskio_bytesread diskio_byteswritten cpu_time_qos_default cpu_time_qos_maintenance
    cpu_time_qos_background cpu_time_qos_utility cpu_time_qos_legacy cpu_time_qos_user_initiated
    cpu_time_qos_user_interactive billed_system_time serviced_system_time logical_writes
    lifetime_max_phys_footprint instructions cycles billed_energy serviced_energy
    interval_max_phys_footprint runnable_time
"""


def test_footprint_and_its_peak_lie_where_the_kernel_puts_them() -> None:
    recorded = json.loads(text("rusage_v0_4gb_process.json"))
    now = recorded["proc_pid_rusage_v0.ri_phys_footprint_bytes"]
    fields = dict.fromkeys(RUSAGE_INFO_V4.split(), 7)
    fields |= {"phys_footprint": now, "lifetime_max_phys_footprint": now + 4096}
    structure = bytes(16) + struct.pack(f"<{len(fields)}Q", *fields.values())
    assert len(structure) == 296
    for length, peak in ((296, now + 4096), (160, None), (96, None)):
        usage = decode_rusage(structure[:length])
        assert (usage["footprint"], usage["footprint_peak"]) == (now, peak)
    assert decode_rusage(structure[:79])["footprint"] is None
