"""`uma estimate`: one model under each engine, against `uma run`, published figures and itself."""

import json
from dataclasses import replace
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.cli import main
from uma.errors import UnknownName, UsageError
from uma.ledger import peak
from uma.machine import Machine, budget_of
from uma.plan.estimate import (
    DEFAULT_FORMATS,
    Estimate,
    estimate_of_engine,
    format_of_bits,
    rules_of,
)
from uma.units import GIB
from uma.workload import Inference

MACHINE = Machine("a PC", "host", "cpu", 64 * GIB, 64 * GIB, "installed memory")
MODELS = ["meta-llama/Meta-Llama-3-8B-Instruct", "google/gemma-3-12b-it", "Qwen/Qwen3-30B-A3B"]


def estimated(model: str, engine: Any, tokens: int = 8192, quant: str | None = None) -> Estimate:
    architecture = architecture_from_config(model_config(find_model(model)).values)
    return estimate_of_engine(
        architecture,
        engine,
        quant,
        Inference(tokens),
        budget_of(MACHINE),
        machine=MACHINE,
    )


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_terms_under_mlx_are_those_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--bits", "4", "--context", "4096", "--kv-bits", "8"]
    run = document(capsys, "run", *options, "--dry-run")["ledger"]["terms"]
    ours = document(capsys, "estimate", *options, "--engine", "mlx")["terms"]
    assert [(t["name"], t["phase"], t["size_bytes"]) for t in ours] == [
        (t["name"], t["phase"], t["predicted_bytes"]) for t in run
    ]


def test_the_cache_of_deepseek_v3_at_8k_is_its_latents() -> None:
    """576 numbers of 2 bytes for each of 61 layers and 8,192 tokens: 0.536 GiB (llama.cpp)."""
    terms = estimated("deepseek-ai/DeepSeek-V3", "llama.cpp").ledger.terms
    assert sum(t.size_bytes for t in terms if t.name == "kv_cache") == 576 * 2 * 61 * 8192


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", DEFAULT_FORMATS)
def test_the_largest_context_fits_and_what_exceeds_the_budget_is_never_said_to_fit(
    model: str, engine: Any
) -> None:
    found = estimated(model, engine)
    assert found.max_context_tokens is not None
    longest = estimated(model, engine, found.max_context_tokens)
    assert longest.ledger.verdict == "fits"
    assert longest.headroom_bytes >= 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", DEFAULT_FORMATS)
def test_more_context_never_needs_less(model: str, engine: Any) -> None:
    sizes = [
        peak(estimated(model, engine, tokens).ledger.terms)[1]
        for tokens in (256, 1000, 1024, 4096, 8192, 20_000, 32_768)
    ]
    assert sizes == sorted(sizes)


def test_a_smaller_budget_ends_the_context_earlier() -> None:
    small = replace(MACHINE, memory_bytes=7 * GIB, limit_bytes=7 * GIB)
    architecture = architecture_from_config(model_config(find_model(MODELS[0])).values)
    found = estimate_of_engine(
        architecture,
        "llama.cpp",
        "Q4_K_M",
        Inference(131_072),
        budget_of(small),
        machine=small,
        llama={"cache_type_k": "f32", "cache_type_v": "f32"},
    )
    assert found.ledger.verdict == "exceeds"
    assert found.max_context_tokens is not None
    assert found.max_context_tokens < 8192


@pytest.mark.parametrize("engine", DEFAULT_FORMATS)
def test_every_engine_knows_its_own_words_alone(engine: Any) -> None:
    assert DEFAULT_FORMATS[engine] in rules_of(engine).formats()
    with pytest.raises(UnknownName, match="no_such"):
        estimated(MODELS[0], engine, quant="no_such")


def test_bits_that_an_engine_has_no_format_for_are_refused_with_those_it_has() -> None:
    assert format_of_bits("llama.cpp", 4) == "Q4_K_M"
    with pytest.raises(UsageError, match=r"4 \(awq\), 8 \(fp8\)"):
        format_of_bits("vllm", 3)


def test_a_named_mac_runs_mlx_and_a_named_card_llama_cpp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mac = document(capsys, "estimate", "llama-3-70b", "--machine", "mac-studio-m2-ultra-192")
    card = document(capsys, "estimate", "llama-3-70b", "--machine", "rtx-4090")
    assert (mac["workload"]["engine"], mac["verdict"]) == ("mlx", "fits")
    assert (card["workload"]["engine"], card["verdict"]) == ("llama.cpp", "exceeds")
    weights = {t["name"]: t["size_bytes"] for t in mac["terms"]}["weights"]
    assert weights == 39_688_355_840  # mlx-community's 4-bit repository
