"""Names: what an alias, a hub id, a tag stands for, and what an unknown one is answered."""

import subprocess
import sys
from pathlib import Path

import pytest

from uma import catalog
from uma.catalog import find_chips, find_model, model_names, models, short_name, words
from uma.checkpoint.names import parse_quant, resolve
from uma.errors import UnknownName, UsageError

LLAMA_70B = "meta-llama/Meta-Llama-3-70B-Instruct"


@pytest.mark.parametrize(
    ("name", "hf_id"),
    [
        ("llama-3-70b", LLAMA_70B),
        ("Llama 3 70B", LLAMA_70B),
        ("llama_3_70b_instruct", LLAMA_70B),
        ("llama3:70b", LLAMA_70B),
        ("llama3:70b-instruct-q4_K_M", LLAMA_70B),
        ("META-LLAMA/meta-llama-3-70b-instruct", LLAMA_70B),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama3", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama3:latest", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("qwen3:30b-a3b-q4_K_M", "Qwen/Qwen3-30B-A3B"),
        ("qwen3-30b-a3b-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1"),
        ("deepseek-r1:7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("gemma3:27b-it-qat", "google/gemma-3-27b-it"),
        ("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("mixtral:8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("nemotron-3-nano-30b-a3b-bf16", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    ],
)
def test_a_name_means_its_model(name, hf_id):
    assert resolve(name).model.hf_id == hf_id


def test_every_model_has_an_alias_of_its_own():
    for model in models():
        assert resolve(short_name(model)).model == model
        assert resolve(model.hf_id.upper()).model == model
        assert resolve(model.hf_id.partition("/")[2]).model == model


def test_no_bits_or_16_give_the_original():
    assert resolve("llama-3-70b").repo == LLAMA_70B
    assert resolve("llama-3-70b", bits=16).repo == LLAMA_70B
    assert not resolve("llama-3-70b", bits=16).quantize_on_load


def test_fewer_bits_give_a_repository_that_a_source_names():
    found = resolve("llama-3-70b", bits=4)
    assert found.repo == "mlx-community/Meta-Llama-3-70B-Instruct-4bit"
    assert found.repository.source
    assert not found.quantize_on_load
    assert resolve("qwen3-30b-a3b", bits=8).repo == "mlx-community/Qwen3-30B-A3B-8bit"
    assert resolve("qwen3:30b-a3b-q8_0").repo == "mlx-community/Qwen3-30B-A3B-8bit"


def test_bits_that_no_known_repository_has_quantize_the_original_on_load():
    found = resolve("llama-3-70b", bits=6)
    assert (found.repo, found.bits, found.quantize_on_load) == (LLAMA_70B, 6, True)


def test_no_repository_is_ever_invented():
    known = {row.repo for row in catalog.repositories()} | {model.hf_id for model in models()}
    for model in models():
        for bits in (2, 3, 4, 5, 6, 8, 16):
            assert resolve(model.hf_id.partition("/")[2], bits=bits).repo in known


def test_a_mode_is_kept_and_never_replaced_by_another():
    name = "nemotron-3-nano-30b-a3b"
    assert resolve(name, quant="mxfp4").repo.endswith("-MLX-MXFP4")
    assert resolve(name, quant="nvfp4").repo.endswith("-NVFP4")
    assert resolve(name, bits=4).repo.endswith("-MLX-4Bit")
    found = resolve("llama-3-70b", quant="mxfp4")
    assert (found.repo, found.mode, found.quantize_on_load) == (LLAMA_70B, "mxfp4", True)
    assert resolve("gpt-oss-20b", bits=4).repo == "mlx-community/gpt-oss-20b-MXFP4-Q8"


def test_a_repository_is_taken_as_it_is_with_the_model_it_was_made_from():
    found = resolve("mlx-community/meta-llama-3-70b-instruct-4bit")
    assert found.repo == "mlx-community/Meta-Llama-3-70B-Instruct-4bit"
    assert found.model.hf_id == LLAMA_70B
    assert not found.quantize_on_load


def test_an_unlisted_repository_says_its_model_by_its_name():
    found = resolve("someone/Qwen3-14B-8bit")
    assert (found.repo, found.model.hf_id) == ("someone/Qwen3-14B-8bit", "Qwen/Qwen3-14B")
    assert found.repository.bits == 8
    assert resolve("someone/else-entirely").model is None


def test_what_follows_the_colon_of_a_hub_id_picks_a_gguf_file():
    found = resolve("bartowski/Meta-Llama-3-8B-Instruct-GGUF:Q4_K_M")
    assert found.repo == "bartowski/Meta-Llama-3-8B-Instruct-GGUF"
    assert found.gguf_type == "Q4_K_M"
    assert found.model.hf_id == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert not found.quantize_on_load


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3-71b", "llama-3-70b"),
        ("quen3-8b", "qwen3-8b"),
        ("gemma-3-28b", "gemma-3-27b"),
        ("smolm2-135m", "smollm2-135m"),
    ],
)
def test_an_unknown_name_is_answered_with_the_three_nearest(name, near):
    with pytest.raises(UnknownName) as error:
        resolve(name)
    listed = str(error.value).partition("nearest: ")[2].partition(". ")[0].split(", ")
    assert listed[0] == near
    assert len(listed) == 3


def test_an_ambiguous_name_lists_what_it_may_be():
    with pytest.raises(UnknownName, match=r"may be .*DeepSeek-V3, .*DeepSeek-V3\.1"):
        resolve("deepseek")


@pytest.mark.parametrize("name", ["", " ", "-", ":", "4bit", "q4_K_M", "\x1b[2J"])
def test_a_name_of_nothing_is_unknown(name):
    with pytest.raises(UnknownName) as error:
        resolve(name)
    assert str(error.value).isprintable()


def test_contradicting_widths_are_refused():
    with pytest.raises(UsageError, match="contradict"):
        resolve("llama3:70b-q8_0", bits=4)
    with pytest.raises(UsageError, match="contradict"):
        resolve("llama-3-70b", bits=8, quant="q4_K_M")


@pytest.mark.parametrize(
    ("text", "bits"),
    [("Q4_K_M", 4), ("q8_0", 8), ("IQ3_XXS", 3), ("4bit", 4), ("6-bit", 6), ("bf16", 16),
     ("F16", 16), ("fp32", 16), ("int8", 8), ("5", 5)],
)  # fmt: skip
def test_a_formats_name_gives_its_bits(text, bits):
    assert parse_quant(text) == (bits, None)


@pytest.mark.parametrize("text", ["q7_0", "7bit", "", "four", "q4 k", "999"])
def test_a_format_that_is_none_is_refused_with_the_list(text):
    with pytest.raises(UsageError, match="2, 3, 4, 5, 6, 8, 16"):
        parse_quant(text)


def test_words_split_where_a_number_begins():
    assert words("Qwen3-30B-A3B") == ("qwen", "3", "30", "b", "a", "3", "b")
    assert words("gemma-3-1b") != words("gemma-31b")


def test_a_chip_is_found_by_cores_and_memory():
    assert {chip.gpu_cores for chip in find_chips("Apple M4 Max")} == {32, 40}
    assert [chip.bandwidth_gb_per_s for chip in find_chips("m4 max", gpu_cores=32)] == [410]
    assert [chip.bandwidth_gb_per_s for chip in find_chips("M6", memory_gib=32)] == [170]
    with pytest.raises(UnknownName, match="nearest: M5 Ultra, M3 Ultra, M2 Ultra"):
        find_chips("M4 Ultra")
    with pytest.raises(UnknownName, match="32 GPU cores"):
        find_chips("M4 Max", gpu_cores=33)


def test_bandwidths_are_decimal():
    assert catalog.bytes_per_s(68.25) == 68_250_000_000


def test_one_alias_reads_one_config_in_under_20_ms():
    program = """
import builtins, sys, time
from uma import catalog
from uma.checkpoint import names
opened, real = [], builtins.open
builtins.open = lambda *a, **k: (opened.append(str(a[0])), real(*a, **k))[1]
before = time.process_time()
config = catalog.model_config(names.resolve("llama-3-70b", 4).model)
print(time.process_time() - before, sum(p.endswith(".json") for p in opened), len(sys.modules))
"""
    root = Path(__file__).parent.parent
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
        for _ in range(3)
    ]
    seconds = min(float(run.stdout.split()[0]) for run in runs)
    assert seconds < 0.020
    assert int(runs[0].stdout.split()[1]) <= 1


def test_a_model_is_found_in_any_case():
    assert find_model(LLAMA_70B.lower()).hf_id == LLAMA_70B
    assert find_model("nobody/nothing") is None


def test_the_names_to_complete_all_mean_a_model():
    assert "llama-3-70b" in model_names()
    assert "Qwen3-30B-A3B-8bit" in model_names()
    assert len(set(model_names())) == len(model_names())
    originals = {model.hf_id.partition("/")[2] for model in models()}
    for name in originals | {short_name(model) for model in models()}:
        assert name in model_names()
        assert resolve(name).model is not None
