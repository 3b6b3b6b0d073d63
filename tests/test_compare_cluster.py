"""Several Macs joined by Thunderbolt, contexts in a row, and several requests at once."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_compare import HOST, LLAMA_70B, LLAMA_70B_CACHE, machine, plan_of, subject, tps

from uma.errors import UsageError
from uma.plan.compare import Plan, Row, Wanted, candidates
from uma.plan.compare.cluster import PIPELINES, SHARDS, cluster_plans, parts_of
from uma.plan.compare.plans import first_token_s
from uma.plan.compare.search import best_plan
from uma.plan.compare.subject import Subject
from uma.speed.rate import NotKnown, Rate
from uma.units import GIB
from uma.workload import Inference

ULTRA = "mac-studio-m3-ultra-512"


def plans(model: str, name: str, bits: int = 4) -> dict[str, Plan]:
    found = list(cluster_plans(subject(model), machine(name), bits))
    return {plan.technique.split(" over")[0]: plan for plan in found}


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="compares with mlx-lm's own modules")
def test_the_modules_that_can_be_split_are_those_of_mlx_lm() -> None:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    sources = {
        path.stem: path.read_text(encoding="utf-8")
        for path in (Path(spec.origin).parent / "models").glob("*.py")
    }
    assert {name for name, text in sources.items() if "def shard(" in text} == SHARDS
    inner = {name for name, text in sources.items() if re.search(r"class .*PipelineMixin", text)}
    assert inner - {"pipeline"} == PIPELINES


def test_two_macs_hold_each_half_of_the_layers_and_the_whole_embeddings() -> None:
    outside = 2 * 128_256 * 8192
    each = (LLAMA_70B - outside) / 2 + outside
    (split,) = plans("llama-3-70b", f"2x{ULTRA}", 16).values()
    assert split.technique == "tensor parallel over Thunderbolt"
    held = 2 * each + LLAMA_70B_CACHE / 2
    assert held < split.device_bytes / 2 < held + 3 * GIB
    assert split.budget_bytes == 2 * plan_of("llama-3-70b", ULTRA, 16).budget_bytes


def test_each_node_has_its_own_budget_and_the_whole_model_on_its_disk() -> None:
    one = plans("llama-3-70b", f"2x{ULTRA}")["tensor parallel"]
    assert any(note.startswith("each of 2 Macs holds") for note in one.notes)
    assert any("36.96 GiB of the model on its disk" in note for note in one.notes)
    short = plans("llama-3-70b", "2xmac-mini-m4-pro-24")["tensor parallel"]
    assert short.verdict == "exceeds"
    assert short.short_of.startswith("each of 2 Macs, ")
    assert short.device_bytes < short.budget_bytes + 2 * short.short_bytes + 16 * GIB


def test_layers_are_dealt_evenly_and_matrices_by_heads() -> None:
    qwen = subject("qwen3-235b-a22b").architecture  # 94 layers, 64 heads, 4 of keys
    assert [part.split for part in parts_of(qwen, 4)] == ["row", "layer"]
    row, layer = parts_of(qwen, 4)
    assert layer.cache == 24 / 94
    assert row.cache == 1 / 4
    assert [part.split for part in parts_of(qwen, 3)] == ["layer"]
    latent = parts_of(subject("deepseek-v3").architecture, 2)
    assert [part.cache for part in latent if part.split == "row"] == [1.0]
    assert not parts_of(subject("gemma-3-27b").architecture, 2)


def test_two_macs_hold_what_one_does_not_and_cost_twice_as_much() -> None:
    alone = best_plan(subject("deepseek-v3"), machine(ULTRA), Wanted(min_bits=8, min_tps=1))
    assert not alone.runs
    two = best_plan(subject("deepseek-v3"), machine(f"2x{ULTRA}"), Wanted(min_bits=8, min_tps=1))
    assert two.runs
    assert two.price_usd == 2 * 9499
    assert two.candidate.power_w == 2 * 270


def test_rdma_gains_over_one_mac_and_tcp_loses_most_of_it() -> None:
    alone = tps(plan_of("llama-3-70b", ULTRA, 8).decode)
    split = plans("llama-3-70b", f"2x{ULTRA}", 8)["tensor parallel"]
    assert alone < tps(split.decode) < 2 * alone
    tcp = plans("llama-3-70b", "2xmac-studio-m2-ultra-192", 8)["tensor parallel"]
    assert any("--backend ring" in note for note in tcp.notes)
    assert any("--backend jaccl" in note for note in split.notes)
    slower = tps(plan_of("llama-3-70b", "mac-studio-m2-ultra-192", 8).decode)
    assert tps(tcp.decode) / slower < tps(split.decode) / alone


def test_layers_in_a_row_are_no_faster_than_on_one_mac() -> None:
    layers = plans("qwen3-235b-a22b", f"2x{ULTRA}")["split by layers"]
    assert tps(layers.decode) < tps(plan_of("qwen3-235b-a22b", ULTRA, 4).decode)
    assert any("mlx_lm.server --pipeline" in note for note in layers.notes)


def test_more_macs_than_are_planned_together_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 4"):
        candidates([f"5x{ULTRA}"], HOST, {})
    assert len(candidates(["2xmac-studio-m3-*"], HOST, {})) == 3
    assert not list(cluster_plans(subject("gemma-3-27b"), machine(f"2x{ULTRA}"), 4))


# Contexts and requests.


def wider(room: int, batch: int = 1) -> Subject:
    one = subject("llama-3.1-8b")
    workload = Inference(room, batch_size=batch)
    return Subject(one.source, one.architecture, workload, used_tokens=8192)


def test_room_for_a_longer_context_takes_memory_and_no_speed() -> None:
    for name in ("mac-studio-m2-ultra-192", "h100"):
        short: Row = best_plan(subject("llama-3.1-8b"), machine(name), Wanted())
        long = best_plan(wider(131_072), machine(name), Wanted())
        assert short.plan is not None
        assert long.plan is not None
        cache = 2 * 32 * 8 * 128 * (131_072 - 8192) * 2
        assert long.plan.device_bytes - short.plan.device_bytes >= cache
        assert tps(long.plan.decode) == tps(short.plan.decode)
        assert long.plan.prompt == short.plan.prompt


def test_a_plan_counts_the_caches_of_all_requests() -> None:
    cache = 2 * 32 * 8 * 128 * 8192 * 2
    for name in ("mac-studio-m2-ultra-192", "h100", "2xh100", f"2x{ULTRA}"):
        found = best_plan(wider(8192, batch=4), machine(name), Wanted()).plan
        assert found is not None
        assert found.cache_bytes == 4 * cache


def test_of_requests_at_once_the_last_waits_for_the_prompts_of_all() -> None:
    one = best_plan(subject("llama-3.1-8b"), machine("h100"), Wanted()).plan
    four = best_plan(wider(8192, batch=4), machine("h100"), Wanted(engine="llama.cpp")).plan
    assert one is not None
    assert four is not None
    assert isinstance(one.prompt, Rate)
    first, last = first_token_s(one, 8192), first_token_s(four, 8192)
    assert isinstance(first, Rate)
    assert isinstance(last, Rate)
    assert first.best == pytest.approx(8192 / one.prompt.best + 1 / tps(one.decode))
    assert last.best == pytest.approx(4 * 8192 / one.prompt.best + 4 / tps(four.decode))


def test_without_a_known_thunderbolt_the_speed_of_two_macs_is_not_known() -> None:
    split = plans("llama-3-8b", "2xmac-mini-m5-pro-24", 8)["tensor parallel"]
    assert isinstance(split.decode, NotKnown)
    assert "Thunderbolt" in split.decode.reason
    assert split.prompt == split.decode
