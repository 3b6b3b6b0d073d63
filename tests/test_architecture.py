"""Layers and parameters of every supported model, against mlx-lm's own classes."""

import contextlib
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx_lm
from mlx_lm.utils import MODEL_REMAPPING
from oracle.build import build, our_shapes, shapes
from oracle.catalog import completed, config_of, supported
from oracle.tiny import TINY

from uma.architecture import MODULES, REMAPPING, WRAPPERS, architecture_from_config
from uma.architecture.layers import Attention, Experts, Recurrent
from uma.errors import CheckpointError, UmaError, UnsupportedModel

LLAMA_70B = "meta-llama__Meta-Llama-3.1-70B"


@pytest.mark.parametrize("module", TINY)
def test_a_small_model_of_every_module_has_the_parameters_that_mlx_lm_builds(module: str) -> None:
    config = TINY[module]
    assert our_shapes(architecture_from_config(config)) == shapes(build(config))


@pytest.mark.parametrize("name", supported())
def test_a_real_model_has_the_parameters_that_mlx_lm_builds(name: str) -> None:
    config = config_of(name)
    if name == "CohereLabs__c4ai-command-a-03-2025":
        pytest.skip("mlx-lm's cohere2 refuses heads narrower than hidden_size / num_heads")
    assert our_shapes(architecture_from_config(config)) == shapes(build(completed(config)))


def test_most_of_the_shipped_models_are_laid_out() -> None:
    assert len(supported()) >= 173


def test_llama_3_70b_has_70_553_706_496_parameters() -> None:
    assert architecture_from_config(config_of(LLAMA_70B)).num_parameters == 70_553_706_496


def test_every_module_has_a_small_configuration() -> None:
    tested = {REMAPPING.get(module, module) for module in TINY}
    assert not (MODULES.keys() - {"qwen3_5"}) - tested


HELPERS = {
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
}
STILL_TO_DO = set(
    """
    Klear afm7 baichuan_m1 bailing_moe_v3 bitnet deepseek_v41 gear
    gptj hunyuan iquestloopcoder lille-130m llama4_text longcat_flash
    longcat_flash_ngram muse_glimmer muse_spark nanbeige olmo openelm phi3small phixtral
    plamo plamo2 plamo3 prism_hadamard_qwen35 recurrent_gemma rwkv7 spark2_5 step3p5 talkie
    """.split()  # noqa: SIM905
)


def test_the_modules_of_mlx_lm_that_we_do_not_lay_out_are_known() -> None:
    files = {path.stem for path in Path(mlx_lm.__file__).parent.glob("models/[!_]*.py")}
    assert files - HELPERS - MODULES.keys() - WRAPPERS.keys() == STILL_TO_DO


def test_model_types_lead_to_mlx_lms_modules() -> None:
    assert REMAPPING == MODEL_REMAPPING


def _argument_defaults(module: str) -> dict[str, Any]:
    """Defaults of the argument classes of an mlx-lm module."""
    source = importlib.import_module(f"mlx_lm.models.{module}")
    names = ("ModelArgs", "TextArgs", "TextConfig", "TextModelArgs")
    classes = [cls for name in names if (cls := getattr(source, name, None))]
    return {
        field.name: field.default
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


# Where mlx-lm has no default of its own: transformers' one, or what the file decides.
OWN_DEFAULTS = {
    ("afmoe", "global_attn_every_n_layers"),
    ("afmoe", "layer_types"),
    ("gemma2", "sliding_window"),
    ("gemma3_text", "tie_word_embeddings"),
    ("glm4_moe", "moe_layer_freq"),
    ("solar_open", "moe_layer_freq"),
    ("nemotron_h", "num_hidden_layers"),
    ("qwen3_next", "mlp_only_layers"),
    ("qwen3_next", "decoder_sparse_step"),
}


@pytest.mark.parametrize("module", MODULES)
def test_defaults_are_those_of_mlx_lms_argument_classes(module: str) -> None:
    theirs = _argument_defaults(module)
    ours = {k: v for k, v in MODULES[module][1].items() if (module, k) not in OWN_DEFAULTS}
    extra = {"attention_bias", "mlp_bias"} if module == "ministral3" else set()
    assert ours.keys() - extra <= theirs.keys()
    assert {k: v for k, v in ours.items() if k not in extra} == {
        k: theirs[k] for k in ours.keys() - extra
    }


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'orca_9'.*deepseek_v3.*llama.*qwen3_next"):
        architecture_from_config({"model_type": "orca_9"})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_missing_key_is_named(key: str) -> None:
    config = {k: v for k, v in TINY["qwen3"].items() if k != key}
    with pytest.raises(CheckpointError, match=key):
        architecture_from_config(config)


@pytest.mark.parametrize("value", ["many", -1, 10**12, 2.5, [4]])
def test_a_malformed_layer_count_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError):
        architecture_from_config({**TINY["qwen3"], "num_hidden_layers": value})


@pytest.mark.parametrize("value", ["wide", [64], {}])
def test_a_malformed_width_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError):
        architecture_from_config({**TINY["qwen3"], "hidden_size": value})


@pytest.mark.parametrize("value", [10**9, 10**30, "wide"])
def test_hostile_values_are_refused_or_laid_out_at_once(value: object) -> None:
    for config in TINY.values():
        text = config.get("text_config", config)
        for key in text.keys() - {"model_type"}:
            hostile = {**text, key: value, "model_type": config["model_type"]}
            with contextlib.suppress(UmaError):
                architecture_from_config(hostile)


def test_a_model_without_a_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model_type"):
        architecture_from_config({"hidden_size": 64})


def test_a_quantization_in_the_config_changes_nothing() -> None:
    quantized = {**TINY["llama"], "quantization": {"bits": 4, "group_size": 64}}
    assert architecture_from_config(quantized) == architecture_from_config(TINY["llama"])


def test_gemma_3_has_a_full_layer_after_five_sliding_ones() -> None:
    architecture = architecture_from_config(config_of("google__gemma-3-1b-it"))
    mixers = [layer.mixers[0] for layer in architecture.layers]
    windows = [mixer.sliding_window for mixer in mixers if isinstance(mixer, Attention)]
    assert windows == ([512] * 5 + [None]) * 4 + [512] * 2


def test_qwen3_30b_runs_8_of_128_experts() -> None:
    architecture = architecture_from_config(config_of("Qwen__Qwen3-30B-A3B"))
    feed_forward = {part for layer in architecture.layers for part in layer.feed_forward}
    assert feed_forward == {Experts(128, 8, 768)}


def test_nemotron_h_layers_hold_one_part_each() -> None:
    architecture = architecture_from_config(TINY["nemotron_h"])
    parts = [len(layer.mixers) + len(layer.feed_forward) for layer in architecture.layers]
    assert parts == [1, 1, 1, 1]
    assert isinstance(architecture.layers[0].mixers[0], Recurrent)
