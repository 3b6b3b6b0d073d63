"""Plans of `uma compare`: golden decisions with their arithmetic, and advice it must not give."""

from dataclasses import replace
from functools import cache

import pytest

from uma.architecture import architecture_from_config
from uma.checkpoint.source import locate
from uma.machine.named import machine_named
from uma.plan.compare import (
    Candidate,
    HostProfile,
    Plan,
    Price,
    Row,
    Wanted,
    candidates,
    catalog_candidates,
    compare,
)
from uma.plan.compare.discrete import accelerate_plan, layer_shares, llama_cpp_plans
from uma.plan.compare.parallel import split_refused, vllm_plan
from uma.plan.compare.prices import catalog_price, together
from uma.plan.compare.search import best_plan
from uma.plan.compare.subject import Subject
from uma.plan.compare.unified import streamed_plan as plan_from_disk
from uma.plan.compare.unified import unified_plans
from uma.speed.rate import NotKnown, Rate
from uma.units import GB, GIB, MIB
from uma.workload import Inference

HOST = HostProfile()
WANTED = Wanted()
LLAMA_70B_4BIT = 39_688_355_840  # mlx-lm's own class quantized to 4 bits, groups of 64
LLAMA_70B_CACHE = 2 * 80 * 8 * 128 * 8192 * 2  # keys and values of 8,192 tokens in 16 bits
LLAMA_70B = 70_553_706_496


@cache
def subject(model: str, context: int = 8192, batch: int = 1) -> Subject:
    source = locate(model, bits=4)  # as the command line does where no format is named
    assert source.config is not None
    workload = Inference(context, batch_size=batch)
    return Subject(source, architecture_from_config(source.config), workload)


def machine(name: str, macos: int | None = None) -> Candidate:
    return candidates([name], HOST, {}, macos)[0]


def row(model: str, name: str, wanted: Wanted = WANTED, macos: int | None = None) -> Row:
    return best_plan(subject(model), machine(name, macos), wanted)


def plan_of(model: str, name: str, bits: int, macos: int | None = None) -> Plan:
    """The resident plan of this width, of llama.cpp on cards and of MLX on a Mac."""
    one = machine(name, macos)
    if one.discrete:
        return next(iter(llama_cpp_plans(subject(model), one, bits)))
    return unified_plans(subject(model), one, bits, "mlx")[0]


def tps(rate: Rate | NotKnown) -> float:
    assert isinstance(rate, Rate), rate
    return rate.best


# Golden decisions (issue 6, Must show 4).


def test_70b_in_4_bits_fits_a_64_gb_mac_with_little_to_spare() -> None:
    plan = plan_of("llama-3-70b", "MacBook Pro M4 Max 64GB", 4, macos=15)
    held = LLAMA_70B_4BIT + LLAMA_70B_CACHE
    assert plan.budget_bytes == 48 * GIB
    assert plan.verdict == "fits"
    assert held < plan.device_bytes < held + 2 * GIB
    assert plan.headroom_bytes < plan.budget_bytes // 6
    assert LLAMA_70B * 8.5 / 8 > 64 * GIB  # 8 bits and scales of 64 do not, whatever the limit
    assert plan_of("llama-3-70b", "MacBook Pro M4 Max 64GB", 8, macos=15).verdict == "exceeds"


def test_70b_in_4_bits_is_on_a_24_gb_card_only_with_a_part_on_the_host() -> None:
    resident, offloaded = llama_cpp_plans(subject("llama-3-70b"), machine("rtx-4090"), 4)
    assert LLAMA_70B_4BIT > 24 * GIB
    assert (resident.technique, resident.verdict) == ("resident", "exceeds")
    assert (offloaded.technique, offloaded.verdict) == ("layers on the host", "fits")
    assert offloaded.device_bytes <= 24 * GIB
    assert offloaded.device_bytes + offloaded.host_bytes > LLAMA_70B_4BIT + LLAMA_70B_CACHE
    assert 0 < offloaded.host_bytes <= HOST.memory_bytes


def test_deepseek_v3_in_4_bits_is_on_single_macs_with_512_gb_alone_and_on_8_h100() -> None:
    macs = [one for one in catalog_candidates(HOST, {}, sold=False) if "mac" in one.name]
    assert len(macs) > 50
    v3 = subject("deepseek-v3")
    room = {
        one.machine.memory_bytes // GIB
        for one in macs
        if any(plan.runs for plan in unified_plans(v3, one, 4, "mlx"))
    }
    assert room == {512}
    assert 256 * GIB < 671e9 * 4.5 / 8
    assert plan_of("deepseek-v3", "8xh100", 4).verdict == "fits"
    assert plan_of("deepseek-v3", "4xh100", 4).verdict == "exceeds"


# Wrong advice known from cases.


def test_h1_memory_of_a_mixture_is_of_all_experts_and_speed_of_the_chosen_ones() -> None:
    moe = plan_of("qwen3.5-122b-a10b", "mac-mini-m4-pro-48", 4)
    assert moe.verdict == "exceeds"
    assert moe.device_bytes > 122e9 * 4.5 / 8  # not the 33 GB of a tool that counted 10B
    fast = plan_of("qwen3-30b-a3b", "mac-mini-m4-pro-48", 4)
    dense = plan_of("qwen3-32b", "mac-mini-m4-pro-48", 4)
    assert fast.device_bytes > 30.5e9 * 4.5 / 8
    assert tps(fast.decode) > 4 * tps(dense.decode)


def test_h9_and_j4_one_memory_is_counted_once_and_nothing_is_offloaded_to_itself() -> None:
    for one in catalog_candidates(HOST, {}, sold=False):
        if one.discrete:
            continue
        found = best_plan(subject("llama-3-70b"), one, WANTED).plan
        assert found is not None
        assert found.host_bytes == 0
        assert "host" not in found.technique
        assert "link" not in found.technique
        assert found.budget_bytes <= one.machine.memory_bytes
        assert found.device_bytes <= one.machine.memory_bytes or not found.runs


def test_j8_what_is_free_at_the_moment_splits_no_model_of_a_mac() -> None:
    mac = machine("macbook-air-m4-16")
    busy = replace(mac, machine=replace(mac.machine, available_bytes=3 * GIB))
    (plan,) = unified_plans(subject("llama-3.1-8b"), busy, 4, "mlx")
    assert (plan.technique, plan.verdict, plan.host_bytes) == ("resident", "tight", 0)


def test_j9_weights_from_the_ssd_are_told_as_what_does_not_fit() -> None:
    mac = machine("mac-studio-m1-max-64")
    plan = plan_from_disk(subject("llama-3-70b"), mac, 16)
    assert plan is not None
    assert plan.verdict == "exceeds"
    assert isinstance(plan.decode, Rate)
    read = subject("llama-3-70b").gguf_reads("F16").size_bytes(1)
    assert plan.decode.low == plan.decode.best == pytest.approx(7.4 * GB / read)
    assert plan.decode.low < plan.decode.high < 0.2
    found = best_plan(subject("llama-3-70b"), mac, Wanted(min_bits=16))
    assert not found.runs
    reason = plan.shortcoming(10)
    assert reason is not None
    assert "too much for the limit of" in reason
    assert "0.053 tokens/s" in reason


# Unified plans.


def test_a_raised_limit_is_the_smallest_that_holds_it_and_leaves_the_reserve() -> None:
    mac = machine("mac-studio-m1-max-64", macos=15)
    big = subject("llama-3-70b", 12_288)
    resident, raised = unified_plans(big, mac, 5, "mlx")
    assert (resident.verdict, raised.verdict) == ("exceeds", "tight")
    value = int(raised.options[0].removeprefix("sudo sysctl iogpu.wired_limit_mb="))
    assert mac.machine.limit_bytes < value * MIB <= 56 * GIB
    assert unified_plans(big, machine_with_limit(mac, value), 5, "mlx")[0].runs
    assert not unified_plans(big, machine_with_limit(mac, value - 1), 5, "mlx")[0].runs


def machine_with_limit(mac: Candidate, value: int) -> Candidate:
    return replace(mac, machine=replace(mac.machine, limit_bytes=value * MIB))


def test_a_limit_that_would_take_the_systems_reserve_is_not_raised() -> None:
    mac = machine("mac-studio-m1-max-64", macos=15)
    (resident,) = unified_plans(subject("llama-3-70b", 12_288), mac, 6, "mlx")
    assert resident.device_bytes > 56 * GIB
    assert resident.short_bytes == resident.device_bytes - 48 * GIB


# Discrete plans.


def test_layers_on_the_host_take_at_least_the_time_of_reading_them_there() -> None:
    _, plan = llama_cpp_plans(subject("llama-3-70b"), machine("rtx-4090"), 4)
    layers = 80 - (int(plan.options[1]) - 1)
    assert plan.options[0] == "-ngl"
    read = subject("llama-3-70b").gguf_reads("Q4_K_M").size_bytes(1) * layers / 81
    assert 1 / tps(plan.decode) > read / HOST.bandwidth_bytes_per_s
    slower = replace(machine("rtx-4090"), host_bandwidth_bytes_per_s=45 * GB)
    _, other = llama_cpp_plans(subject("llama-3-70b"), slower, 4)
    assert 0.5 < tps(other.decode) / tps(plan.decode) < 0.6


def test_a_mixture_leaves_experts_on_the_host_and_stays_fast() -> None:
    _, plan = llama_cpp_plans(subject("qwen3-30b-a3b"), machine("rtx-4060-8gb"), 4)
    assert plan.technique == "experts on the host"
    assert "-ncmoe" in plan.options
    dense = list(llama_cpp_plans(subject("qwen3-32b"), machine("rtx-4060-8gb"), 4))[-1]
    assert tps(plan.decode) > 5 * tps(dense.decode)


def test_parts_of_an_offload_read_together_what_the_whole_model_reads() -> None:
    for model in ("llama-3-70b", "qwen3-30b-a3b"):
        one = subject(model)
        case = one.other("llama.cpp", 4, machine("rtx-4060-8gb").machine)
        assert case is not None
        whole = one.gguf_reads("Q4_K_M")
        for way in (one.offloads(case)[2], one.offloads(case)[-1]):
            device, host = one.split_reads("Q4_K_M", way)
            together = device.size_bytes(1) + host.size_bytes(1)
            assert together == pytest.approx(whole.size_bytes(1))


def test_streaming_over_the_link_is_no_faster_than_the_link() -> None:
    one = replace(
        machine("rtx-4090"),
        machine=replace(machine("rtx-4090").machine, host_memory_bytes=192 * GIB),
    )
    plan = accelerate_plan(subject("llama-3-70b"), one)
    assert plan is not None
    assert plan.verdict == "fits"
    assert plan.host_bytes > 2 * LLAMA_70B - 24 * GIB
    assert tps(plan.decode) < 31.5e9 / plan.host_bytes * 1.02
    assert 1008 / 31.5 == 32  # what the card's own memory gives, over what the link does


def test_more_than_the_host_holds_is_short_by_the_difference() -> None:
    (_, plan) = llama_cpp_plans(subject("llama-3-70b"), machine("rtx-4090"), 16)
    assert plan.verdict == "exceeds"
    with_host = plan.budget_bytes + HOST.memory_bytes - 4 * GIB
    assert plan.short_bytes == plan.device_bytes - with_host


def test_layers_go_to_cards_by_their_memory_and_the_head_to_the_last() -> None:
    one = subject("llama-3-70b")
    case = one.other("llama.cpp", 4, machine("2xrtx-3090").machine)
    assert case is not None
    assert [80 * share for share in layer_shares(one, case)] == [41, 39]
    mixed = one.other("llama.cpp", 4, machine_named("rtx-5090 + rtx-4060-8gb"))
    assert mixed is not None
    first, second = layer_shares(one, mixed)
    assert (80 * first, 80 * second) == (65, 15)  # 4 of 5 of 81, the head among the others


def test_two_cards_hold_more_and_are_not_faster_and_tensor_parallel_is() -> None:
    one = plan_of("llama-3-70b", "h100", 4)
    two = plan_of("llama-3-70b", "2xh100", 4)
    assert two.budget_bytes > 1.9 * one.budget_bytes
    assert 0.9 < tps(two.decode) / tps(one.decode) < 1.05
    split = [vllm_plan(subject("llama-3-70b"), machine(f"{n}xh100"), 8) for n in (2, 8)]
    assert split[0] is not None
    assert split[1] is not None
    assert tps(split[1].decode) > 1.2 * tps(split[0].decode)


def test_each_card_of_a_tensor_parallel_plan_has_its_part_of_weights_and_cache() -> None:
    plan = vllm_plan(subject("llama-3-70b"), machine("8xh100"), 16)
    assert plan is not None
    assert plan.options == ("--tensor-parallel-size", "8")
    parts = 2 * LLAMA_70B + LLAMA_70B_CACHE
    assert parts < plan.device_bytes < parts + 8 * 2 * GIB


@pytest.mark.parametrize(("cards", "refused"), [(2, False), (3, True), (8, False), (16, True)])
def test_heads_are_divided_without_remainder(cards: int, refused: bool) -> None:
    assert (split_refused(subject("llama-3-70b"), cards) is not None) == refused


# The choice.


def test_the_least_quantized_plan_that_is_fast_enough_is_taken() -> None:
    found = row("llama-3-70b", "mac-studio-m2-ultra-192")
    assert found.plan is not None
    assert tps(found.plan.decode) >= 10
    assert {plan.bits for plan, _ in found.rejected} == {16, 8}
    for plan, reason in found.rejected:
        assert reason == f"{tps(plan.decode):.1f} tokens/s, {10 - tps(plan.decode):.1f} below 10"


def test_where_nothing_is_fast_enough_the_fastest_is_taken() -> None:
    found = row("llama-3-70b", "mac-studio-m2-ultra-192", Wanted(min_tps=100))
    assert found.plan is not None
    assert found.plan.bits == 4
    best = tps(found.plan.decode)
    assert all(tps(plan.decode) < best for plan, _ in found.rejected)


def test_preferences_choose_by_speed_and_by_memory_to_spare() -> None:
    quality = row("llama-3.1-8b", "mac-studio-m2-ultra-192").plan
    speed = row("llama-3.1-8b", "mac-studio-m2-ultra-192", Wanted(prefer="speed")).plan
    context = row("llama-3.1-8b", "mac-studio-m2-ultra-192", Wanted(prefer="context")).plan
    assert quality is not None
    assert speed is not None
    assert context is not None
    assert (quality.bits, speed.bits) == (16, 4)
    assert tps(speed.decode) > tps(quality.decode)
    assert context.headroom_bytes > quality.headroom_bytes


def test_fewer_bits_than_asked_are_never_taken() -> None:
    assert not row("llama-3-70b", "MacBook Pro M4 Max 36GB", macos=15).runs
    fewer = row("llama-3-70b", "MacBook Pro M4 Max 36GB", Wanted(min_bits=2), macos=15)
    assert fewer.plan is not None
    assert fewer.plan.bits < 4


def test_a_plan_of_unknown_speed_does_not_displace_one_that_is_fast_enough() -> None:
    found = row("llama-3-70b", "gh200")  # nobody says how fast its second tier is read
    assert found.plan is not None
    assert found.plan.host_bytes == 0
    assert tps(found.plan.decode) > 10


def test_concurrent_requests_share_the_weights_and_have_each_a_cache() -> None:
    one = unified_plans(subject("llama-3.1-8b"), machine("mac-studio-m2-ultra-192"), 4, "mlx")[0]
    eight = unified_plans(
        subject("llama-3.1-8b", batch=8), machine("mac-studio-m2-ultra-192"), 4, "mlx"
    )[0]
    cache_bytes = 2 * 32 * 8 * 128 * 8192 * 2
    assert eight.device_bytes - one.device_bytes >= 7 * cache_bytes
    assert tps(one.decode) < tps(eight.decode) < 8 * tps(one.decode)
    assert eight.decode_tps == tps(eight.decode) / 8


def test_each_of_several_requests_has_to_be_fast_enough() -> None:
    mac, wanted = machine("mac-studio-m2-ultra-192"), Wanted(min_tps=40)
    alone = best_plan(subject("llama-3.1-8b"), mac, wanted).plan
    many = best_plan(subject("llama-3.1-8b", batch=16), mac, wanted).plan
    assert alone is not None
    assert many is not None
    assert many.bits < alone.bits


def test_engines_are_planned_where_they_run() -> None:
    small = subject("llama-3.1-8b")
    assert not list(llama_cpp_plans(small, machine("gaudi-3"), 4))
    assert vllm_plan(small, machine("2xrx-7900-xtx"), 16) is None
    assert best_plan(small, machine("mac-studio-m2-ultra-192"), Wanted(engine="vllm")).plan is None
    assert best_plan(small, machine("h100"), Wanted(engine="mlx")).plan is None


# Prices.


def test_prices_at_launch_and_of_machines_no_longer_sold_are_not_the_cheapest() -> None:
    names = ["mac-studio-m2-ultra-192", "mac-studio-m5-ultra-96", "framework-desktop"]
    fast = Wanted(min_tps=1)
    found = compare(subject("llama-3-70b"), candidates(names[:2], HOST, {}), fast)
    assert found.cheapest is None
    assert found.cheapest_reason is not None
    assert "launch" in found.cheapest_reason
    asked = Wanted(min_tps=1, launch_prices=True)
    found = compare(subject("llama-3-70b"), candidates(names[:2], HOST, {}), asked)
    assert found.cheapest is not None
    assert found.cheapest.candidate.name == "mac-studio-m5-ultra-96"


def test_a_list_price_of_today_is_the_cheapest_and_so_is_the_users_own() -> None:
    names = ["framework-desktop-128gb", "mac-studio-m2-ultra-192"]
    slow = Wanted(min_tps=1)
    found = compare(subject("llama-3-70b"), candidates(names, HOST, {}), slow)
    assert found.cheapest is not None
    assert found.cheapest.candidate.name == "framework-desktop-128gb"
    used = {"mac-studio-m2-ultra-192": Price(2500, "user")}
    found = compare(subject("llama-3-70b"), candidates(names, HOST, used), slow)
    assert found.cheapest is not None
    assert found.cheapest.price_usd == 2500


def test_cards_cost_what_they_and_their_host_cost() -> None:
    alone = machine("2xrtx-3090")
    assert alone.price is None
    assert alone.price_reason is not None
    assert "--host-price" in alone.price_reason
    assert alone.parts_price == Price(2998, "launch", "2020")
    host = HostProfile(price=Price(900, "user"))
    own = {"rtx-3090": Price(700, "user")}
    (priced,) = candidates(["2xrtx-3090"], host, own)
    assert priced.price == Price(2300, "user")


def test_a_price_says_what_kind_it_is_and_from_when() -> None:
    assert catalog_price(1999, "after the 2026-06-25 price rise (1 TB)", "2025") == Price(
        1999, "list", "2026-06-25"
    )
    raised = catalog_price(4699, "3999 at launch (Oct 2025), raised 2026-02-23", "2025")
    assert raised == Price(4699, "list", "2026-02-23")
    assert catalog_price(30000, "widely reported street (hardware-nvidia.ts)", "2022") == Price(
        30000, "street", "2022"
    )
    assert catalog_price(None, "", "2022") is None
    both = together([Price(100, "user"), Price(1599, "launch", "2022")])
    assert both == Price(1699, "launch", "2022")


def test_nothing_on_the_front_is_beaten_by_another_in_all_three() -> None:
    found = compare(
        subject("llama-3-70b"), candidates(["mac-studio-*"], HOST, {}), Wanted(min_tps=1)
    )
    priced = [one for one in found.rows if one.runs and one.price_usd is not None]
    beaten = [one for one in priced if one not in found.front]
    assert found.front
    assert beaten
    for one in beaten:
        assert any(
            (other.price_usd or 0) <= (one.price_usd or 0)
            and (other.decode_tps or 0) >= (one.decode_tps or 0)
            for other in found.front
        )


def test_a_pair_of_cards_is_left_out_where_one_is_enough() -> None:
    sold = catalog_candidates(HOST, {}, sold=True)
    names = {one.name for one in sold}
    assert {"rtx-5090", "2xrtx-5090"} <= names
    found = compare(subject("llama-3.1-8b"), sold, WANTED)
    shown = {one.candidate.name for one in found.rows}
    assert "rtx-5090" in shown
    assert "2xrtx-5090" not in shown
