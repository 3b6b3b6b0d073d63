"""Machines that are described: their limits against what real ones reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from uma.catalog import observed
from uma.errors import UnknownName, UsageError
from uma.machine import budget_of, mac_of, read_machine, verdict
from uma.machine.here import machine_of, this_machine, with_speed, with_vram
from uma.machine.named import described_machine, machine_named, sold_bytes
from uma.system.darwin import Readings
from uma.units import GB, GIB, MIB

REPORTED = [
    row
    for row in observed.working_sets()
    if row.default and row.exact and row.macos in ("15", "26") and row.chip.startswith("M")
]


@pytest.mark.parametrize("row", REPORTED, ids=lambda r: f"{r.chip}-{r.memory_gib}-{r.macos}")
def test_a_named_mac_has_the_limit_that_such_a_mac_reported(row: observed.WorkingSet) -> None:
    machine = machine_named(f"{row.chip} {row.memory_gib}GB", macos=int(row.macos))
    assert machine.limit_bytes == row.working_set_bytes
    assert machine.limit_high_bytes is None


def test_without_a_version_the_limit_spans_all_that_such_macs_reported() -> None:
    for row in REPORTED:
        machine = machine_named(f"{row.chip} {row.memory_gib}GB")
        high = machine.limit_high_bytes or machine.limit_bytes
        assert machine.limit_bytes <= row.working_set_bytes <= high


def test_a_chip_that_came_with_macos_26_never_had_the_older_limit() -> None:
    assert machine_named("m5-max-128").limit_bytes == 115448725504
    assert machine_named("m5-max-128").limit_high_bytes is None
    assert machine_named("m4-max-128").limit_high_bytes == 115448725504


def test_the_version_in_a_name_counts() -> None:
    assert machine_named("M4 Max 64GB macOS 26.1") == machine_named("m4-max-64", macos=26)


def test_of_several_chips_the_smallest_is_taken_and_said() -> None:
    machine = machine_named("m2-ultra-192")
    assert machine.gpu_cores == 60
    assert "60 GPU cores; also sold with 76" in machine.notes[0]
    chosen = machine_named(machine.notes[0].rsplit(" ", 1)[1])
    assert (chosen.gpu_cores, chosen.notes) == (76, ())
    with pytest.raises(UnknownName, match="known: 60, 76"):
        machine_named("m2-ultra-192", gpu_cores=61)


def test_the_memory_decides_the_chip_where_it_was_sold_with_one() -> None:
    assert machine_named("m4-max-36").bandwidth_bytes_per_s == 410 * GB
    assert machine_named("m4-max-128").bandwidth_bytes_per_s == 546 * GB
    assert machine_named("macbook-pro-m3-max-96").bandwidth_bytes_per_s == 300 * GB


def test_cpu_cores_may_name_a_chip_too() -> None:
    assert machine_named("M1 Max Mac Studio (10 core - 64GB)").gpu_cores == 24
    assert machine_named("M1 Ultra (48 GPU Core) 64GB").gpu_cores == 48
    assert machine_named("m4 pro 14-core 48gb").gpu_cores == 20


def test_a_card_has_what_its_driver_reports_less_what_it_keeps() -> None:
    machine = machine_named("rtx-4090")
    assert machine.kind == "discrete"
    assert machine.memory_bytes == 24564 * MIB
    # torch's "total capacity of 23.64 GiB" (RLinf issue 255 and many others).
    assert machine.limit_bytes <= 23.64 * GIB <= machine.limit_high_bytes
    assert machine.link_bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert machine.host_memory_bytes is None


def test_torch_sees_a_capacity_within_the_limit_on_a_data_center_card() -> None:
    machine = machine_named("h100")  # "79.10 GiB" and "79.19 GiB", by driver
    assert machine.limit_bytes <= 79.10 * GIB < 79.19 * GIB <= machine.limit_high_bytes


def test_cards_add_up_less_a_context_for_each_but_the_first() -> None:
    one, four = machine_named("h100"), machine_named("4xh100")
    assert four.memory_bytes == 4 * one.memory_bytes
    contexts = 4 * one.limit_bytes - four.limit_bytes
    assert contexts % 3 == 0
    assert 100 * MIB < contexts // 3 < 600 * MIB
    assert len(four.devices) == 4
    assert budget_of(four).reserve_bytes == 4 * GIB


def test_different_cards_can_stand_in_one_machine() -> None:
    for name in ("4090+3090", "RTX 4090 + RTX 3090"):
        machine = machine_named(name)
        assert [device.memory_bytes // MIB for device in machine.devices] == [24564, 24576]
        assert machine.bandwidth_bytes_per_s == 936 * GB  # of the slower
    with pytest.raises(UsageError, match="only graphics cards"):
        machine_named("4090 + m4-max-128")


def test_gh200_has_two_pools_and_never_one() -> None:
    machine = machine_named("gh200")
    assert machine.kind == "discrete"
    assert machine.memory_bytes == pytest.approx(97871 * MIB, rel=1e-4)
    assert machine.host_memory_bytes == 480 * GIB
    assert machine.link_bytes_per_s == 450 * GB  # half of the 900 GB/s of both directions


def test_other_unified_machines_are_one_pool() -> None:
    spark = machine_named("dgx-spark")
    assert spark.kind == "unified"
    assert spark.limit_bytes == pytest.approx(122_570 * MIB, rel=1e-3)  # CUDA's deviceQuery
    halo = machine_named("strix-halo-128")
    assert (halo.limit_bytes, halo.limit_high_bytes) == (96 * GIB, 120 * GIB)


def test_memory_that_the_catalog_lacks_can_be_said() -> None:
    assert machine_named("panther lake 32gb").memory_bytes == 32 * GIB
    with pytest.raises(UsageError, match="such as 32GB"):
        machine_named("panther lake")


def test_a_budget_leaves_a_reserve_on_every_kind_of_machine() -> None:
    for name in ("rtx-4090", "2xh100", "gh200", "strix-halo-128", "dgx-spark", "m2-ultra-192"):
        machine = machine_named(name)
        budget = budget_of(machine)
        assert 0 < budget.budget_bytes <= machine.limit_bytes <= budget.limit_bytes
        assert verdict(budget.budget_bytes, budget) == "fits"
        assert verdict(budget.limit_bytes, budget) in ("tight", "fits")
        assert verdict(budget.limit_bytes + 1, budget) == "exceeds"


# --- descriptions and overrides -------------------------------------------------------------


def test_memory_is_meant_as_it_is_sold() -> None:
    assert sold_bytes("64GB") == sold_bytes("64 gb") == sold_bytes("64GiB") == 64 * GIB
    with pytest.raises(UsageError, match="--ram: '64'"):
        sold_bytes("64")


def test_a_mac_can_be_described_by_its_memory() -> None:
    assert described_machine(64 * GIB, macos=26).limit_bytes == 55662788608  # as reported
    machine = machine_of(ram_bytes=64 * GIB, gpu_limit_bytes=48 * GIB)
    assert (machine.kind, machine.backend, machine.limit_bytes) == ("unified", "metal", 48 * GIB)
    assert machine.limit_high_bytes is None


def test_overrides_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="leave out --machine"):
        machine_of("rtx-4090", ram_bytes=64 * GIB)
    with pytest.raises(UsageError, match="not within"):
        machine_of(ram_bytes=64 * GIB, gpu_limit_bytes=65 * GIB)
    with pytest.raises(UsageError, match="--vram"):
        machine_of("rtx-4090", gpu_limit_bytes=20 * GIB)
    with pytest.raises(UsageError, match="--gpu-limit"):
        machine_of("m4-max-128", vram_bytes=20 * GIB)
    with pytest.raises(UsageError, match="--ram"):
        machine_of("m4-max-128", host_ram_bytes=20 * GIB)
    with pytest.raises(UsageError, match="less than a machine has"):
        machine_of(ram_bytes=1)
    with pytest.raises(UsageError, match="holds nothing"):
        machine_of("rtx-4090", vram_bytes=0)


def test_vram_and_host_memory_override_each_card_and_the_host() -> None:
    machine = machine_of("2x4090", vram_bytes=20 * GIB, host_ram_bytes=64 * GIB)
    assert [device.memory_bytes for device in machine.devices] == [20 * GIB] * 2
    assert machine.memory_bytes == 40 * GIB
    assert machine.host_memory_bytes == 64 * GIB
    assert machine.bandwidth_bytes_per_s == 1008 * GB


@pytest.mark.parametrize("name", ["rtx-4090", "2x4090"])
def test_the_driver_keeps_as_much_of_a_card_of_another_size(name: str) -> None:
    as_named = machine_of(name)
    smaller = machine_of(name, vram_bytes=20 * GIB)
    same = machine_of(name, vram_bytes=as_named.devices[0].memory_bytes)
    assert (same.limit_bytes, same.limit_high_bytes) == (
        as_named.limit_bytes,
        as_named.limit_high_bytes,
    )
    assert smaller.limit_bytes - smaller.memory_bytes == (
        as_named.limit_bytes - as_named.memory_bytes
    )
    with pytest.raises(UsageError, match="driver alone keeps"):
        machine_of(name, vram_bytes=GIB // 4)


def test_a_card_given_to_this_machine_makes_its_memory_the_hosts() -> None:
    here = read_machine()
    if here.kind != "host":
        pytest.skip("needs a machine without a GPU of its own")
    machine = with_vram(here, 24 * GIB)
    assert (machine.kind, machine.limit_bytes) == ("discrete", 24 * GIB)
    assert machine.host_memory_bytes == here.limit_bytes


@pytest.mark.parametrize(
    ("chip", "cores", "gib", "gb_per_s"),
    [("Apple M4 Max", 40, 64, 546), ("Apple M3 Ultra", None, 96, 819), ("Apple M9", 8, 16, None),
     ("Apple M3 Max", None, 36, 300), ("Apple M6", None, 32, 170)],
)  # fmt: skip
def test_a_mac_that_is_read_gets_the_speed_of_its_chip(
    chip: str, cores: int | None, gib: int, gb_per_s: int | None
) -> None:
    lines = f"hw.memsize: {gib * GIB}\nhw.optional.arm64: 1\nmachdep.cpu.brand_string: {chip}\n"
    cores_line = "" if cores is None else f'"gpu-core-count" = {cores}\n'
    mac = mac_of(Readings(lines, "", cores_line))
    assert mac.gpu_cores == cores
    bandwidth = with_speed(mac).bandwidth_bytes_per_s
    assert bandwidth == (None if gb_per_s is None else gb_per_s * GB)


def test_without_a_name_it_is_this_machine() -> None:
    assert machine_of().name == this_machine().name


def test_one_name_takes_few_milliseconds_and_reads_the_files_of_its_kind_alone() -> None:
    program = """
import builtins, sys, time
from uma.machine.named import machine_named
opened, real = [], builtins.open
builtins.open = lambda *a, **k: (opened.append(str(a[0])), real(*a, **k))[1]
before = time.process_time()
machine_named(sys.argv[1])
print(time.process_time() - before, *{p.replace(chr(92), "/").rsplit("/", 1)[1] for p in opened})
"""
    for name, files in (
        ("mac-studio-m2-ultra-192", {"chips.csv", "macs.csv"}),
        ("rtx-4090", {"gpus.csv", "unified.csv"}),
    ):
        command = [sys.executable, "-c", program, name]
        root = Path(__file__).parent.parent
        runs = [
            subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout
            for _ in range(3)
        ]
        assert min(float(run.split()[0]) for run in runs) < 0.020
        assert set(runs[0].split()[1:]) == files
