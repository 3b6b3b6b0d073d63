"""Bytes of weights, against what mlx_lm.convert would store, and published sizes."""

import pytest

pytest.importorskip("mlx_lm")

from oracle.build import converted, weight_bytes
from oracle.catalog import config_of
from oracle.tiny import TINY

from uma.architecture import architecture_from_config
from uma.memory import weights
from uma.quantization import Quantization, quantization_of_config
from uma.runtime.trace_model import completed

FORMATS = [
    None,
    Quantization(4, 64),
    Quantization(3, 32),
    Quantization(8, 128),
    Quantization(4, 32, "mxfp4"),
    Quantization(8, 32, "mxfp8"),
    Quantization(4, 16, "nvfp4"),
]
REAL = [
    "Qwen__Qwen3-30B-A3B",
    "deepseek-ai__DeepSeek-V3",
    "google__gemma-4-E4B-it",
    "meta-llama__Llama-4-Scout-17B-16E-Instruct",
    "meta-llama__Meta-Llama-3.1-8B",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "openai__gpt-oss-120b",
]


@pytest.mark.parametrize("module", TINY)
def test_small_models_weigh_what_mlx_lm_converts_them_to(module: str) -> None:
    config = TINY[module]
    architecture = architecture_from_config(config)
    ours = [weights.weight_bytes(architecture, q).size_bytes for q in FORMATS]
    assert ours == [weight_bytes(converted(config, q)) for q in FORMATS]


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("quantization", [None, Quantization(4, 64)], ids=str)
def test_real_models_weigh_what_mlx_lm_converts_them_to(
    name: str, quantization: Quantization | None
) -> None:
    config = config_of(name)
    config.pop("quantization_config", None)
    ours = weights.weight_bytes(architecture_from_config(config), quantization)
    assert ours.size_bytes == weight_bytes(converted(completed(config), quantization))


def test_llama_3_70b_at_4_bits_is_39_688_355_840_bytes() -> None:
    architecture = architecture_from_config(config_of("meta-llama__Meta-Llama-3.1-70B"))
    term = weights.weight_bytes(architecture, Quantization())
    assert (term.size_bytes, term.basis) == (39_688_355_840, "exact")
    assert term.source == "catalog shapes x affine 4/64"


def test_tensors_sum_to_the_term() -> None:
    architecture = architecture_from_config(TINY["gpt_oss"])
    tensors = dict(weights.tensor_bytes(architecture, Quantization(4, 32)))
    total = weights.weight_bytes(architecture, Quantization(4, 32)).size_bytes
    assert sum(tensors.values()) == total


def test_weights_stored_with_exceptions_are_counted_by_them() -> None:
    config = TINY["qwen3"]
    stored = quantization_of_config(
        {"quantization": {"bits": 4, "group_size": 64, "model.embed_tokens": {"bits": 8}}}
    )
    architecture = architecture_from_config(config)
    ours = weights.weight_bytes(architecture, stored).size_bytes
    plain = weights.weight_bytes(architecture, Quantization(4, 64)).size_bytes
    assert ours - plain == config["vocab_size"] * config["hidden_size"] // 2
