"""The transformers engine against what torch, transformers and bitsandbytes really held."""

import ast
import csv
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.architecture.families import NAMES
from uma.architecture.layers import Architecture
from uma.engines import schemes
from uma.engines import transformers as engine
from uma.engines.transformers_cache import CacheRules, cache_bytes, state_bytes
from uma.errors import UnknownName, UsageError
from uma.ledger import peak, phase_totals
from uma.memory.term import MemoryTerm
from uma.units import GIB
from uma.workload import Inference

DATA = Path(__file__).parent / "data"
MODELS = Path(engine.__file__).parent.parent / "data" / "models"
ORACLE = list(csv.DictReader((DATA / "transformers.csv").read_text().splitlines()[1:]))
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "transformers_models.json").read_text())
BARE = engine.Settings(cublas_workspace_bytes=0, cuda_context_bytes=0)
NOTHING = MemoryTerm("weights", 0, "exact", "")


def rows(kind: str) -> list[Any]:
    return [
        pytest.param(row, id="-".join(row[k] for k in list(row)[1:6]))
        for row in ORACLE
        if row["kind"] == kind
    ]


def small(row: dict[str, str]) -> Architecture:
    return architecture_from_config(CONFIGS[row["model"]])


def catalog(name: str) -> Architecture:
    return architecture_from_config(json.loads((MODELS / f"{name}.json").read_text()))


def terms_of(row: dict[str, str], settings: engine.Settings) -> tuple[MemoryTerm, ...]:
    """The terms of a run whose last call saw as many tokens as the row's."""
    prompt, generated = int(row["prompt"]), int(row["generated"])
    workload = Inference(prompt + generated + 1, prompt, batch_size=int(row["batch"]))
    terms = engine.inference_terms(small(row), NOTHING, workload, settings)
    return tuple(term for term in terms if term.name not in ("runtime_context", "buffer_pool"))


@pytest.mark.parametrize("row", rows("matrix"))
def test_a_matrix_is_as_large_as_the_library_that_packs_it_makes_it(row: dict[str, str]) -> None:
    assert schemes.schemes()[row["what"]].bytes_of(384, 256) == int(row["bytes"])


@pytest.mark.parametrize("row", rows("weights"))
def test_weights_are_the_parameters_and_states_of_the_real_class(row: dict[str, str]) -> None:
    size = engine.weights_term(small(row), row["what"]).size_bytes
    if row["model"] == "deepseek_v3":
        # Its routers are float32 in transformers, which only a model this small feels.
        assert size == pytest.approx(int(row["bytes"]), rel=0.004)
    else:
        assert size == int(row["bytes"])


@pytest.mark.parametrize("row", rows("cache"))
def test_caches_are_the_storages_behind_the_real_cache_objects(row: dict[str, str]) -> None:
    """The recorded static ones have 80 slots."""
    prompt, generated = int(row["prompt"]), int(row["generated"])
    implementation = "static" if row["what"] == "static" else "dynamic"
    rules = CacheRules(implementation, 80, batch_size=int(row["batch"]))
    held = cache_bytes(small(row), rules, prompt + generated, 1 if generated else prompt)
    assert held + state_bytes(small(row), rules) == int(row["bytes"])


def test_a_static_cache_has_a_slot_less_than_tokens() -> None:
    """generation/utils.py: max_cache_length is max_length - 1."""
    settings = engine.Settings(cache_implementation="static")
    terms = engine.inference_terms(
        catalog("Qwen__Qwen2.5-7B-Instruct"), NOTHING, Inference(4096, 16), settings
    )
    sizes = {term.size_bytes for term in terms if term.name == "kv_cache"}
    assert sizes == {4095 * 28 * 2 * 4 * 128 * 2}


@pytest.mark.parametrize("row", rows("peak"))
def test_peaks_are_within_seven_percent_of_tensors_alive_at_once(
    row: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of three layers: what one layer's cache adds a moment later is up to 6 % of them."""
    monkeypatch.setattr(engine, "SAMPLING_BYTES", 0)  # one call of the model samples nothing
    terms = terms_of(row, replace(BARE, attn_implementation=row["what"]))
    phase = "decode" if int(row["generated"]) else "prefill"
    found, measured = phase_totals(terms)[phase], int(row["bytes"])
    if phase == "decode" and CONFIGS[row["model"]].get("sliding_window"):
        # The first decoding step frees one window's surplus after another: ours has them all.
        assert measured <= found <= 1.2 * measured or found == pytest.approx(measured, rel=0.07)
    else:
        assert found == pytest.approx(measured, rel=0.07)


# Peak GiB of torch.cuda.max_memory_allocated over a run of 2,048 generated tokens on an A100 with
# transformers 4.46.0: QwenLM/Qwen2.5 at a912d23, docs/source/benchmark/speed_benchmark.rst.
QWEN = [
    ("0.5B", "bf16", 1, 0.97),
    ("0.5B", "bf16", 30720, 2.34),
    ("0.5B", "gptq", 30720, 1.85),
    ("1.5B", "gptq-int8", 14336, 3.03),
    ("3B", "awq", 30720, 5.37),
    ("7B", "bf16", 6144, 15.38),
    ("7B", "bf16", 30720, 19.97),
    ("7B", "gptq", 30720, 11.11),
    ("7B", "gptq-int8", 30720, 14.01),
    ("7B", "awq", 14336, 7.92),
    ("72B", "awq", 14336, 46.38),
]


@pytest.mark.parametrize(("size", "quant", "prompt", "measured"), QWEN)
def test_qwen_2_5_peaks_as_its_makers_measured(
    size: str, quant: str, prompt: int, measured: float
) -> None:
    settings = engine.settings_of(
        "4.46.0", engine.Settings(attn_implementation="flash_attention_2")
    )
    assert _allocated(f"Qwen__Qwen2.5-{size}-Instruct", quant, prompt, settings) == pytest.approx(
        measured * GIB, rel=0.05
    )


@pytest.mark.parametrize(
    ("quant", "prompt", "num_devices", "measured"),
    [  # the same pages: the sum of the peaks of each card
        ("bf16", 6144, 2, 140.00),
        ("bf16", 14336, 3, 149.14),
        ("bf16", 30720, 3, 164.79),
        ("gptq-int8", 30720, 2, 94.75),
        ("awq", 30720, 2, 61.64),
    ],
)
def test_layers_split_over_cards_need_their_temporaries_on_each(
    quant: str, prompt: int, num_devices: int, measured: float
) -> None:
    settings = engine.settings_of(
        "4.46.0",
        engine.Settings(attn_implementation="flash_attention_2", num_devices=num_devices),
    )
    found = _allocated("Qwen__Qwen2.5-72B-Instruct", quant, prompt, settings)
    assert found == pytest.approx(measured * GIB, rel=0.01)


def test_version_4_38_keeps_logits_of_the_whole_prompt_in_two_widths() -> None:
    """27.61 GiB for 30,720 tokens of Qwen2-0.5B, shaped as Qwen2.5-0.5B: the same pages."""
    settings = engine.settings_of(
        "4.38.2", engine.Settings(attn_implementation="flash_attention_2")
    )
    found = _allocated("Qwen__Qwen2.5-0.5B-Instruct", "bf16", 30720, settings)
    assert found == pytest.approx(27.61 * GIB, rel=0.01)


def _allocated(name: str, quant: str, prompt: int, settings: engine.Settings) -> int:
    model = catalog(name)
    workload = Inference(prompt + 2048, prompt)
    terms = engine.inference_terms(model, engine.weights_term(model, quant), workload, settings)
    return peak(t for t in terms if t.name not in ("runtime_context", "buffer_pool"))[1]


@pytest.mark.parametrize(
    ("name", "version", "measured"),
    [  # GiB at a prompt of one token, in two decimals: QwenLM's speed benchmark pages
        ("Qwen__Qwen2.5-0.5B-Instruct", "4.46.0", 0.68),
        ("Qwen__Qwen2.5-0.5B-Instruct", "4.38.2", 0.68),  # Qwen2's, of the same shapes
        ("Qwen__Qwen2.5-1.5B-Instruct", "4.46.0", 1.51),
        ("Qwen__Qwen2.5-3B-Instruct", "4.46.0", 2.50),
    ],
)
def test_a_checkpoint_with_a_head_of_its_own_peaks_while_it_is_loaded(
    name: str, version: str, measured: float
) -> None:
    settings = engine.settings_of(version, engine.Settings(own_head=True))
    allocated = _allocated(name, "awq", 1, settings)
    assert allocated == pytest.approx(measured * GIB, rel=0.01)
    tied_in_the_file = _allocated(name, "awq", 1, replace(settings, own_head=False))
    assert tied_in_the_file < 0.97 * allocated
    untied = "meta-llama__Meta-Llama-3-8B-Instruct"
    assert _allocated(untied, "awq", 1, settings) == _allocated(
        untied, "awq", 1, replace(settings, own_head=False)
    )


def test_bitsandbytes_leaves_fused_experts_in_sixteen_bits() -> None:
    model = catalog("Qwen__Qwen3-30B-A3B")
    whole = engine.weights_term(model, "bf16").size_bytes
    assert engine.weights_term(model, "nf4").size_bytes > 0.95 * whole
    assert engine.weights_term(model, "fp8").size_bytes < 0.55 * whole


def test_double_quantization_saves_about_three_eighths_of_a_bit() -> None:
    """0.373 bits a parameter by the QLoRA paper (arXiv 2305.14314, section 3)."""
    plain, double = (schemes.schemes()[name] for name in ("nf4", "nf4-double"))
    saved = plain.bytes_of(4096, 4096) - double.bytes_of(4096, 4096)
    assert 8 * saved / 4096**2 == pytest.approx(0.373, abs=0.001)


def test_latent_caches_are_whole_heads_before_version_5_16() -> None:
    model = catalog("deepseek-ai__DeepSeek-V3")
    now = engine.settings_of("5.16.0")
    before = engine.settings_of("5.14.0")
    sizes = [
        next(
            term.size_bytes
            for term in engine.inference_terms(model, NOTHING, Inference(8193, 8192), settings)
            if term.name == "kv_cache" and term.phase == "decode"
        )
        for settings in (now, before)
    ]
    assert sizes == [61 * 576 * 2 * 8192, 61 * 128 * (192 + 128) * 2 * 8192]


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"4\.46\.0"):
        engine.settings_of("torch 2.1")


def test_formats_have_names_of_configs_and_unknown_ones_are_errors() -> None:
    model = catalog("Qwen__Qwen2.5-0.5B-Instruct")
    sizes = {engine.weights_term(model, name).size_bytes for name in ("gptq", "GPTQ-Int4")}
    assert len(sizes) == 1
    with pytest.raises(UnknownName, match=r"Q4_K_M.*nf4"):
        engine.weights_term(model, "Q4_K_M")
    assert all(engine.weights_term(model, name).size_bytes for name in engine.formats())


def test_a_quantized_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="16 bits"):
        engine.inference_terms(small(ORACLE[-1]), NOTHING, Inference(kv_bits=8))


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_more_context_never_needs_less(name: str, attention: Any) -> None:
    settings = engine.Settings(attn_implementation=attention)
    model = architecture_from_config(CONFIGS[name])
    sizes = [
        peak(engine.inference_terms(model, NOTHING, Inference(tokens), settings))[1]
        for tokens in (2, 15, 16, 17, 64, 500)
    ]
    assert sizes == sorted(sizes)


def test_chunks_of_the_prompt_bound_the_activations() -> None:
    model = catalog("Qwen__Qwen2.5-7B-Instruct")
    whole, cut = (
        peak(engine.inference_terms(model, NOTHING, Inference(30720), settings))[1]
        for settings in (engine.Settings(), engine.Settings(prefill_chunk_size=1024))
    )
    assert whole - cut > 3 * GIB


def test_the_models_that_are_eager_by_default_are_those_whose_classes_have_no_sdpa() -> None:
    """``_supports_sdpa`` in the sources of the transformers that is installed, without torch."""
    models = Path(find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr,arg-type]
    eager, checked = set(), set()
    for name in {*NAMES, "gemma3", "bloom", "mpt"}:
        source = models / name / f"modeling_{name}.py"
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef) and "PreTrainedModel" in map(ast.unparse, node.bases):
                checked.add(name)
                if "_supports_sdpa = True" not in map(ast.unparse, node.body):
                    eager.add(name)
    assert len(checked) > 60
    assert eager - {"mamba", "mamba2", "falcon_mamba"} == engine.EAGER_BY_DEFAULT


def test_the_cache_of_decode_is_of_its_last_token_and_the_prompts_surplus_apart() -> None:
    """gemma-3-12b at 128k: 8 full layers, 40 of window 1,024, which hold the prompt until then."""
    model = catalog("google__gemma-3-12b-it")
    tokens, row = 131072, 2 * 8 * 256 * 2
    terms = engine.inference_terms(model, NOTHING, Inference(tokens, tokens - 2))
    found = {t.name: t for t in terms if t.phase == "decode"}
    held = row * (8 * (tokens - 1) + 40 * 1024)
    assert found["kv_cache"].size_bytes == held
    assert found["kv_cache"].basis == "exact"
    assert found["other"].basis == "bound"
    assert held + found["other"].size_bytes == row * 48 * (tokens - 2)
