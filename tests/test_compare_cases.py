"""Wrong advice that other tools gave (cases of groups H and J), which `uma compare` does not."""

import json
import re

import pytest
from test_compare import (
    HOST,
    LLAMA_70B,
    WANTED,
    llama_cpp_read,
    machine,
    plan_of,
    subject,
    tps,
)

from uma.cli import main
from uma.plan.compare import Wanted, catalog_candidates, compare
from uma.plan.compare.search import best_plan
from uma.speed.rate import NotKnown, Rate
from uma.units import GB, GIB


def test_h2_speed_of_a_mixture_is_that_of_the_chosen_experts() -> None:
    for name in ("mac-studio-m2-ultra-192", "h100"):
        mixture, dense = plan_of("qwen3.5-35b-a3b", name, 4), plan_of("qwen3-32b", name, 4)
        assert mixture.device_bytes > 35e9 * 4.5 / 8
        assert tps(mixture.decode) > 2.2 * tps(dense.decode)


def test_h4_the_verdict_stands_beside_the_context_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["compare", "qwen3-8b", "--machine", "rtx-4060-8gb"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("qwen3-8b at 8,192 tokens of context")
    whole = plan_of("qwen3-8b", "rtx-4060-8gb", 4)
    assert whole.verdict == "fits"  # at the default context, not at all 40,960 tokens


def test_h10_a_70b_in_16_bits_is_not_half_as_large() -> None:
    plan = plan_of("llama-3-70b", "mac-studio-m2-ultra-192", 16)
    assert plan.bits_per_weight == pytest.approx(16, abs=0.01)
    assert plan.device_bytes > 2 * LLAMA_70B > 140 * GB


@pytest.mark.parametrize("target", ["llama.cpp", "accelerate", "vllm"])
def test_h11_a_configuration_names_the_versions_and_the_inputs_it_was_made_for(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    command = ["compare", "qwen3-8b", "--machine", "rtx-4090", "-c", "4k", "--emit", target]
    assert main(command) == 0
    title, made, *rest = capsys.readouterr().out.splitlines()
    assert re.match(r"# qwen3-8b on GeForce RTX 4090: .* of 22\.\d+ GiB", title)
    assert re.search(rf"by uma \d\S*, for .*{target}.* [b\d]", made, re.IGNORECASE)
    assert "4096" in "".join(rest)


def test_h13_memory_is_shown_in_gib_and_gb_is_of_bandwidth_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(
        ["compare", "llama-3-70b", "--machine", "rtx-4090", "--machine", "mac-mini-m4-16"]
    ) in (0, 3)
    text = capsys.readouterr().out
    assert re.findall(r"[\d.]+ GB(?!/s)\b", text) == []
    assert "GiB" in text


def test_h14_what_is_above_the_budget_and_within_the_limit_is_not_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["compare", "llama-3-8b", "--train", "qlora", "--machine", "rtx-3060-12gb"]
    assert main([*command, "--host-ram", "4GB"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("rtx-3060-12gb"))
    assert " tight " in line


def test_h19_a_rate_has_an_interval_and_is_never_above_the_bandwidth() -> None:
    for name in ("mac-studio-m2-ultra-192", "rtx-4090", "h100", "dgx-spark"):
        one = machine(name)
        plan = best_plan(subject("llama-3.1-8b"), one, WANTED).plan
        assert plan is not None
        assert isinstance(plan.decode, Rate)
        assert plan.decode.low < plan.decode.best < plan.decode.high
        bandwidth = one.machine.bandwidth_bytes_per_s
        assert bandwidth is not None
        read = llama_cpp_read("llama-3.1-8b") * plan.bits_per_weight / 4.9
        assert plan.decode.best < 1.1 * bandwidth / read


def test_h20_weights_beyond_memory_are_said_to_come_from_the_ssd_and_how_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """39.6 GiB of llama-3-70b in 4 bits, of which 16 GB of memory hold 5, at 6.3 GB/s."""
    command = ["compare", "llama-3-70b", "--machine", "macbook-pro-m5-16", "--json"]
    assert main(command) == 3
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert (plan["technique"], plan["verdict"]) == ("streamed from the SSD", "exceeds")
    assert plan["disk_bytes"] == pytest.approx(39.6 * GIB, rel=0.01)
    assert plan["decode_tps_low"] == pytest.approx(6.3 * GB / plan["disk_bytes"], rel=0.02)
    assert plan["decode_tps_low"] <= plan["decode_tps"] <= plan["decode_tps_high"] < 0.2


def test_what_is_not_known_is_no_zero() -> None:
    split = best_plan(subject("llama-3-70b"), machine("8xh100"), WANTED).plan
    assert split is not None
    assert isinstance(split.prompt, NotKnown)
    assert "no public measurements" in split.prompt.reason
    assert best_plan(subject("llama-3-8b"), machine("gaudi-3"), WANTED).decode_tps is None


def test_what_does_not_fit_is_never_the_cheapest_nor_on_the_front() -> None:
    every = catalog_candidates(HOST, {}, sold=False)
    found = compare(subject("llama-3-70b"), every, Wanted(launch_prices=True))
    assert found.cheapest is not None
    assert found.cheapest.reaches(10)
    assert all(row.runs for row in found.front)
    cheaper = [
        row
        for row in found.rows
        if row.reaches(10) and (row.price_usd or 10**9) < (found.cheapest.price_usd or 0)
    ]
    tight = [row.plan is not None and row.plan.verdict == "tight" for row in cheaper]
    assert all(tight)
    assert {row.candidate.name for row in cheaper} == {name for name, why in found.left_out}


def test_a_discrete_plan_never_wins_without_its_host() -> None:
    found = compare(
        subject("llama-3.1-8b"), [machine("rtx-5090"), machine("mac-studio-m5-max-36")], WANTED
    )
    card = next(row for row in found.rows if row.candidate.name == "rtx-5090")
    assert card.price_usd is None
    assert card.candidate.parts_price is not None
    assert card not in found.front


def test_the_host_keeps_what_its_system_needs() -> None:
    plan = best_plan(subject("llama-3-70b"), machine("rtx-4090"), Wanted(min_bits=8)).plan
    assert plan is not None
    assert plan.host_bytes <= HOST.memory_bytes - 4 * GIB


def test_more_context_does_not_make_it_faster() -> None:
    """Two cards of 10 GB: 4 bits are tight at 8k and on the host at 16k; 5 bits are slower."""
    speeds = []
    for context in (8192, 16_384):
        wanted = Wanted(prefer="speed")
        found = best_plan(subject("gemma-3-27b", context), machine("2xrtx-3080-10gb"), wanted)
        assert found.decode_tps is not None
        speeds.append(found.decode_tps)
    assert speeds[0] > speeds[1]


def test_the_most_memory_to_spare_is_counted_on_the_host_too() -> None:
    found = best_plan(subject("llama-3-70b"), machine("rtx-4090"), Wanted(prefer="context"))
    assert found.plan is not None
    assert found.plan.bits == 4


def test_where_no_speed_is_known_the_fewest_bytes_are_the_fastest() -> None:
    found = best_plan(subject("qwen3-30b-a3b"), machine("rtx-5050"), Wanted(prefer="speed"))
    assert found.plan is not None
    assert isinstance(found.plan.decode, NotKnown)
    assert found.plan.bits == 4


def test_a_plan_over_the_link_that_fits_is_taken_where_all_on_the_card_is_tight() -> None:
    wanted = Wanted(min_bits=16, min_tps=1)
    tight = best_plan(subject("llama-3.1-8b"), machine("arc-pro-b50"), wanted)
    assert tight.plan is not None
    assert tight.plan.technique == "streamed over the link"
    roomy = best_plan(subject("llama-3.1-8b"), machine("rtx-4090"), wanted)
    assert roomy.plan is not None
    assert roomy.plan.technique == "resident"
