"""Plans of `uma compare`: golden decisions with their arithmetic, and advice it must not give."""

import csv
import time
from dataclasses import replace
from functools import cache

import pytest

from uma.architecture import architecture_from_config
from uma.catalog import DATA
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
from uma.plan.compare.parallel import vllm_plan
from uma.plan.compare.prices import catalog_price, together
from uma.plan.compare.search import best_plan
from uma.plan.compare.subject import Subject
from uma.plan.compare.unified import streamed_plan as plan_from_disk
from uma.plan.compare.unified import unified_plans
from uma.plan.engine_case import budget_under
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


def llama_cpp_read(model: str, bits: int = 4) -> float:
    """Bytes that one token reads of the weights in llama.cpp's usual format of that width."""
    case = subject(model).other("llama.cpp", bits, machine("rtx-4090").machine)
    assert case is not None
    return subject(model).reads(case).size_bytes(1)


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
    read = llama_cpp_read("llama-3-70b", 16)
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


def test_one_buffer_above_the_devices_maximum_is_short_of_that() -> None:
    mac = machine("mac-studio-m2-ultra-192")
    small = replace(mac, machine=replace(mac.machine, max_buffer_bytes=GIB // 2))
    plan = unified_plans(subject("llama-3.1-8b"), small, 16, "mlx")[0]
    matrix = 2 * 128_256 * 4096  # embeddings
    assert plan.verdict == "exceeds"
    assert (plan.short_bytes, plan.short_of) == (
        matrix - GIB // 2,
        "the largest buffer, 512.0 MiB",
    )


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
    read = llama_cpp_read("llama-3-70b") * layers / 81
    assert 1 / tps(plan.decode) > read / HOST.bandwidth_bytes_per_s
    slower = candidates(["rtx-4090"], HostProfile(bandwidth_bytes_per_s=45 * GB), {})[0]
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
        whole = one.reads(case)
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


def test_what_bitsandbytes_does_not_convert_is_on_the_host_in_16_bits() -> None:
    one = replace(
        machine("rtx-4090"),
        machine=replace(machine("rtx-4090").machine, host_memory_bytes=192 * GIB),
    )
    plans = {bits: accelerate_plan(subject("llama-3-70b"), one, bits) for bits in (16, 8, 4)}
    layer = 855_654_400  # elements: q, k, v, o, three of the feed-forward part and two norms
    for bits, plan in plans.items():
        assert plan is not None
        on_card = 80 - plan.host_bytes / (2 * layer)
        held = plan.device_bytes - 2 * 2 * 128_256 * 8192 - 2 * layer
        assert 0 < held - on_card * layer * bits / 8 < 7 * GIB  # cache, buffers, scales
        assert tps(plan.decode) < 31.5e9 / plan.host_bytes * 1.02
    small = accelerate_plan(subject("llama-3-8b"), machine("rtx-4060-ti-16gb"), 8)
    assert small is not None
    assert (small.technique, small.host_bytes) == ("resident", 0)


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


def rows_of_several_cards() -> set[tuple[str, int, str, bool]]:
    """Public runs of llama.cpp on cards of one kind: model, bits, machine, whether it ran."""
    models = {f"{maker}Llama-{name}": f"llama-{name.lower()}" for maker, name in NAMES}
    widths = {"Q4_K_M": 4, "F16": 16}
    found = set()
    with open(DATA / "truth/inference.csv", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(line for line in file if not line.startswith("#")):
            known = line["model"] in models and line["quant"] in widths
            if known and line["engine"].startswith("llama") and line["gpu_count"] > "1":
                card = line["chip"].removeprefix("NVIDIA ")
                card += " 80GB" if card.startswith("A100") else ""
                cards, ran = f"{line['gpu_count']} x {card}", line["outcome"] == "ok"
                found.add((models[line["model"]], widths[line["quant"]], cards, ran))
    return found


NAMES = (("Meta-", "3-8B"), ("Meta-", "3-70B"), ("", "2-7B"), ("", "2-13B"))


def test_what_ran_on_several_cards_runs_and_what_did_not_does_not() -> None:
    rows = rows_of_several_cards()
    wrong = set()
    for model, bits, cards, ran in rows:
        plan = next(iter(llama_cpp_plans(subject(model, 1024), machine(cards), bits)))
        if plan.runs != ran:
            wrong.add((model, bits, cards, plan.verdict))
    assert len(rows) > 50
    assert sum(not ran for *_, ran in rows) == 6
    assert wrong == {("llama-3-70b", 16, "6 x RTX 3090", "tight")}  # 131.9 GiB of 141.8


def test_whole_layers_may_not_fit_cards_that_are_large_enough_together() -> None:
    plan = plan_of("mixtral-8x7b", "2xl40s", 16)
    layer = 2 * 1_451_270_144  # 8 experts of 3 x 4,096 x 14,336, router, attention, norms
    assert plan.device_bytes < 2 * 44.6 * GIB
    assert 17 * layer > 44.6 * GIB  # of 32, the head is the 33rd
    assert plan.verdict == "exceeds"
    assert plan.short_of.startswith("the fullest of cards")
    assert 2 * GIB < plan.short_bytes < 3 * GIB


def test_the_last_card_has_the_head_beside_its_layers() -> None:
    plan = plan_of("gemma-3-27b", "8xrtx-4060-8gb", 16)  # 6 of 62 layers, and a head of 2.8 GB
    assert plan.device_bytes < 59.9 * GIB
    assert plan.verdict == "exceeds"


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


def test_blocks_have_room_for_as_many_requests_as_fit_beside_the_weights() -> None:
    plan = vllm_plan(subject("llama-3-70b"), machine("8xh100"), 16)
    assert plan is not None
    more = plan.headroom_bytes // LLAMA_70B_CACHE
    assert more > 100
    (note,) = plan.notes
    assert f"room for {1 + more:,} such requests" in note
    full = vllm_plan(subject("llama-3-70b", batch=1 + more), machine("8xh100"), 16)
    above = vllm_plan(subject("llama-3-70b", batch=2 + more), machine("8xh100"), 16)
    assert full is not None
    assert above is not None
    assert (full.verdict, above.verdict) == ("fits", "exceeds")


@pytest.mark.parametrize(("cards", "refused"), [(2, False), (3, True), (8, False), (16, True)])
def test_heads_are_divided_without_remainder(cards: int, refused: bool) -> None:
    assert (vllm_plan(subject("llama-3-70b"), machine(f"{cards}xh100"), 4) is None) == refused


def test_one_head_of_keys_is_repeated_but_heads_of_queries_are_divided() -> None:
    small = subject("gemma-3-1b")  # 4 heads, 1 of keys
    four = vllm_plan(small, machine("4xh100"), 16)
    assert four is not None
    assert four.verdict == "fits"
    assert vllm_plan(small, machine("8xh100"), 16) is None


def quantized(model: str, kv_bits: int) -> Subject:
    whole = subject(model)
    return Subject(whole.source, whole.architecture, Inference(8192, kv_bits=kv_bits))


def test_a_quantized_cache_is_half_as_large_but_for_its_scales() -> None:
    plan = next(iter(llama_cpp_plans(quantized("llama-3-70b", 8), machine("h100"), 4)))
    whole = plan_of("llama-3-70b", "h100", 4)
    saved = LLAMA_70B_CACHE * (1 - 8.5 / 16)
    assert whole.device_bytes - plan.device_bytes == pytest.approx(
        saved, rel=0.02
    )  # the buffer of computation grows by 16 MiB
    assert tps(plan.decode) > tps(whole.decode)
    fp8 = vllm_plan(quantized("llama-3-70b", 8), machine("2xh100"), 4)
    other = vllm_plan(subject("llama-3-70b"), machine("2xh100"), 4)
    assert fp8 is not None
    assert other is not None
    saved = LLAMA_70B_CACHE / 2
    assert other.device_bytes - fp8.device_bytes == pytest.approx(saved, rel=0.01)


def test_mlx_stores_the_scores_of_a_prompt_where_the_cache_is_quantized() -> None:
    mac = machine("mac-studio-m2-ultra-192")
    plan = unified_plans(quantized("llama-3-70b", 8), mac, 4, "mlx")[0]
    assert plan.device_bytes > plan_of("llama-3-70b", "mac-studio-m2-ultra-192", 4).device_bytes


def test_an_engine_without_such_a_cache_has_no_plan() -> None:
    small = quantized("llama-3.1-8b", 4)
    assert vllm_plan(small, machine("2xh100"), 16) is None
    assert accelerate_plan(small, machine("h100")) is None
    assert next(iter(llama_cpp_plans(small, machine("h100"), 16))).runs


# The choice.


def test_the_least_quantized_plan_that_is_fast_enough_is_taken() -> None:
    found = row("llama-3-70b", "mac-studio-m2-ultra-192")
    assert found.plan is not None
    assert tps(found.plan.decode) >= 10
    assert {plan.bits for plan, _ in found.rejected} == {16, 8}
    for plan, reason in found.rejected:
        assert reason == f"{tps(plan.decode):.1f} tokens/s, {10 - tps(plan.decode):.1f} below 10"


def test_of_plans_that_are_all_tight_the_least_quantized_is_taken() -> None:
    mac = machine("macbook-air-m4-16")
    busy = replace(mac, machine=replace(mac.machine, available_bytes=3 * GIB))
    found = best_plan(subject("llama-3.1-8b"), busy, Wanted(min_tps=1)).plan
    assert found is not None
    assert (found.verdict, found.bits) == ("tight", 8)


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


def test_a_quantized_repository_of_mlx_is_not_widened_on_a_mac() -> None:
    source = locate("mlx-community/Meta-Llama-3-8B-Instruct-4bit")
    stored = Subject(source, subject("llama-3-8b").architecture, Inference(8192))
    found = best_plan(stored, machine("mac-mini-m4-16"), WANTED).plan
    assert found is not None
    assert (found.engine, found.bits) == ("mlx", 4)


def test_a_model_that_mlx_lm_has_no_module_for_runs_under_llama_cpp_on_a_mac() -> None:
    model = subject("llama-3.1-8b")
    other = replace(model, architecture=replace(model.architecture, module=None), known={})
    found = best_plan(other, machine("mac-studio-m2-ultra-192"), WANTED).plan
    assert found is not None
    assert found.engine == "llama.cpp"


def test_several_requests_are_planned_under_vllm_too_on_one_card() -> None:
    def engines(batch: int) -> set[str]:
        found = best_plan(subject("llama-3.1-8b", batch=batch), machine("h100"), Wanted(min_tps=99))
        assert found.plan is not None
        return {found.plan.engine, *(plan.engine for plan, _ in found.rejected)}

    assert "vllm" not in engines(1)
    assert "vllm" in engines(16)


def test_engines_are_planned_where_they_run() -> None:
    small = subject("llama-3.1-8b")
    assert not list(llama_cpp_plans(small, machine("gaudi-3"), 4))
    assert list(llama_cpp_plans(small, machine("16xh100"), 4))
    assert not list(llama_cpp_plans(small, machine("17xh100"), 4))
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
        30000, "street"
    )
    assert catalog_price(650, "launch RTX A2000 12GB", "2021") == Price(650, "launch", "2021")
    assert catalog_price(None, "", "2022") is None
    both = together([Price(100, "user"), Price(1599, "launch", "2022")])
    assert both == Price(1699, "launch", "2022")


def read_per_s(row: Row) -> float:
    """What counts where machines are compared in the same width."""
    assert row.plan is not None
    return row.plan.bits_per_weight * (row.decode_tps or 0)


def test_nothing_on_the_front_is_beaten_by_another_in_all_three() -> None:
    found = compare(
        subject("llama-3-70b"), candidates(["mac-studio-*"], HOST, {}), Wanted(min_tps=1)
    )
    priced = [one for one in found.rows if one.reaches(1) and one.price_usd is not None]
    beaten = [one for one in priced if one not in found.front]
    assert found.front
    assert beaten
    for one in beaten:
        assert any(
            (other.price_usd or 0) <= (one.price_usd or 0) and read_per_s(other) >= read_per_s(one)
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


def test_the_whole_catalog_is_compared_in_a_moment() -> None:
    one = subject("llama-3-70b")
    fresh = Subject(one.source, one.architecture, one.workload)
    start = time.process_time()
    found = compare(fresh, catalog_candidates(HOST, {}, sold=False), WANTED)
    assert time.process_time() - start < 1  # 0.2 to 0.4 s; Python and the imports take as much
    assert len(found.rows) > 300


@pytest.mark.parametrize("name", ["2xrtx-4070", "h100", "2xrtx-3090", "rtx-4090"])
def test_a_plan_under_vllm_has_the_verdict_of_an_estimate(name: str) -> None:
    """The cards of gemma 3 27B in 4 bits with a cache in 8: the estimate of 2 RTX 4070 is tight."""
    one = subject("gemma-3-27b")
    small = replace(one, workload=replace(one.workload, kv_bits=8), known={})
    plan = vllm_plan(small, machine(name), 4)
    case = small.other("vllm", 4, machine(name).machine)
    assert plan is not None
    assert case is not None
    budget = budget_under("vllm", case.budget, case.machine, case.settings)
    told = replace(case, budget=budget).estimate()
    assert plan.verdict == told.ledger.verdict
    assert (plan.verdict == "tight") == (name == "2xrtx-4070")


def test_a_model_made_in_4_bits_has_4_bits_under_every_engine() -> None:
    """gpt-oss-120b: 4.25 bits of MXFP4 for each weight of its experts, 16 for the others."""
    widest = Wanted(min_bits=8)
    for name in ("h100", "mac-studio-m3-ultra-96", "2xh100"):
        for wanted in (WANTED, widest):
            found = row("gpt-oss-120b", name, wanted).plan
            assert found is not None
            assert (found.verdict, found.bits) == ("fits", 4)
            assert found.bits_per_weight == pytest.approx(4.4, abs=0.1)
    served = vllm_plan(subject("gpt-oss-120b"), machine("h100"), 16)
    assert served is not None
    assert served.format == "mxfp4"
    assert vllm_plan(subject("gpt-oss-120b"), machine("h100"), 4) is None
    small = row("gpt-oss-120b", "mac-studio-m1-max-64")
    assert not small.runs
    assert len([plan for plan, _ in small.rejected if plan.engine == "mlx"]) == 1


def test_a_width_of_bitsandbytes_is_that_of_its_matrices() -> None:
    """Embeddings and head of Llama 3 8B stay in 16 bits, which makes 6 bits of 4 on average."""
    plan = accelerate_plan(subject("llama-3-8b"), machine("rtx-4090"), 4)
    assert plan is not None
    assert (plan.format, plan.bits) == ("nf4", 4)
    assert plan.bits_per_weight > 5.5


def test_what_cards_hold_under_transformers_does_not_depend_on_those_asked_before() -> None:
    fresh = replace(subject("llama-3-70b"), known={})
    alone = accelerate_plan(replace(fresh, known={}), machine("rtx-4090"))
    many = accelerate_plan(fresh, machine("8xh100"))
    after = accelerate_plan(fresh, machine("rtx-4090"))
    assert alone is not None
    assert many is not None
    assert after is not None
    assert after.device_bytes == alone.device_bytes
    assert many.verdict == "fits"
