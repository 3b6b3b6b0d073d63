"""Layers and parameters of every supported model, against mlx-lm's own classes."""

import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx_lm
import transformers
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING
from oracle.build import build, our_shapes, shapes
from oracle.catalog import MODELS, config_of, supported
from oracle.tiny import TINY
from oracle.tiny_more import MORE

from uma.architecture import (
    ARCHITECTURE_REMAPPING,
    NOT_UNDERSTOOD,
    REMAPPING,
    WRAPPERS,
    architecture_from_config,
    module_of,
)
from uma.architecture.defaults import FILE, class_defaults
from uma.architecture.families import ELSEWHERE, FAMILIES, MODULES, module_named, modules_of
from uma.architecture.layers import Architecture, Attention, Experts, LatentAttention, Recurrent
from uma.catalog import models
from uma.errors import CheckpointError, UmaError, UnsupportedModel
from uma.runtime.trace_model import completed

LLAMA_70B = "meta-llama__Meta-Llama-3.1-70B"


SMALL = TINY | MORE


@pytest.mark.parametrize("module", SMALL)
def test_a_small_model_of_every_module_has_the_parameters_that_mlx_lm_builds(module: str) -> None:
    config = SMALL[module]
    assert our_shapes(architecture_from_config(config)) == shapes(build(config))


@pytest.mark.parametrize("name", supported())
def test_a_real_model_has_the_parameters_that_mlx_lm_builds(name: str) -> None:
    config = config_of(name)
    if name == "CohereLabs__c4ai-command-a-03-2025":
        pytest.skip("mlx-lm's cohere2 refuses heads narrower than hidden_size / num_heads")
    assert our_shapes(architecture_from_config(config)) == shapes(build(completed(config)))


def test_every_shipped_model_is_laid_out() -> None:
    for path in sorted(MODELS.glob("*.json")):
        assert architecture_from_config(config_of(path.stem)).layers, path.stem


def test_llama_3_70b_has_70_553_706_496_parameters() -> None:
    assert architecture_from_config(config_of(LLAMA_70B)).num_parameters == 70_553_706_496


def test_every_module_has_a_small_configuration() -> None:
    tested = {module_of(config) for config in SMALL.values()}
    assert not (MODULES - {"qwen3_5"}) - tested


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


def test_every_module_of_mlx_lm_is_laid_out_or_named_as_not() -> None:
    files = {path.stem for path in Path(mlx_lm.__file__).parent.glob("models/[!_]*.py")}
    assert files - HELPERS == MODULES | WRAPPERS.keys() | NOT_UNDERSTOOD.keys()


def test_a_module_that_is_not_laid_out_says_why() -> None:
    with pytest.raises(UnsupportedModel, match="packed in 2 bits one by one"):
        architecture_from_config({**TINY["qwen3"], "model_type": "prism_hadamard_qwen35"})


def test_model_types_lead_to_mlx_lms_modules() -> None:
    assert REMAPPING == MODEL_REMAPPING
    assert ARCHITECTURE_REMAPPING == MODEL_ARCHITECTURE_REMAPPING


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
    ("apertus", "mlp_bias"),
    ("gemma2", "sliding_window"),
    ("gemma3_text", "tie_word_embeddings"),
    ("glm4_moe", "moe_layer_freq"),
    ("solar_open", "first_k_dense_replace"),
    ("solar_open", "moe_layer_freq"),
    ("nemotron_h", "num_hidden_layers"),
    ("qwen3_next", "mlp_only_layers"),
    ("qwen3_next", "decoder_sparse_step"),
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_defaults_are_those_of_mlx_lms_argument_classes(module: str) -> None:
    theirs = _argument_defaults(module)
    ours = {k: v for k, v in module_named(module)[1].items() if (module, k) not in OWN_DEFAULTS}
    extra = {"attention_bias", "mlp_bias"} if module == "ministral3" else set()
    assert ours.keys() - extra <= theirs.keys()
    assert {k: v for k, v in ours.items() if k not in extra} == {
        k: theirs[k] for k in ours.keys() - extra
    }


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'orca_9'.*deepseek_v3.*llama.*qwen3_next"):
        architecture_from_config({"model_type": "orca_9"})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
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


def _published(name: str) -> int:
    """Parameters that Hugging Face states for a repository (``models.csv``)."""
    found = next(row for row in models() if row.config == name and row.parameters_hf)
    return int(found.parameters_hf or 0)


# Text decoders whose every parameter is in the count that Hugging Face states.
@pytest.mark.parametrize(
    "name",
    [
        "LiquidAI__LFM2-24B-A2B",
        "LiquidAI__LFM2-2.6B",
        "ai21labs__AI21-Jamba2-3B",
        "arcee-ai__AFM-4.5B",
        "ibm-granite__granite-3.3-8b-instruct",
        "ibm-granite__granite-4.0-h-micro",
        "ibm-granite__granite-4.0-h-small",
        "ibm-granite__granite-4.0-h-tiny",
        "ibm-granite__granite-4.1-30b",
        "inclusionAI__Ling-1T",
        "nvidia__NVIDIA-Nemotron-Nano-9B-v2",
        "rednote-hilab__dots.llm1.inst",
        "tiiuae__falcon-mamba-7b-instruct",
    ],
)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    parameters = architecture_from_config(config_of(name)).num_parameters
    assert parameters == pytest.approx(_published(name), rel=2e-6)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen__Qwen3-VL-235B-A22B-Instruct",
        "Qwen__Qwen3-VL-30B-A3B-Instruct",
        "Qwen__Qwen3-VL-8B-Instruct",
        "XiaomiMiMo__MiMo-7B-Base",
        "zai-org__GLM-5",
        "zai-org__GLM-5.1",
    ],
)
def test_decoder_vision_tower_and_prediction_layers_make_the_published_count(name: str) -> None:
    architecture = architecture_from_config(config_of(name))
    left_out = (architecture.vision_parameters or 0) + (architecture.mtp_parameters or 0)
    assert left_out > 0
    assert architecture.num_parameters + left_out == _published(name)


def test_qwen_3_5_has_a_vision_tower_and_prediction_layers_that_mlx_lm_drops() -> None:
    architecture = architecture_from_config(config_of("Qwen__Qwen3.5-27B"))
    left_out = (architecture.vision_parameters or 0) + (architecture.mtp_parameters or 0)
    assert architecture.num_parameters + left_out == _published("Qwen__Qwen3.5-27B")
    assert [note.split(" of ")[0] for note in architecture.notes[:2]] == [
        "vision tower",
        "1 layer for multi-token prediction",
    ]


def test_keys_that_a_file_lacks_are_transformers_defaults_and_are_named() -> None:
    config = {k: v for k, v in TINY["minimax"].items() if k != "num_local_experts"}
    architecture = architecture_from_config({**config, "model_type": "minimax_m2"})
    assert architecture.layers[0].feed_forward == (Experts(256, 2, 192),)
    (note,) = architecture.notes
    assert note.startswith("not in config.json, from transformers 5.24.0 MiniMaxM2Config: ")
    assert "num_local_experts 256" in note


def test_the_table_of_defaults_is_what_transformers_classes_declare(tmp_path: Path) -> None:
    table = FILE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in table:
        pytest.skip("the table is of another version of transformers")
    script = Path(__file__).parents[1] / "scripts" / "config_defaults.py"
    made = tmp_path / "config_defaults.csv"
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    subprocess.run(
        [sys.executable, script, made], check=True, env=environment, stderr=subprocess.DEVNULL
    )
    assert made.read_text(encoding="utf-8") == table


@pytest.mark.parametrize("model_type", ELSEWHERE - {"olmo_hf", "grok-1", "deepseek_ref"})
def test_models_that_mlx_lm_lacks_have_no_module(model_type: str) -> None:
    files = {path.stem for path in Path(mlx_lm.__file__).parent.glob("models/*.py")}
    assert model_type not in files
    assert REMAPPING.get(model_type) is None


def _elsewhere(name: str) -> Architecture:
    architecture = architecture_from_config(config_of(name))
    assert architecture.module is None
    assert "mlx-lm 0.32.2 has no module for" in architecture.notes[0]
    return architecture


def test_deepseek_v4_keeps_a_window_and_compressed_keys() -> None:
    mixers = [part.mixers[0] for part in _elsewhere("deepseek-ai__DeepSeek-V4-Flash").layers]
    kept = [(m.compress_ratio, m.index_topk) for m in mixers if isinstance(m, LatentAttention)]
    assert kept == [(None, None)] * 2 + [(4, 512), (128, None)] * 20 + [(4, 512)]
    assert {m.sliding_window for m in mixers if isinstance(m, LatentAttention)} == {128}


def test_minimax_m1_without_a_model_type_has_softmax_in_every_eighth_layer() -> None:
    config = config_of("MiniMaxAI__MiniMax-M1-40k")
    del config["model_type"]
    architecture = architecture_from_config(config)
    softmax = [i for i, part in enumerate(architecture.layers) if type(part.mixers[0]) is Attention]
    assert softmax == list(range(7, 80, 8))
    assert architecture.num_parameters == pytest.approx(456_089_655_296, rel=1e-4)


def test_the_text_model_of_an_unknown_multimodal_one_is_laid_out() -> None:
    config = {"model_type": "new_vl", "text_config": TINY["qwen3"], "vision_config": {"depth": 2}}
    architecture = architecture_from_config(config)
    assert (architecture.model_type, architecture.module) == ("new_vl", None)
    assert architecture.layers == architecture_from_config(TINY["qwen3"]).layers
    assert architecture.vision_parameters is None


def test_gemma_4_e4b_is_not_twice_as_wide_in_its_last_layers() -> None:
    feed_forward = architecture_from_config(config_of("google__gemma-4-E4B-it")).layers[-1]
    assert [part.intermediate_size for part in feed_forward.feed_forward] == [10_240]


def test_classes_that_transformers_lacks_have_no_defaults() -> None:
    assert class_defaults("orca_9") == ({}, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_file_lays_out_what_is_said_of_it(family: str) -> None:
    assert tuple(sorted(modules_of(family))) == FAMILIES[family]
