"""What people hit, as tests of the estimator: budgets, prefill, caches, models (groups A, B, C, H).

A case is named by its number in the collection that this project was begun with; the line under a
test says what the public thread says. ``COVERED`` names the tests that stand elsewhere.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.catalog import aliases, find_model, macs, model_config, words
from uma.catalog.listed import listed_models
from uma.engines import llama_cpp, mlx, transformers, vllm
from uma.ledger import peak
from uma.machine import budget_of, verdict
from uma.machine.named import described_machine, machine_named
from uma.memory.term import MemoryTerm
from uma.memory.weights import weight_bytes
from uma.plan.choice import Wanted, what_fits
from uma.plan.forms import Form
from uma.plan.inference import InferencePlan, Request, plan_inference
from uma.quantization import Quantization
from uma.report.plan import settings_text
from uma.units import GB, GIB, MIB
from uma.workload import Inference

TESTS = Path(__file__).parent

COVERED = {
    "A1": "test_machine.py::test_a_large_model_is_wired_whole",
    "A2": "test_machine.py::test_a_large_model_is_wired_whole",
    "A3": "test_machine.py::test_a_16_gb_mac_is_not_wired_into_its_reserve",
    "A4": "test_machine.py::test_a_small_model_wires_what_it_needs_and_no_more",
    "A7": "test_measure_diagnosis.py::test_idle_unwiring_is_a_note_and_never_a_leak",
    "A8": "test_machine.py::test_a_request_above_the_device_ceiling_is_clamped_and_told",
    "A9": "test_machine.py::test_the_memory_limit_of_a_small_mac_stays_below_its_memory",
    "A10": "test_machine.py::test_the_live_value_of_metal_wins_over_sysctl_and_rule",
    "A11": "test_machine.py::test_without_either_the_rule_of_the_macos_version_holds",
    "A12": "test_machine.py::test_a_raised_sysctl_wins_over_the_rule",
    "A13": "test_machine.py::test_advice_passes_our_own_check_and_one_mebibyte_less_would_not",
    "A14": "test_machine.py::test_advice_passes_our_own_check_and_one_mebibyte_less_would_not",
    "A16": "test_machine.py::test_advice_shows_how_to_keep_it_and_how_to_undo_it",
    "A17": "test_system_darwin.py::test_a_wired_limit_of_zero_is_the_default_and_not_no_memory",
    "A18": "test_machine.py::test_each_line_can_win_and_is_named",
    "B2": "test_system_darwin.py::test_the_largest_buffer_is_what_metal_reported_on_every_machine",
    **dict.fromkeys(
        ("B3", "B5", "B7", "B8"),
        "test_measure_failures.py::test_a_posted_failure_has_one_cause_and_one_remedy",
    ),
    "B12": "test_engine_mlx.py::test_a_draft_model_adds_its_weights_its_cache_and_logits",
    "C8": "test_measure_fixtures.py::"
    "test_the_structure_of_a_process_with_a_4_gib_array_shows_it_where_rss_did_not",
    "C16": "test_plan_inference.py::test_what_fits_is_within_the_budget_even_with_the_pool",
    "C17": "test_plan_inference.py::test_the_default_context_shrinks_until_it_fits",
    "C18": "test_machine.py::test_the_pool_gives_way_where_the_budget_ends",
    "C19": "test_measure_diagnosis.py::test_growth_that_fills_a_pool_levels_off",
    "D5": "test_measure_diagnosis.py::test_a_reported_state_is_found_with_its_evidence",
    "D6": "test_measure_memory.py::"
    "test_the_gpus_part_of_a_macs_process_is_what_footprint_calls_graphics",
    "D7": "test_system_darwin.py::test_available_memory_is_free_file_backed_and_purgeable_pages",
    "D8": "test_measure.py::"
    "test_the_page_has_every_section_and_a_source_or_a_reason_for_each_figure",
    "D9": "test_measure_memory.py::test_a_mac_without_statistics_says_so",
    "D11": "test_catalog.py::test_a_chip_is_found_by_cores_and_memory",
    "D12": "test_measure_fixtures.py::test_a_longer_structure_of_a_newer_kernel_says_the_same",
    "D13": "test_report_cli.py::test_measured_runs_stand_beside_their_predictions",
    "D14": "test_measure_diagnosis.py::test_a_reported_state_is_found_with_its_evidence",
    "H7": "test_kv_cache.py::test_a_module_is_uniform_where_mlx_lm_has_no_make_cache",
    "H11": "test_compare_cases.py::"
    "test_h11_a_configuration_names_the_versions_and_the_inputs_it_was_made_for",
    "H12": "test_cases_training.py::test_frozen_weights_are_not_counted_as_trained",
    "H20": "test_compare_cases.py::"
    "test_h20_weights_beyond_memory_are_said_to_come_from_the_ssd_and_how_fast",
    "H13": "test_units.py::test_a_shown_size_is_within_a_hundredth_of_its_unit",
    "H15": "test_machine.py::test_what_other_programs_hold_now_lowers_the_budget",
    "H16": "test_machine.py::test_a_budget_or_reserve_that_leaves_nothing_is_a_usage_error",
    "H17": "test_estimate.py::test_the_terms_under_mlx_are_those_of_a_dry_run",
}
CASES = (
    [f"A{i}" for i in (1, 2, 3, 4, 7, 8, 9, *range(10, 19))]
    + [f"B{i}" for i in (1, 2, 3, 5, 7, 8, 12, 14)]
    + [f"C{i}" for i in (4, 5, 8, 13, 16, 17, 18, 19, 20, 21)]
    + [f"D{i}" for i in (5, 6, 7, 8, 9, 11, 12, 13, 14)]
    + [f"H{i}" for i in range(1, 21)]
)
"""Those of the groups A, B, C, D and H that are marked as tests of an estimator or a parser."""


def test_every_case_is_tested_here_or_where_it_is_said_to_be() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    here = set(re.findall(r'^    """([A-H]\d+)[,:]', text, re.MULTILINE))
    assert {*COVERED, *here} == set(CASES)
    for case, place in COVERED.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), case


@cache
def architecture_of(name: str) -> Architecture:
    (hf_id,) = aliases()[words(name)]
    model = find_model(hf_id)
    assert model is not None
    return architecture_from_config(model_config(model).values)


@cache
def mlx_weights(name: str, bits: int) -> MemoryTerm:
    return weight_bytes(architecture_of(name), Quantization(bits))


def mlx_terms(name: str, bits: int, workload: Inference) -> tuple[MemoryTerm, ...]:
    return mlx.inference_terms(architecture_of(name), mlx_weights(name, bits), workload)


def held(terms: tuple[MemoryTerm, ...], name: str, phase: str | None = None) -> int:
    return sum(t.size_bytes for t in terms if t.name == name and phase in (None, t.phase))


def planned(name: str, bits: int, machine_name: str, **request: Any) -> InferencePlan:
    form = Form(f"{bits}-bit", mlx_weights(name, bits), 2)
    request = {"context_tokens": 8192} | request
    machine = machine_named(machine_name)
    return plan_inference(architecture_of(name), [form], Request(**request), machine)


def test_a_verdict_counts_the_cache_at_the_asked_context() -> None:
    """A15: a gate compared weights alone; the server hung at 100 % of a 96 GB Mac."""
    short = planned("llama-3.3-70b", 6, "mac-studio-m2-max-96")
    long = planned("llama-3.3-70b", 6, "mac-studio-m2-max-96", context_tokens=131_072)
    assert (short.verdict, long.verdict) == ("fits", "exceeds")
    assert long.form.weights.size_bytes < long.budget.budget_bytes


def test_one_array_above_the_devices_maximum_is_seen_before_the_run() -> None:
    """B1: 24k tokens, step 65,536, 48 GB M4 Pro: one buffer of 37 GB asked, 27 GB allowed."""
    asked = Inference(24_000, prefill_step_size=65_536)
    architecture, weights = architecture_of("gemma-2-27b"), mlx_weights("gemma-2-27b", 4)
    largest = mlx.largest_buffer_bytes(architecture, weights, asked)
    assert largest / GB == pytest.approx(37, rel=0.01)  # 32 heads x 24,000^2 x 2 bytes
    plan = planned("gemma-2-27b", 4, "m4-pro-48", context_tokens=24_000, prefill_step_size=65_536)
    assert plan.machine.max_buffer_bytes is not None
    assert largest > plan.machine.max_buffer_bytes > plan.largest_buffer_bytes
    assert any("prefill step lowered" in note for note in plan.notes)


@pytest.mark.parametrize("engine", [mlx, llama_cpp, transformers, vllm])
def test_every_term_says_how_sure_it_is_and_where_it_is_from(engine: Any) -> None:
    """B14: 40.5 of 91.9 GB said, out of memory all the same: transients were not in it."""
    architecture = architecture_of("qwen3-8b")
    quant = {llama_cpp: "Q4_K_M", transformers: "nf4", vllm: "awq"}.get(engine)
    weights = mlx_weights("qwen3-8b", 4)
    if quant is not None:
        weights = engine.weights_term(architecture, quant)
    terms = engine.inference_terms(architecture, weights, Inference())
    assert {t.name for t in terms} >= {"weights", "kv_cache", "activations"}
    assert all(t.basis in ("exact", "bound", "fitted") and t.source for t in terms)
    assert all(t.basis != "exact" for t in terms if t.name in ("activations", "attention"))


# unslothai/unsloth-zoo pull request 1151: Qwen3-4B in 4 bits on a Mac, MiB above 2,160 of weights,
# with a cache in bf16 and in 4 bits, by mlx-lm with its default step.
@pytest.mark.parametrize(
    ("tokens", "plain_mib", "quantized_mib"),
    [(8192, 2267, 3337), (16_384, 3388, 5734), (32_768, 5670, 9967)],
)
def test_a_quantized_cache_raises_the_peak_of_a_long_prompt(
    tokens: int, plain_mib: int, quantized_mib: int
) -> None:
    """C4: no fused attention reads a quantized cache, so scores take more than is saved."""
    plain = peak(mlx_terms("qwen3-4b", 4, Inference(tokens)))[1]
    quantized = peak(mlx_terms("qwen3-4b", 4, Inference(tokens, kv_bits=4)))[1]
    assert plain / MIB == pytest.approx(2160 + plain_mib, rel=0.12)
    assert quantized / MIB == pytest.approx(2160 + quantized_mib, rel=0.12)
    assert quantized > 1.2 * plain


def test_weights_and_cache_are_told_side_by_side() -> None:
    """C5: a 3-bit Kimi K2.5 crashed a 512 GB Mac; its user took the cache to be 3-bit too."""
    line = settings_text(planned("kimi-k2.5", 3, "mac-studio-m3-ultra-512", batch_size=4))
    assert "weights 3-bit, KV cache 16-bit" in line


def test_the_context_that_fits_is_a_number_before_the_first_request() -> None:
    """C13: 131k tokens at 64 KiB each are 8.59 GB, eight of them 68.7 GB, on a 128 GB Mac."""
    one = mlx_terms("qwen3.5-27b", 4, Inference(131_072))
    eight = mlx_terms("qwen3.5-27b", 4, Inference(131_072, batch_size=8))
    assert held(one, "kv_cache", "decode") == 64 * 1024 * 131_072
    assert held(eight, "kv_cache", "decode") / GB == pytest.approx(68.7, abs=0.05)


def test_prompts_that_llama_server_saves_are_a_row_of_their_own() -> None:
    """C21: entries of 14 GiB were kept in the host's memory, and no figure showed them."""
    architecture, workload = architecture_of("qwen3.5-27b"), Inference(220_000)
    weights = llama_cpp.weights_term(architecture, "Q4_K_M")
    settings = llama_cpp.LlamaCpp(cache_ram_mib=8192)
    without = llama_cpp.inference_terms(architecture, weights, workload)
    terms = llama_cpp.inference_terms(architecture, weights, workload, settings)
    assert [t for t in terms if t not in without] == [
        MemoryTerm("saved_prompts", 8 * GIB, "bound", "--cache-ram")
    ]


@pytest.mark.parametrize("memory_gib", [8, 16, 24, 32, 64, 128, 512])
def test_the_default_context_follows_from_the_budget(memory_gib: int) -> None:
    """C20: a cache sized for a large machine took 12.6 GB of a 16 GB Mac."""
    machine = described_machine(memory_gib * GIB)
    form = Form("4-bit", mlx_weights("qwen3-4b", 4), 2)
    plan = plan_inference(architecture_of("qwen3-4b"), [form], Request(), machine)
    assert plan.verdict in ("fits", "tight")
    assert plan.ledger.predicted_peak_bytes <= plan.budget.limit_bytes
    if memory_gib >= 24:
        assert plan.workload.context_tokens == 32_768


def test_all_experts_are_in_memory() -> None:
    """H1: 122B-A10B called a perfect fit for 48 GB at 33; it takes 70 to 75."""
    plan = planned("qwen3.5-122b-a10b", 4, "macbook-pro-m4-pro-48")
    assert plan.verdict == "exceeds"
    assert 68 * GB < plan.form.weights.size_bytes < 75 * GB


@pytest.mark.parametrize("quant", ["awq", "gptq", "int8"])
def test_packed_weights_are_counted_by_their_shapes(quant: str) -> None:
    """H3: packed repositories of a 27B counted as 7.8B, three to six times too small."""
    architecture = architecture_of("qwen3.5-27b")
    assert architecture.num_parameters == pytest.approx(27e9, rel=0.05)
    size = transformers.weights_term(architecture, quant).size_bytes
    assert size > architecture.num_parameters * (1 if quant == "int8" else 0.5)


def test_a_context_is_asked_for_and_not_the_models_maximum() -> None:
    """H4: a 9B refused for 8 GB because 262k tokens were assumed."""
    longest = architecture_of("qwen3.5-9b").max_position_embeddings
    assert longest == 262_144
    asked, whole = (
        peak(mlx_terms("qwen3.5-9b", 4, Inference(tokens)))[1] for tokens in (8192, longest)
    )
    assert Inference().context_tokens == 8192
    assert whole > asked + 8 * GB


def test_layers_with_windows_stop_growing() -> None:
    """H5: gemma-4-12b, 128k, q8: 58 GB said, 24 true; a cache overcounted 40 times."""
    architecture = architecture_of("gemma-4-12b")
    weights = llama_cpp.weights_term(architecture, "Q8_0")
    terms = llama_cpp.inference_terms(architecture, weights, Inference(131_072))
    assert peak(terms)[1] < 24 * GB
    attentions = [m for layer in architecture.layers for m in layer.mixers]
    widths = [m.num_key_value_heads * (m.head_dim + m.v_head_dim) for m in attentions]
    without_windows = 2 * sum(widths) * 131_072
    assert held(terms, "kv_cache") < 0.1 * without_windows


def test_latents_are_counted_as_the_engine_stores_them() -> None:
    """H6: DeepSeek-V3: 697 GiB said, 377 with its latents. Where heads are expanded they count."""
    architecture = architecture_of("deepseek-v3")
    weights = llama_cpp.weights_term(architecture, "Q4_K_M")
    terms = llama_cpp.inference_terms(architecture, weights, Inference(1))
    assert peak(terms)[1] / GIB == pytest.approx(377, abs=0.5)
    lite = architecture_of("deepseek-v2-lite")
    latent = llama_cpp.inference_terms(lite, llama_cpp.weights_term(lite, "Q4_K_M"), Inference())
    expanded = mlx_terms("deepseek-v2-lite", 4, Inference())
    ratio = held(expanded, "kv_cache", "decode") / held(latent, "kv_cache")
    assert ratio == pytest.approx(16 * (192 + 128) / 576)  # heads x (key + value) / latent


def test_only_the_attention_layers_of_a_hybrid_grow() -> None:
    """H8: 65.5 KB a token on 16 of 64 layers: 128k fit in 48 GB where 64k had been said."""
    long = planned("qwen3.5-27b", 4, "macbook-pro-m4-pro-48", context_tokens=131_072)
    assert long.verdict == "fits"
    assert held(long.ledger.terms, "kv_cache", "decode") / 131_072 == pytest.approx(65_536)


def test_unified_memory_is_one_pool() -> None:
    """H9: 32 GB counted as 57.6: as a card's memory and as the host's once more."""
    for row in macs():
        machine = described_machine(row.memory_gib * GIB)
        assert machine.host_memory_bytes is None
        assert (machine.limit_high_bytes or machine.limit_bytes) < machine.memory_bytes


def test_parameters_times_bytes_are_the_weights() -> None:
    """H10: Llama-3.1-70B in 16 bits shown as 64.7 GB; true: 141."""
    architecture = architecture_of("llama-3.1-70b")
    size = transformers.weights_term(architecture, "fp16").size_bytes
    assert size == 2 * architecture.num_parameters
    assert size / GB == pytest.approx(141, abs=0.2)


def test_only_what_exceeds_the_limit_is_refused() -> None:
    """H14: guards that refused what runs: the most repeated complaint of all."""
    tight = planned("qwen3-14b", 4, "macbook-air-m4-16")
    assert tight.verdict == "tight"
    assert tight.active_peak_bytes > tight.budget.budget_bytes
    assert verdict(tight.budget.limit_bytes, tight.budget) == "tight"
    assert verdict(tight.budget.limit_bytes + 1, tight.budget) == "exceeds"


def test_the_reserve_is_explicit_and_can_be_set() -> None:
    """H18: a traffic light that left nothing to the system."""
    machine = machine_named("mac-mini-m4-16")
    usual, own = budget_of(machine), budget_of(machine, reserve_bytes=2 * GIB)
    assert usual.reserve_bytes == 8 * GIB
    assert "reserve of 8.00 GiB" in " ".join(name for name, _ in usual.lines)
    assert own.budget_bytes > usual.budget_bytes


def test_a_mixture_of_experts_is_fast_for_its_size() -> None:
    """H2: 35B-A3B said to make 34.7 tokens/s; measured: 77.6."""
    machine = machine_named("mac-studio-m2-ultra-192")
    found = what_fits(machine, Wanted(text="qwen3.5", max_parameters=40 * GB)).found
    speeds = {one.model.name: one.speed.decode_tps or 0 for one in found}
    assert speeds["qwen3.5-35b-a3b"] > 3 * speeds["qwen3.5-27b"] > 0


def test_a_speed_is_a_range_below_what_the_bandwidth_would_allow() -> None:
    """H19: 245 tokens/s by bandwidth, 85 measured, on an M3 Ultra."""
    machine = machine_named("mac-studio-m3-ultra-512")
    for one in what_fits(machine, Wanted(text="qwen3", kind="dense")).found:
        low, best, high = one.speed.decode_tps_low, one.speed.decode_tps, one.speed.decode_tps_high
        assert None not in (low, best, high)
        assert (low or 0) < (best or 0) < (high or 0)
        if one.parameters > 10 * GB:  # of smaller ones the embeddings, read by the row, are more
            read = 0.9 * one.weights_bytes
            assert (best or 0) * read < (machine.bandwidth_bytes_per_s or 0)


def test_active_parameters_are_known_beside_all_of_them() -> None:
    """H1: memory by all parameters, speed by those that a token uses: both are listed."""
    listed = {one.name: one for one in listed_models("qwen3.5")}["qwen3.5-35b-a3b"]
    assert listed.parameters == pytest.approx(35e9, rel=0.03)
    assert listed.active_parameters == pytest.approx(3e9, rel=0.2)
