"""Every figure of docs/compare.md, computed anew; its example is what the command prints."""

import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from test_compare import LLAMA_70B, machine, plan_of, subject, tps
from test_compare_training import LARGE_HOST, lies_elsewhere, plan, row, tried
from test_compare_training import subject as trained

from uma.cli import main
from uma.machine import default_reserve_bytes
from uma.plan.compare import HostProfile, Plan
from uma.plan.compare.discrete import accelerate_plan, llama_cpp_plans
from uma.plan.compare.parallel import vllm_plan
from uma.plan.engine_case import EngineCase
from uma.units import GB, GIB, format_gib

PAGE = (Path(__file__).parent.parent / "docs/compare.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```\n\$ uma ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)? (?:GiB|GB/s|GB|%|tokens/s|ms|times)")
MAC, CARD = "mac-studio-m2-ultra-192", "rtx-4090"
HOST = HostProfile()
# Defaults, and what machines are called and described with.
GIVEN = {"64 GiB", "192 GiB", "10 tokens/s", "192 GB", "80 GB", "48 GB", "24 GB", "12 GB", "16 GB"}


def gb(size: float, digits: int = 2) -> str:
    return f"{size / GB:.{digits}f} GB"


def gb_per_s(rate: int | None) -> str:
    assert rate is not None
    return f"{rate / GB:,g} GB/s"


def per_s(rate: float) -> str:
    return f"{rate:.1f} tokens/s" if rate >= 1 else f"{rate:.2f} tokens/s"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def llama_cpp(model: str, card: str, bits: int) -> EngineCase:
    case = subject(model).other("llama.cpp", bits, machine(card).machine)
    assert case is not None
    return case


def of_settings(context: int = 8192, **settings: str) -> dict[str, int]:
    case = llama_cpp("llama-3-8b", CARD, 4)
    workload = replace(case.workload, context_tokens=context)
    terms = replace(case, settings=replace(case.settings, **settings)).terms(workload)
    return {term.name: term.size_bytes for term in terms}


def example() -> set[str]:
    big = subject("llama-3-70b")
    mac = plan_of("llama-3-70b", MAC, 16)
    mac_read = big.even_reads(2 * big.architecture.num_parameters).size_bytes(1)
    card = list(llama_cpp_plans(big, machine(CARD), 4))[-1]
    case = llama_cpp("llama-3-70b", CARD, 4)
    way = next(one for one in big.offloads(case) if one.options == card.options)
    host_read = big.split_reads("Q4_K_M", way)[1].size_bytes(1)
    two = machine("2xrtx-3090")
    split = vllm_plan(big, two, 4)
    assert split is not None
    large = plan_of("llama-3-70b", "h100", 8)
    faster = tps(large.prompt) / tps(plan_of("llama-3-70b", MAC, 6).prompt)
    bandwidth = machine(MAC).machine.bandwidth_bytes_per_s
    assert bandwidth is not None
    assert "40 of 80 layers" in PAGE
    assert way.layers == 40
    return {
        gib(mac.device_bytes),
        gib(mac.budget_bytes),
        per_s(tps(mac.decode)),
        gb(mac_read, 1),
        gb_per_s(bandwidth),
        f"{1000 * mac_read / bandwidth:.0f} ms",
        per_s(tps(card.decode)),
        format_gib(card.host_bytes),
        gb(host_read, 1),
        gb_per_s(HOST.bandwidth_bytes_per_s),
        f"{1000 * host_read / HOST.bandwidth_bytes_per_s:.0f} ms",
        per_s(tps(next(iter(llama_cpp_plans(big, two, 4))).decode)),
        per_s(tps(split.decode)),
        f"{faster:.0f} times",
    }


def claims() -> set[str]:
    small, big = subject("llama-3-8b"), subject("llama-3-70b")
    parameters = big.architecture.num_parameters
    four = small.mlx(4, machine(MAC).machine)
    assert four is not None
    whole = replace(
        machine(CARD), machine=replace(machine(CARD).machine, host_memory_bytes=192 * GIB)
    )
    streamed = accelerate_plan(big, whole)
    assert streamed is not None
    on_host = list(llama_cpp_plans(big, whole, 16))[-1]
    mac = machine(MAC, macos=15).machine
    card, large = machine(CARD).machine, machine("h100").machine
    assert card.link_bytes_per_s is not None
    assert large.link_bytes_per_s is not None
    speeds = [one.bandwidth_bytes_per_s or 0 for one in (card, large, mac)]
    caches = {kind: of_settings(cache_type_k=kind, cache_type_v=kind) for kind in ("q8_0", "q4_0")}
    small_case = llama_cpp("llama-2-7b", CARD, 4)
    short = replace(small_case.workload, context_tokens=2048)
    of_7b = sum(term.size_bytes for term in small_case.terms(short))
    return {
        gb(2 * parameters, 1),
        gb(2 * small.architecture.num_parameters),
        gb(llama_cpp("llama-3-8b", CARD, 4).weights.size_bytes),
        gb(four.plan().form.weights.size_bytes),
        per_s(tps(streamed.decode)),
        per_s(tps(on_host.decode)),
        gb_per_s(card.link_bytes_per_s),
        gb_per_s(large.link_bytes_per_s),
        *map(gb_per_s, speeds),
        f"{speeds[0] / card.link_bytes_per_s:.0f} times",
        f"{speeds[1] / large.link_bytes_per_s:.0f} times",
        *(f"{100 * one['kv_cache'] / of_settings()['kv_cache']:.0f} %" for one in caches.values()),
        *(
            f"{of_settings(32_768, flash_attn=fa)['activations'] / GIB:.2f} GiB"
            for fa in ("on", "off")
        ),
        gib(mac.limit_bytes),
        gib(mac.memory_bytes - default_reserve_bytes(mac)),
        gib(plan_of("grok-1", MAC, 16).device_bytes),
        gib(plan_of("grok-1", MAC, 4).device_bytes),
        f"{100 * speeds[2] / speeds[0]:.0f} %",
        gb(of_7b),
    }


def training() -> set[str]:
    """Figures of fine-tuning: what a card, and the host beside it, hold, and how fast it is."""
    big, small = trained("llama-3-70b", "full"), trained("llama-3-8b", "lora")
    eight = {one.technique: one for one in tried(big, "8xh100", LARGE_HOST) if one.quality == 2}
    offloaded = eight["full, ZeRO 3, optimizer on the host, checkpointing"]
    assert lies_elsewhere(offloaded)
    qlora = plan(row(trained("llama-3-70b", "qlora"), "rtx-6000-ada"))
    parts = plan(row(trained("llama-3-70b", "qlora"), "2xrtx-4090"))
    moved = plan(row(trained("llama-3-70b", "qlora"), CARD))
    lora = {one.technique: one for one in tried(small, "h100")}
    exact = [one for one in tried(trained("llama-3-8b", "full"), "h200") if one.quality == 2]
    whole = {one.technique: one for one in exact}
    seven, host = trained("llama-2-7b", "full"), HostProfile(192 * GIB)
    on_card = {one.technique: one for one in tried(seven, CARD, host) if one.quality == 2}
    beside = plan(row(seven, CARD, host=host))
    paged = plan(row(trained("llama-3-8b", "full"), "h100"))
    assert beside.technique == "full, ZeRO 2, optimizer on the host, checkpointing"

    def whole_tps(rate: float) -> str:
        return f"{rate:,.0f} tokens/s"

    def slower(plans: dict[str, Plan], name: str) -> str:
        part = tps(plans[f"{name}, checkpointing"].decode) / tps(plans[name].decode)
        return f"{100 * (1 - part):.0f} %"

    base = plan(row(trained("llama-3-8b", "qlora"), "rtx-4080"))
    eight_b = small.architecture.num_parameters
    recipes = [one.recipe for one in lora.values() if one.recipe is not None]
    return {
        gb(base.bits_per_weight * eight_b / 8, 1),
        f"{100 * qlora.bits_per_weight / 16:.0f} %",
        f"{100 * small.trained_elements(recipes[0]) / eight_b:.2f} %",
        gb(18 * LLAMA_70B / 8, 1),
        gb(8 * LLAMA_70B / 8, 1),
        *(
            gib(eight[f"full, {name}, checkpointing"].device_bytes // 8)
            for name in ("ZeRO 3", "FSDP")
        ),
        gib(offloaded.device_bytes // 8),
        gib(offloaded.host_bytes),
        whole_tps(tps(offloaded.decode)),
        gb(qlora.bits_per_weight * LLAMA_70B / 8, 1),
        gib(qlora.device_bytes),
        gib(parts.device_bytes),
        gib(moved.device_bytes),
        gib(moved.host_bytes),
        gib(base.device_bytes),
        gib(lora["LoRA, checkpointing"].device_bytes),
        gib(lora["LoRA"].device_bytes),
        gib(on_card["full, checkpointing"].device_bytes),
        gib(beside.device_bytes),
        gib(beside.host_bytes),
        whole_tps(tps(beside.decode)),
        whole_tps(tps(on_card["full, checkpointing"].decode)),
        gib(paged.host_bytes),
        whole_tps(tps(paged.decode)),
        whole_tps(tps(whole["full"].decode)),
        slower(whole, "full"),
        slower(lora, "LoRA"),
    }


@cache
def computed() -> set[str]:
    return example() | claims() | training() | GIVEN


def prose() -> str:
    """The page without what it prints and without what others say."""
    return re.sub(r'"[^"]*"', "", BLOCK.sub("", PAGE))


@pytest.mark.parametrize("figure", sorted(set(FIGURE.findall(prose()))))
def test_a_figure_of_the_page_is_what_is_computed(figure: str) -> None:
    assert figure in computed()


def test_grok_1_runs_in_3_bits_and_in_no_more() -> None:
    runs = {bits: plan_of("grok-1", MAC, bits).runs for bits in (4, 3)}
    assert runs == {4: False, 3: True}


@pytest.mark.parametrize(("command", "shown"), BLOCK.findall(PAGE))
def test_the_example_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], command: str, shown: str
) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown, "python scripts/docs_outputs.py docs/compare.md"
