"""`uma estimate`: one model under each engine, against `uma run`, published figures and itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma.architecture import architecture_from_config
from uma.catalog import aliases, find_model, ids_of, model_config
from uma.checkpoint.gguf import read_header
from uma.checkpoint.source import locate
from uma.cli import main
from uma.errors import UnknownName, UsageError
from uma.ledger import peak
from uma.machine import Machine, budget_of
from uma.machine.named import machine_named
from uma.plan.engine_case import EngineCase, engine_case, rules_of
from uma.plan.engine_words import (
    BITS,
    DEFAULT_FORMATS,
    FILE_TYPES,
    format_of_bits,
    stored_format,
)
from uma.plan.estimate import Asked
from uma.plan.inference import Request
from uma.plan.inverses import best_format, largest, largest_batch, largest_context
from uma.plan.mlx_case import mlx_case
from uma.units import GIB, MIB
from uma.workload import Inference

MACHINE = Machine("a PC", "host", "cpu", 64 * GIB, 64 * GIB, "installed memory")
MODELS = ["meta-llama/Meta-Llama-3-8B-Instruct", "google/gemma-3-12b-it", "Qwen/Qwen3-30B-A3B"]
ENGINES = [*DEFAULT_FORMATS, "mlx"]
LLAMA_TYPES = gguf.LlamaFileType


def case_of(
    model: str,
    engine: Any,
    tokens: int = 8192,
    quant: str | None = None,
    machine: Machine = MACHINE,
    **options: Any,
) -> EngineCase:
    architecture = architecture_from_config(model_config(find_model(model)).values)
    workload = Inference(tokens)
    return engine_case(
        architecture, engine, quant, workload, budget_of(machine), machine, options, model=model
    )


def asked(model: str, engine: Any, tokens: int = 8192, memory_gib: int = 64) -> Asked:
    """The model on a Mac of that memory under MLX, or on a PC of it under another engine."""
    if engine != "mlx":
        size = memory_gib * GIB
        machine = replace(MACHINE, memory_bytes=size, limit_bytes=size)
        return case_of(model, engine, tokens, machine=machine)
    machine = machine_named(f"m4 max {memory_gib}")
    return mlx_case(locate(model, bits=4), machine, Request(context_tokens=tokens))


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["llama-3-8b", "--bits", "4", "--context", "4096", "--kv-bits", "8"],
        ["qwen3-30b-a3b", "--context", "20000", "--prefill-step-size", "512"],
        ["gemma-3-12b", "--quant", "8bit", "--context", "8192", "--budget", "9GiB"],
        ["llama-3-70b", "--mode", "mxfp4", "--context", "1024", "--reserve", "1GiB"],
    ],
    ids=lambda options: options[0],
)
def test_the_terms_under_mlx_are_those_of_a_dry_run(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    run = document(capsys, "run", *options, "--dry-run")["ledger"]
    ours = document(capsys, "estimate", *options, "--engine", "mlx")
    assert [(t["name"], t["phase"], t["size_bytes"], t["basis"]) for t in ours["terms"]] == [
        (t["name"], t["phase"], t["predicted_bytes"], t["basis"]) for t in run["terms"]
    ]
    assert ours["verdict"] == run["verdict"]
    assert ours["total_bytes"] == run["predicted_peak_bytes"]


def test_the_cache_of_deepseek_v3_at_8k_is_its_latents() -> None:
    """576 numbers of 2 bytes for each of 61 layers and 8,192 tokens: 0.536 GiB (llama.cpp)."""
    terms = case_of("deepseek-ai/DeepSeek-V3", "llama.cpp").estimate().ledger.terms
    assert sum(t.size_bytes for t in terms if t.name == "kv_cache") == 576 * 2 * 61 * 8192


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_context_fits_and_the_next_step_of_256_does_not(
    model: str, engine: Any
) -> None:
    memory_gib = {"mlx": 36, "llama.cpp": 24, "transformers": 72, "vllm": 72}[engine]
    longest = largest_context(asked(model, engine, memory_gib=memory_gib))
    assert longest is not None
    found = asked(model, engine, longest, memory_gib).estimate()
    assert found.ledger.verdict == "fits"
    assert found.headroom_bytes >= 0
    if longest != found.architecture.max_position_embeddings:
        beyond = asked(model, engine, longest + 256, memory_gib).estimate()
        assert beyond.ledger.verdict != "fits"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_batch_fits_and_one_sequence_more_does_not(engine: Any) -> None:
    case = asked(MODELS[0], engine, 4096, memory_gib=36)
    most = largest_batch(case)
    assert most is not None
    budget = case.budget.budget_bytes
    assert case.excess_bytes(replace(case.workload, batch_size=most), budget) <= 0
    assert case.excess_bytes(replace(case.workload, batch_size=most + 1), budget) > 0


def test_the_best_format_is_the_widest_that_fits_in_the_engines_own_words() -> None:
    """Llama 3 8B is 15 GiB in 16 bits and 7.95 in Q8_0 (llama.cpp's README of quantize)."""
    on = {gib: asked(MODELS[0], "llama.cpp", 2048, gib) for gib in (8, 12, 24)}
    assert [best_format(case) for case in on.values()] == ["Q6_K", "Q8_0", "F16"]
    assert best_format(asked(MODELS[0], "transformers", 2048, 12)) == "int8"
    assert best_format(asked(MODELS[0], "mlx", 2048, 36)) == "bf16"
    assert best_format(asked("meta-llama/Meta-Llama-3-70B-Instruct", "mlx", 2048, 64)) == "5bit"


@given(st.integers(1, 5000), st.integers(1, 4000), st.integers(1, 60), st.integers(0, 10**6))
def test_the_search_finds_what_trying_every_number_finds(
    most: int, per_step: int, stair: int, room: int
) -> None:
    def excess(n: int) -> int:
        return -(-n // stair) * stair * per_step + n - room

    tried = [n for n in range(1, most + 1) if excess(n) <= 0]
    assert largest(excess, most) == (tried[-1] if tried else None)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(ENGINES),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
)
def test_more_context_never_needs_less(model: str, engine: Any, first: int, second: int) -> None:
    case = asked(model, engine)
    shorter, longer = (
        case.excess_bytes(replace(case.workload, context_tokens=tokens), 0)
        for tokens in sorted((first, second))
    )
    assert shorter <= longer


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [*MODELS, "Qwen/Qwen2.5-3B-Instruct", "google/gemma-2b-it"])
def test_another_512_tokens_of_context_never_need_less(model: str, engine: Any) -> None:
    """Qwen2.5 3B: Metal's buffers hold more in a chunk of 1,023 tokens than in one of 2,047."""
    contexts = [*range(512, 5120, 512), 8192, 16_384, 32_768, 65_536]
    found = (asked(model, engine, tokens).estimate().ledger.terms for tokens in contexts)
    needs = [peak(t for t in terms if t.name != "buffer_pool")[1] for terms in found]
    assert needs == sorted(needs)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(ENGINES),
    st.sampled_from([36, 48, 64, 128]),
    st.integers(1, 60_000),
)
def test_what_fits_is_never_above_the_ceiling_nor_the_budget(
    model: str, engine: Any, memory_gib: int, tokens: int
) -> None:
    found = asked(model, engine, tokens, memory_gib).estimate()
    peak_bytes, budget = found.ledger.predicted_peak_bytes, found.budget
    if found.ledger.verdict == "fits":
        assert peak_bytes <= min(budget.budget_bytes, budget.limit_bytes)
    if found.ledger.verdict == "exceeds":
        assert peak_bytes > budget.budget_bytes


@pytest.mark.parametrize("engine", DEFAULT_FORMATS)
def test_every_engine_knows_its_own_words_alone(engine: Any) -> None:
    assert {DEFAULT_FORMATS[engine], *BITS[engine].values()} <= set(rules_of(engine).formats())
    with pytest.raises(UnknownName, match="no_such"):
        case_of(MODELS[0], engine, quant="no_such")


def test_bits_that_an_engine_has_no_format_for_are_refused_with_those_it_has() -> None:
    assert format_of_bits("llama.cpp", 4) == "Q4_K_M"
    with pytest.raises(UsageError, match=r"4 \(awq\), 8 \(fp8\)"):
        format_of_bits("vllm", 3)


def test_a_checkpoint_keeps_the_format_that_its_config_states() -> None:
    """DeepSeek V3 is published in FP8, gpt-oss in MXFP4 (their config.json)."""
    for model, stored in (("deepseek-ai/DeepSeek-V3", "fp8"), ("openai/gpt-oss-20b", "mxfp4")):
        config = model_config(find_model(model)).values
        assert stored_format("vllm", config) == stored
        assert stored_format("llama.cpp", config) is None
    assert stored_format("vllm", {"quantization_config": {"quant_method": "gptq", "bits": 8}}) == (
        "gptq-int8"
    )


def test_a_named_mac_runs_mlx_and_a_named_card_llama_cpp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mac = document(capsys, "estimate", "llama-3-70b", "--machine", "mac-studio-m2-ultra-192")
    card = document(capsys, "estimate", "llama-3-70b", "--machine", "rtx-4090")
    assert (mac["workload"]["engine"], mac["verdict"]) == ("mlx", "fits")
    assert (card["workload"]["engine"], card["verdict"]) == ("llama.cpp", "exceeds")
    weights = {t["name"]: t["size_bytes"] for t in mac["terms"]}["weights"]
    assert weights == 39_688_355_840  # mlx-community's 4-bit repository


def test_a_card_holds_the_first_context_too_and_says_where_its_size_is_from() -> None:
    """llama.cpp pull request 15860: 451, 456 and 456 MiB unaccounted on three RTX 4090."""
    card = case_of(MODELS[0], "llama.cpp", machine=machine_named("rtx-4090")).estimate()
    context = next(t for t in card.ledger.terms if t.name == "runtime_context")
    assert (context.size_bytes, context.basis) == (456 * MIB, "fitted")
    assert "15860" in context.source
    mac = case_of(MODELS[0], "llama.cpp", machine=machine_named("m4 max 64")).estimate()
    assert all(t.name != "runtime_context" for t in mac.ledger.terms)


def test_on_a_card_the_embeddings_stay_with_the_host() -> None:
    """llama.cpp's log of Llama 3 8B in Q4_K_M: CUDA0 4403.49 MiB, CPU_Mapped 281.81 MiB."""
    card = case_of(MODELS[0], "llama.cpp", machine=machine_named("rtx-4090"))
    weights = {t.name: t.size_bytes for t in card.estimate().ledger.terms}["weights"]
    assert weights / MIB == pytest.approx(4403.49, abs=0.01)
    assert (card.weights.size_bytes - weights) / MIB == pytest.approx(281.81, abs=0.01)


def test_phases_sizes_and_what_binds_are_in_the_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(capsys, "estimate", "llama-3-8b", "--machine", "m4-max-64")
    terms = found["terms"]
    for phase in ("prefill", "decode"):
        held = sum(t["size_bytes"] for t in terms if t["phase"] in ("always", phase))
        assert found["phases"][f"{phase}_bytes"] == held
    assert found["total_bytes"] == max(found["phases"].values())
    assert found["binding_phase"] == "prefill"
    assert sum(found["basis"].values()) == found["total_bytes"]
    assert all(t["size_gib"] == round(t["size_bytes"] / GIB, 3) for t in terms)
    assert found["headroom_bytes"] == found["budget_bytes"] - found["total_bytes"]
    assert found["largest_buffer_bytes"] > 0


def test_the_verdicts_line_has_context_formats_and_the_engines_own_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["estimate", "llama-3-8b", "--machine", "m4-max-64", "--kv-bits", "8"])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("fits"))
    assert "at 8,192 tokens of context, batch 1" in line
    assert "weights 4bit (affine 4/64, 4.50 bits), KV cache 8-bit, groups of 64" in line
    assert line.endswith("mlx --prefill-step-size 2048")
    main(["estimate", "llama-3-8b", "--machine", "rtx-4090", "-np", "2", "-ctk", "q8_0"])
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("fits"))
    assert "batch 2" in line
    assert "weights Q4_K_M (" in line
    assert line.endswith("llama.cpp -c 16384 -np 2 -ub 512 -fa auto -ctk q8_0 -ctv f16")


@pytest.mark.parametrize("model", MODELS)
def test_what_is_known_of_a_model_serves_for_every_mac(model: str) -> None:
    """One case moved from machine to machine gives what a fresh one gives on each."""
    source, request = locate(model, bits=4), Request(context_tokens=20_000)
    machines = [machine_named(name) for name in ("m4 16", "m1 max 32", "m2 ultra 192")]
    shared = mlx_case(source, machines[0], request)
    for machine in machines:
        moved, fresh = shared.on(machine), mlx_case(source, machine, request)
        assert moved.estimate() == fresh.estimate()
        assert largest_context(moved) == largest_context(fresh)


def test_a_gguf_file_is_held_as_it_is_under_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q5_K_M)
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float16))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    held = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    card = case_of(MODELS[0], "llama.cpp", machine=machine_named("rtx-4090"))
    tied = card.stored_in(read_header(path))
    assert (tied.format, tied.bits, tied.weights.size_bytes) == ("Q5_K_M", 5, held)
    assert tied.card_bytes == held  # its embeddings are its head as well
    weights = {t.name: t.size_bytes for t in tied.estimate().ledger.terms}["weights"]
    assert weights == held


def test_the_types_of_gguf_files_are_llama_cpps() -> None:
    theirs = {t.value: t.name.removeprefix("MOSTLY_").removeprefix("ALL_") for t in LLAMA_TYPES}
    assert FILE_TYPES.items() <= theirs.items() | {38: "MXFP4_MOE"}.items()


def test_vllm_says_what_it_reserves_and_for_how_many_sequences() -> None:
    """0.92 of the card's 23.99 GiB, which hold 15 GiB of weights and 1 GiB for a sequence."""
    card = machine_named("rtx-4090")
    notes = case_of(MODELS[0], "vllm", machine=card).estimate().notes
    note = next(note for note in notes if note.startswith("vLLM takes"))
    share = 0.92 * card.memory_bytes / GIB
    assert note.startswith(f"vLLM takes {share:.2f} GiB of the card at its start")
    assert note.endswith("room for 5 such sequences")


def test_vllm_has_no_more_than_it_reserves() -> None:
    card = machine_named("rtx-4090")
    half = case_of(MODELS[0], "vllm", machine=card, gpu_memory_utilization=0.5).estimate()
    assert half.budget.budget_bytes == half.budget.limit_bytes == int(card.memory_bytes * 0.5)
    assert half.ledger.verdict == "exceeds"
    assert "gpu_memory_utilization" in half.budget.winner
    whole = case_of(MODELS[0], "vllm", machine=card, gpu_memory_utilization=1.0).estimate()
    assert whole.budget.limit_bytes == card.limit_high_bytes


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "estimate", "gemma-3-12b", "--machine", "m4-max-64")
    text = " ".join(found["notes"])
    assert "vision tower" in text
    assert "Metal's own context" in text
    tight = document(capsys, "estimate", "qwen3-14b", "--ram", "16GB")
    assert any("IOGPU" in note for note in tight["notes"])


def test_a_name_means_the_same_whether_all_names_are_worked_out_or_not() -> None:
    every = aliases()
    aliases.cache_clear()
    ids_of.cache_clear()
    assert {words: ids_of(words) for words in every} == every
    assert ids_of(("no", "such", "model")) == ()
