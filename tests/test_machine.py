"""Limit, budget and MLX's limits, on machines from 8 to 512 GiB; ids such as A3 are the cases of
other projects that each rule answers."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from uma.errors import UmaError, UsageError
from uma.machine import (
    Budget,
    Machine,
    budget_of,
    default_reserve_bytes,
    mac_of,
    read_machine,
    verdict,
)
from uma.plan.limits import (
    mlx_limits,
    smallest_wired_limit_mb,
    wired_limit_advice,
)
from uma.system.darwin import Readings
from uma.units import GB, GIB, MB, MIB

MACOS = Path(__file__).parent / "data" / "measure" / "macos"
SIZES_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)

# (weights, peak) in bytes. The 14B row: Qwen3-14B, 14,768,307,200 parameters at 4.5 bits, a cache
# of 163,840 bytes for each of 8,192 tokens, and half a GB of transients.
MODELS = {
    "0.7 GB": (700 * MB, 1_300 * MB),
    "8B": (4_517 * MB, 6_400 * MB),
    "14B": (8_307 * MB, 8_307 * MB + 8192 * 163_840 + 500 * MB),
    "32B": (18_430 * MB, 21_500 * MB),
    "70B": (39_688 * MB, 43_000 * MB),
    "95 GB": (95 * GB, 100 * GB),
    "102 GB": (102 * GB, 110 * GB),
    "400 GB": (400 * GB, 420 * GB),
}


def mac(memory_gib: int, version: str | None = "26.1", **sysctl: object) -> Machine:
    """A Mac as its ``sysctl`` shows it, before MLX is loaded."""
    lines = {
        "hw.memsize": memory_gib * GIB,
        "machdep.cpu.brand_string": "Apple M4 Max",
        "iogpu.wired_limit_mb": 0,
        **({} if version is None else {"kern.osproductversion": version}),
        **{name.replace("__", "."): value for name, value in sysctl.items()},
    }
    return mac_of(Readings("".join(f"{k}: {v}\n" for k, v in lines.items()), "", ""))


def limits_on(memory_gib: int, model: str, version: str = "26.1"):  # type: ignore[no-untyped-def]
    machine = mac(memory_gib, version)
    weights, peak = MODELS[model]
    return mlx_limits(peak, weights, budget_of(machine), machine, largest_output_bytes=64 * MIB)


# --- the limit -----------------------------------------------------------------------------


def test_the_live_value_of_metal_wins_over_sysctl_and_rule() -> None:
    for line in (MACOS / "mlx_device_info.jsonl").read_text(encoding="utf-8").splitlines():
        info = json.loads(line)
        memory = info.get("memory_size", 192 * GIB)
        sysctl = f"hw.memsize: {memory}\nhw.optional.arm64: 1\niogpu.wired_limit_mb: 4096\n"
        readings = Readings(sysctl, "", "")
        machine = mac_of(readings, info)
        assert machine.limit_bytes == info["max_recommended_working_set_size"]
        assert machine.max_buffer_bytes == info["max_buffer_length"]
        assert machine.limit_high_bytes is None
        assert machine.limit_source == "Metal's recommended working set"


def test_a_raised_sysctl_wins_over_the_rule() -> None:  # A12
    machine = mac(128, iogpu__wired_limit_mb=126_976)
    assert machine.limit_bytes == 124 * GIB
    assert machine.limit_source == "sysctl iogpu.wired_limit_mb"


def test_without_either_the_rule_of_the_macos_version_holds() -> None:  # A10, A11
    assert mac(36, "15.1").limit_bytes == pytest.approx(28_991.03 * MB, rel=1e-6)
    assert mac(16, "26.0").limit_bytes == pytest.approx(12_713.12 * MB, rel=1e-6)
    assert mac(36, "15.1").limit_high_bytes is None
    assert "15.1" in mac(36, "15.1").limit_source


def test_an_unknown_macos_version_gives_a_range_and_refuses_only_above_it() -> None:
    machine = mac(32, None)
    assert (machine.limit_bytes, machine.limit_high_bytes) == (22906503168, 26800603136)
    budget = budget_of(machine)
    assert budget.budget_bytes == 22906503168
    assert verdict(23 * GIB, budget) == "tight"
    assert verdict(25 * GIB, budget) == "exceeds"


def test_a_malformed_sysctl_falls_back_to_the_default_with_a_note() -> None:  # A17
    machine = mac(64, iogpu__wired_limit_mb=999_999_999)
    assert machine.limit_bytes == 55662788608  # read on a 64 GB Mac under macOS 26
    assert "999999999" in machine.notes[0]
    assert mac(64).notes == ()


def test_a_recorded_mac_is_described_without_a_host_name() -> None:
    sysctl = (MACOS / "sysctl_m3ultra_96g.txt").read_text(encoding="utf-8")
    iogpu = (MACOS / "sysctl_iogpu_default.txt").read_text(encoding="utf-8")
    vm_stat = (MACOS / "vm_stat_32g_macos26.txt").read_text(encoding="utf-8")
    machine = mac_of(Readings(f"{sysctl}{iogpu}kern.osproductversion: 26.2\n", vm_stat, ""))
    assert machine.name == "Apple M3 Ultra, 96 GiB"
    assert machine.limit_bytes == 83494174720  # read on an M3 Ultra of 96 GB
    assert machine.max_buffer_bytes == 62620631040  # the same machine
    assert machine.available_bytes == 19895042048
    assert machine.gpu_cores is None


def test_an_intel_mac_has_no_gpu_to_run_on() -> None:
    machine = mac(16, machdep__cpu__brand_string="Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz")
    assert machine.backend == "cpu"
    assert "Apple silicon" in machine.notes[0]


def test_rosetta_does_not_hide_apple_silicon() -> None:
    machine = mac(16, machdep__cpu__brand_string="VirtualApple @ 2.50GHz", hw__optional__arm64=1)
    assert machine.backend == "metal"


def test_a_mac_that_does_not_tell_its_memory_is_an_error() -> None:
    with pytest.raises(UmaError, match=r"hw\.memsize"):
        mac_of(Readings("machdep.cpu.brand_string: Apple M4\n", "", ""))


def test_this_machine_has_a_limit_and_something_available() -> None:
    machine = read_machine()
    assert 0 < machine.limit_bytes <= machine.memory_bytes
    assert machine.available_bytes is not None
    assert machine.available_bytes > 0
    if sys.platform != "darwin":
        assert machine.backend == "cpu"


# --- the budget ----------------------------------------------------------------------------


def test_14b_at_8k_on_a_16_gb_air_is_tight_and_not_refused() -> None:
    _, peak = MODELS["14B"]
    for version in ("15.6", "26.1"):
        assert verdict(peak, budget_of(mac(16, version))) == "tight"


# f fits, t tight, e exceeds; by hand from Apple's limits and the reserve in the docstring.
VERDICTS = {
    8: "feeeeeee",
    16: "ffteeeee",
    18: "fffeeeee",
    24: "fffeeeee",
    32: "ffffeeee",
    36: "ffffeeee",
    48: "ffffeeee",
    64: "fffffeee",
    96: "fffffeee",
    128: "fffffffe",
    192: "fffffffe",
    256: "fffffffe",
    512: "ffffffff",
}


@pytest.mark.parametrize("memory_gib", SIZES_GIB)
def test_verdicts_of_models_on_macs(memory_gib: int) -> None:
    budget = budget_of(mac(memory_gib))
    verdicts = "".join(verdict(peak, budget)[0] for _, peak in MODELS.values())
    assert verdicts == VERDICTS[memory_gib]


@pytest.mark.parametrize(
    ("memory_gib", "reserve_gib"),
    [(8, 4), (16, 8), (18, 8), (24, 8), (64, 8), (96, 12), (128, 16), (512, 64)],
)
def test_the_reserve_of_a_mac_is_half_up_to_8_gib_and_an_eighth_from_64(
    memory_gib: int, reserve_gib: int
) -> None:
    assert default_reserve_bytes(mac(memory_gib)) == reserve_gib * GIB


def test_what_other_programs_hold_now_lowers_the_budget() -> None:
    machine = replace(mac(64), available_bytes=20 * GIB)
    budget = budget_of(machine)
    assert budget.winner == "memory that other programs leave now"
    assert budget.budget_bytes == 19 * GIB  # less 1 GiB
    assert verdict(21 * GIB, budget) == "tight"


def test_each_line_can_win_and_is_named() -> None:
    machine = replace(mac(64), available_bytes=60 * GIB)
    assert budget_of(machine).winner.startswith("limit: the default of macOS 26.1")
    assert budget_of(machine, reserve_bytes=30 * GIB).winner == (
        "memory less a reserve of 30.00 GiB for the system"
    )
    assert budget_of(machine, user_budget_bytes=10 * GIB).winner == "your budget"
    assert budget_of(mac(24)).winner == "memory less a reserve of 8.00 GiB for the system"


def test_the_users_own_budget_refuses_even_where_another_line_is_lower() -> None:
    budget = budget_of(mac(24), user_budget_bytes=17 * GIB)
    assert not budget.user
    assert budget.budget_bytes == 16 * GIB
    assert verdict(int(16.5 * GIB), budget) == "tight"
    assert verdict(int(17.2 * GIB), budget) == "exceeds"  # the device would allow 17.76
    assert verdict(int(17.2 * GIB), budget_of(mac(24))) == "tight"


def test_a_budget_above_the_limit_does_not_raise_it() -> None:
    budget = budget_of(mac(64), user_budget_bytes=100 * GIB)
    assert budget.budget_bytes == 55662788608
    assert verdict(60 * GIB, budget) == "exceeds"


def test_a_budget_or_reserve_that_leaves_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="budget of 0 bytes"):
        budget_of(mac(16), user_budget_bytes=0)
    with pytest.raises(UsageError, match=r"reserve of 16\.00 GiB"):
        budget_of(mac(16), reserve_bytes=16 * GIB)


def test_in_a_container_the_reserve_is_taken_from_its_limit() -> None:
    machine = Machine("box", "host", "cpu", 128 * GIB, 4 * GIB, "control group, memory.max")
    assert budget_of(machine).budget_bytes == 3 * GIB


# --- what MLX is told ----------------------------------------------------------------------


def test_a_small_model_wires_what_it_needs_and_no_more() -> None:  # A4
    for memory_gib in SIZES_GIB:
        wired = limits_on(memory_gib, "0.7 GB").wired_limit_bytes
        assert wired is not None
        assert 1_300 * MB <= wired <= 5 * GIB


@pytest.mark.parametrize(
    ("memory_gib", "model"), [(128, "102 GB"), (128, "95 GB"), (512, "400 GB"), (96, "70B")]
)
def test_a_large_model_is_wired_whole(memory_gib: int, model: str) -> None:  # A1, A2, A5
    limits = limits_on(memory_gib, model)
    assert limits.wired_limit_bytes is not None
    assert limits.wired_limit_bytes >= MODELS[model][1]
    assert limits.notes == ()


@pytest.mark.parametrize("version", ["15.6", "26.1"])
def test_a_16_gb_mac_is_not_wired_into_its_reserve(version: str) -> None:  # A3
    limits = limits_on(16, "14B", version)
    assert limits.wired_limit_bytes is None
    assert "not wired" in limits.notes[0]
    assert "8.00 GiB" in limits.notes[0]


def test_above_16_gb_the_most_that_leaves_the_reserve_is_wired() -> None:
    machine = mac(24)
    limits = mlx_limits(17 * GIB, 15 * GIB, budget_of(machine), machine)
    assert limits.wired_limit_bytes == 16 * GIB
    assert limits.notes == (
        "wired limit: requested 17.00 GiB, using 16.00 GiB (leaves 8.00 GiB to the system)",
    )


def test_a_request_above_the_device_ceiling_is_clamped_and_told() -> None:  # A8
    machine = mac(64)
    limits = mlx_limits(54 * GIB, 50 * GIB, budget_of(machine), machine)
    assert limits.wired_limit_bytes == 55662788608
    assert limits.notes == ("wired limit: requested 54.00 GiB, using 51.84 GiB (device ceiling)",)


def test_wiring_can_be_declined() -> None:
    machine = mac(64)
    limits = mlx_limits(6 * GIB, 5 * GIB, budget_of(machine), machine, wire=False)
    assert limits.wired_limit_bytes is None
    assert limits.notes == ()


def test_macos_14_cannot_wire_and_says_so() -> None:  # A9
    limits = limits_on(64, "8B", "14.7")
    assert limits.wired_limit_bytes is None
    assert "macOS 15" in limits.notes[0]


def test_the_processor_wires_nothing_and_keeps_a_small_pool() -> None:
    machine = Machine("box", "host", "cpu", 24 * GIB, 24 * GIB, "installed memory")
    for peak, pool in ((100 * MIB, 8 * MIB), (640 * MIB, 20 * MIB), (10 * GIB, 32 * MIB)):
        limits = mlx_limits(peak, peak // 2, budget_of(machine), machine)
        assert limits.wired_limit_bytes is None
        assert limits.cache_limit_bytes == pool
        assert limits.notes == ()


def test_the_pool_gives_way_where_the_budget_ends() -> None:  # D2, D4
    machine = Machine("box", "host", "cpu", 24 * GIB, 24 * GIB, "installed memory")
    peak = 1000 * MIB
    for user, pool in ((1005, 5), (1000, 0), (1100, 31.25), (900, 8)):
        budget = budget_of(machine, user_budget_bytes=user * MIB)
        assert mlx_limits(peak, MIB, budget, machine).cache_limit_bytes == int(pool * MIB)


@pytest.mark.parametrize(
    ("budget_gib", "largest_output_gib", "limit_gib"),
    [
        (40, 1, 10),  # room for one output above the peak: wait at the peak
        (11, 1, 9),  # none: wait one output below it
        (11, 3, 8),  # never below the weights
    ],
)
def test_evaluation_waits_at_the_peak_or_one_output_below_it_where_the_budget_is_tight(
    budget_gib: int, largest_output_gib: int, limit_gib: int
) -> None:
    machine = mac(64)
    budget = budget_of(machine, user_budget_bytes=budget_gib * GIB)
    output = largest_output_gib * GIB
    limits = mlx_limits(10 * GIB, 8 * GIB, budget, machine, largest_output_bytes=output)
    assert limits.memory_limit_bytes == limit_gib * GIB


def test_the_memory_limit_of_a_small_mac_stays_below_its_memory() -> None:  # A9
    machine = mac(8)
    limits = mlx_limits(9 * GIB, 4 * GIB, budget_of(machine), machine)
    assert limits.memory_limit_bytes == machine.limit_bytes == 5726633984


@given(
    st.sampled_from(SIZES_GIB),
    st.sampled_from(["14.5", "15.2", "26.0"]),
    st.integers(1, 600 * GIB),
    st.integers(1, 100),
    st.none() | st.integers(MIB, 600 * GIB),
)
def test_no_limit_ever_passes_the_device_the_reserve_or_the_user(
    memory_gib: int, version: str, peak: int, percent: int, user: int | None
) -> None:
    machine = mac(memory_gib, version)
    budget = budget_of(machine, user_budget_bytes=user)
    limits = mlx_limits(peak, peak * percent // 100, budget, machine)
    if limits.wired_limit_bytes is not None:
        assert limits.wired_limit_bytes <= machine.limit_bytes
        assert limits.wired_limit_bytes <= machine.memory_bytes - default_reserve_bytes(machine)
        assert limits.wired_limit_bytes <= (user or limits.wired_limit_bytes)
    if verdict(peak, budget) == "fits":
        assert peak + limits.cache_limit_bytes <= budget.budget_bytes
        assert limits.memory_limit_bytes <= budget.budget_bytes
        assert limits.wired_limit_bytes is None or limits.wired_limit_bytes >= peak


# --- advice --------------------------------------------------------------------------------


@given(st.sampled_from(SIZES_GIB), st.sampled_from(["15.2", "26.0"]), st.integers(1, 520 * GIB))
@example(64, "15.2", 50 * GIB)
def test_advice_passes_our_own_check_and_one_mebibyte_less_would_not(  # A13, A14
    memory_gib: int, version: str, needed: int
) -> None:
    machine = mac(memory_gib, version)
    advice = wired_limit_advice(needed, machine)
    if advice is None:
        assert needed <= machine.limit_bytes or needed > machine.memory_bytes
        return
    match = re.match(r"sudo sysctl iogpu\.wired_limit_mb=(\d+)\n", advice)
    if match is None:
        assert "not advised" in advice
        room = machine.memory_bytes - default_reserve_bytes(machine)
        assert smallest_wired_limit_mb(needed) * MIB > room
        return
    value = int(match[1])
    raised = mac(memory_gib, version, iogpu__wired_limit_mb=value)
    assert raised.limit_bytes == value * MIB
    assert verdict(needed, budget_of(raised)) == "fits"
    lower = mac(memory_gib, version, iogpu__wired_limit_mb=value - 1)
    assert verdict(needed, budget_of(lower)) == "exceeds"


def test_advice_shows_how_to_keep_it_and_how_to_undo_it() -> None:  # A16
    advice = wired_limit_advice(50 * GIB + 1, mac(64, "15.2"))
    assert advice is not None
    assert advice.startswith("sudo sysctl iogpu.wired_limit_mb=51201\n")
    assert "LaunchDaemon" in advice
    assert "sudo sysctl iogpu.wired_limit_mb=0" in advice
    assert "from 48.00 GiB to 50.00 GiB" in advice


def test_a_16_gb_mac_is_advised_against_raising() -> None:
    advice = wired_limit_advice(13 * GIB, mac(16))
    assert advice is not None
    assert "not advised" in advice
    assert "sudo" not in advice


def test_there_is_no_advice_where_none_is_needed_or_possible() -> None:
    assert wired_limit_advice(GIB, mac(16)) is None
    assert wired_limit_advice(17 * GIB, mac(16)) is None
    box = Machine("box", "host", "cpu", 24 * GIB, 24 * GIB, "installed memory")
    assert wired_limit_advice(30 * GIB, box) is None


def test_a_budget_made_by_hand_needs_only_its_two_lines() -> None:
    budget = Budget(10 * GIB, 8 * GIB, "test")
    assert [verdict(size * GIB, budget) for size in (8, 10, 11)] == ["fits", "tight", "exceeds"]
    user = Budget(10 * GIB, 8 * GIB, "your budget", user=True)
    assert verdict(9 * GIB, user) == "exceeds"
