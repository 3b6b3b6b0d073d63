"""Names as people write them, against what their authors say they are."""

import pytest

from uma.architecture import architecture_from_config
from uma.catalog import model_config, models, repositories
from uma.checkpoint.free_names import find_format, find_free, read_name
from uma.errors import UmaError, UnknownName


@pytest.mark.parametrize(
    ("name", "hf_id"),
    [
        ("mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        ("mlx-community/Qwen3-235B-A22B-4bit-DWQ", "Qwen/Qwen3-235B-A22B"),
        ("bartowski/Qwen_Qwen3.6-27B-GGUF", "Qwen/Qwen3.6-27B"),
        ("Meta-Llama-3-8B-Instruct.Q4_K_M.gguf", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama-2-7b.Q4_0", "meta-llama/Llama-2-7b-chat-hf"),
        ("LLaMA-7B (configs/llama_7b.json)", "meta-llama/Llama-2-7b-chat-hf"),
        ("Qwen3-Coder-Next-Q4_K_M-00001-of-00004.gguf", "Qwen/Qwen3-Coder-Next"),
        ("google_gemma-4-E2B-it-Q8_0.gguf", "google/gemma-4-E2B-it"),
        ("deepseek-r1:14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("gemma3:12b-it-qat", "google/gemma-3-12b-it"),
        ("qwen3.5:122b", "Qwen/Qwen3.5-122B-A10B"),
        ("TheBloke/Mistral-7B-Instruct-v0.2-GPTQ", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-3B-Instruct"),
        ("Qwen/Qwen2-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen2.5-Coder-14B", "Qwen/Qwen2.5-14B-Instruct"),
        ("THUDM/glm-4-9b-chat", "zai-org/glm-4-9b-chat-hf"),  # not GLM-4-9B-0414
        ("mlx-community/Qwen2-VL-7B-Instruct-8bit", "Qwen/Qwen2-VL-7B-Instruct"),
        ("Qwen/Qwen2-57B-A14B-Instruct-GPTQ-Int4", "Qwen/Qwen2-57B-A14B-Instruct"),
        ("Qwen1.5-MoE-A2.7B", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
        ("dolphin-2.9-llama3-8b-Q5_K_M.gguf", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("CodeLlama 7B", "codellama/CodeLlama-7b-Instruct-hf"),
        ("mlx-community/gemma-3n-E4B-it-lm-4bit", "google/gemma-3n-E4B-it"),
        ("llama4:scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "meta-llama/Llama-3.3-70B-Instruct"),
        ("TheBloke/CodeLlama-34B-Instruct-GPTQ", "codellama/CodeLlama-34b-Instruct-hf"),
        ("llama 7B mostly Q4_0", "meta-llama/Llama-2-7b-chat-hf"),  # as llama-bench prints names
        ("qwen3moe 30B.A3B Q4_K - Medium", "Qwen/Qwen3-30B-A3B"),
        ("gpt-oss 20B MXFP4 MoE", "openai/gpt-oss-20b"),
        ("glm4moe 106B.A12B IQ4_XS - 4.25 bpw", "zai-org/GLM-4.5-Air"),
    ],
)
def test_a_free_name_means_the_model_whose_shapes_it_has(name: str, hf_id: str) -> None:
    assert find_free(name).hf_id == hf_id


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt-oss",  # of which size
        "llama3",
        "DeepSeek V3 class (671B, exact repo not stated)",
        "devstral-small-2:24b / mistral-small3.2:24b",
        "Qwen3-Embedding-8B",
        "Qwen2-Audio-7B-Instruct",  # has layers of its own
        "Qwen1.5-MoE-A14B",
        "Yi-1.5-34B-Chat-16K-merged",
        "Mistral-Small-2506",
        "7B model",
        "deepseek2 671B",  # DeepSeek-V3 or Kimi K2
        "phi3 3B",  # Phi-3 or Phi-4 mini
    ],
)
def test_a_name_that_no_rule_explains_to_the_last_word_is_unknown(name: str) -> None:
    with pytest.raises(UnknownName):
        find_free(name)


def test_every_catalog_name_means_a_model_of_the_same_shapes() -> None:
    for model in models():
        found = find_free(model.hf_id)
        assert (found.model_type, found.parameters) == (model.model_type, model.parameters)


def test_repositories_of_the_catalog_mean_the_model_that_they_were_made_from() -> None:
    known = [row for row in repositories() if row.hf_id]
    wrong = []
    for row in known:
        try:
            found = find_free(row.repo)
        except UnknownName:
            continue
        model = next(model for model in models() if model.hf_id == row.hf_id)
        if (found.model_type, found.parameters) != (model.model_type, model.parameters):
            wrong.append(row.repo)
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "scheme", "name", "bits", "group"),
    [
        ("Qwen3-4B-Instruct-2507-5bit-g32", "bits", "5bit", 5, 32),
        ("GLM-4.7-8bit-gs32", "bits", "8bit", 8, 32),
        ("GPTQ 4-bit 128g", "gptq", "gptq 4-bit", 4, 128),
        ("Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq", "gptq-int8", 8, None),
        ("AWQ int4 GEMM", "awq", "awq int4", 4, None),
        ("gpt-oss-20b-MXFP4-Q8", "mxfp4-q", "mxfp4-q8", 8, None),
        ("gpt-oss-120b-MXFP4-Q4", "mxfp4-q", "mxfp4-q4", 4, None),
        ("GLM-5-8bit-MXFP8", "mxfp8", "8bit-mxfp8", None, None),
        ("Nemotron-3-Nano-30B-A3B-NVFP4", "nvfp4", "nvfp4", None, None),
        ("llama 13B Q4_K - Medium", "gguf", "Q4_K_M", None, None),
        ("qwen3moe 235B.A22B Q6_K", "gguf", "Q6_K", None, None),
        ("Meta-Llama-3-8B.IQ4_XS.gguf", "gguf", "IQ4_XS", None, None),
        ("gemma3 27B IQ4_XS - 4.25 bpw", "gguf", "IQ4_XS", None, None),
        ("gemma3 27B IQ3_S mix - 3.66 bpw", "mixed", "iq3_s mix - 3.66 bpw", None, None),
        ("Qwen3-32B-exl2-4.25bpw", "mixed", "exl2", None, None),
        ("Qwen3-0.6B-bf16", "float", "bfloat16", None, None),
        ("Llama-3.2-3B-Instruct-bnb-4bit", "nf4", "bnb-4bit", None, None),
        ("Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "compressed-tensors", "w8a8", None, None),
        ("LLM.int8()", "int8", "llm.int8()", None, None),
        ("Qwen3-8B-FP8", "fp8", "fp8", None, None),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "mixed", "ud-q4_k_xl", None, None),
        ("Kimi-K2.6-mlx-DQ3_K_M-q8", "mixed", "dq3_k_m-q8", None, None),
        ("gemma-4-31B-it-qat-q4_0-unquantized", "float", "bfloat16", None, None),
        ("Llama-3.3-70B-Instruct-FP4", "nvfp4", "fp4", None, None),
        ("Qwen3.8-27B-AWQ-8bit", "awq", "awq-8bit", 8, None),
        ("Llama-3.2-1B-Instruct-unsloth-bnb-4bit", "mixed", "unsloth-bnb-4bit", None, None),
        ("Qwen3.6-27B-int4-AutoRound", "mixed", "int4-autoround", None, None),
        ("Qwen3.6-35B-A3B-tq3-g32", "mixed", "tq3", None, 32),
    ],
)
def test_a_format_is_read_where_the_name_tells_it(
    text: str, scheme: str, name: str, bits: int | None, group: int | None
) -> None:
    found = find_format(text)
    assert found is not None
    assert (found.scheme, found.name, found.bits, found.group_size) == (scheme, name, bits, group)


@pytest.mark.parametrize("text", ["Qwen3-30B-A3B", "llama3.1:8b", "gpt-oss-20b", "Phi-4", ""])
def test_sizes_and_versions_are_no_formats(text: str) -> None:
    assert find_format(text) is None


def test_names_said_to_share_shapes_have_the_parameters_that_their_authors_publish() -> None:
    published = {  # model cards and papers, in elements
        "llama-7b": 6_738_415_616,
        "llama-13b": 13_015_864_320,
        "Qwen2-7B-Instruct": 7_615_616_512,
        "Qwen2-72B-Instruct": 72_706_203_648,
        "Qwen2.5-Coder-3B": 3_085_938_688,
        "SmolLM-135M": 134_515_008,
    }
    for name, elements in published.items():
        try:
            config = model_config(read_name(name).model).values
            assert architecture_from_config(config).num_parameters == elements, name
        except UmaError as error:
            raise AssertionError(name) from error
