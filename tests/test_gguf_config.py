"""Architectures from GGUF, against mlx-lm's own modules and logits of llama.cpp itself."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from gguf_models import (  # noqa: E402
    LLAMA3,
    MODELS,
    PROMPT,
    gguf_tensor,
    llama3_factors,
    original,
    write_gguf,
)

from uma.checkpoint.gguf import read_header  # noqa: E402
from uma.errors import CheckpointError, UnsupportedModel  # noqa: E402
from uma.runtime.gguf.config import ARCHITECTURES, llama3_scaling, model_config  # noqa: E402
from uma.runtime.gguf.convert import convert  # noqa: E402
from uma.runtime.gguf.metadata import Metadata  # noqa: E402
from uma.runtime.gguf.names import target  # noqa: E402
from uma.runtime.gguf.weights import rotary_tables  # noqa: E402

GOLDEN = json.loads((Path(__file__).parent / "data/gguf_logits.json").read_text())["logits"]


def logits(model) -> np.ndarray:
    return np.array(model(mx.array([PROMPT]))[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_has_the_logits_of_the_original_and_of_llama_cpp(
    name: str, tmp_path: Path
) -> None:
    from mlx_lm.utils import load_model

    expected = original(name)
    write_gguf(tmp_path / "m.gguf", name, expected)
    report = convert(tmp_path / "m.gguf", tmp_path / "folder")
    model, config = load_model(tmp_path / "folder")
    assert report.model_type == config["model_type"] == MODELS[name][1]
    found = logits(model)
    np.testing.assert_array_equal(found, logits(expected))
    # ggml looks GELU up in a table of float16 (ggml-cpu/vec.h, GGML_GELU_FP16)
    tolerance = 5e-3 if "gemma" in name else 1e-4
    np.testing.assert_allclose(found[[0, 13, 39]], GOLDEN[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3moe", "gemma2"])
def test_quantized_layers_keep_their_values_and_their_places(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The same model from the dequantized weights has the same logits."""
    from mlx_lm.utils import load_model

    other = {"token_embd.weight": "Q8_0", "ffn_gate_inp.weight": "F32"}
    quantize = other | {"weight": kind}
    write_gguf(tmp_path / "m.gguf", name, quantize=quantize)
    report = convert(tmp_path / "m.gguf", tmp_path / "folder")
    assert report.dtype == ("float32" if name == "gemma2" else "float16")
    model, config = load_model(tmp_path / "folder")
    width = {"Q8_0": 8}.get(kind, 4)
    assert config["quantization"]["bits"] == width
    if width == 4:
        assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    model.set_dtype(mx.float32)
    expected = original(name)
    _round_weights(expected, tmp_path / "m.gguf", report.dtype)
    np.testing.assert_allclose(logits(model), logits(expected), rtol=0, atol=2e-4)


def _round_weights(model, path: Path, dtype: str) -> None:
    """Give ``model`` the values of the file's blocks, the rest rounded to ``dtype``."""
    from mlx.utils import tree_flatten

    reader = gguf.GGUFReader(path)
    kinds = {t.name: t.tensor_type for t in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    weights = []
    for name, array in tree_flatten(model.parameters()):
        tensor, _ = gguf_tensor(architecture, "", name, np.array(array))
        kind = kinds[tensor]
        values = np.array(array)
        if kind == gguf.GGMLQuantizationType.F32:
            values = values.astype(dtype).astype(np.float32)
        else:
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
        weights.append((name, mx.array(values)))
    model.load_weights(weights)


def test_every_architecture_of_the_table_is_among_the_tested() -> None:
    assert {architecture for architecture, _, _ in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama_3_scaling_is_found_from_its_factors(factor: float, head_dim: int) -> None:
    scaling = LLAMA3 | {"factor": factor}
    factors = llama3_factors(scaling, 500000.0, head_dim)
    found = llama3_scaling([float(f) for f in factors], 500000.0, head_dim)
    assert found == scaling
    from mlx_lm.models.rope_utils import initialize_rope

    rope = initialize_rope(head_dim, 500000.0, False, found)
    plain = 500000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(np.array(rope._freqs) / plain, factors, rtol=2e-5)


def test_gemma_2_whose_context_exceeds_its_window_comes_with_a_note(tmp_path: Path) -> None:
    assert changed(tmp_path, "gemma2").notes == ()
    assert "4096 tokens" in changed(tmp_path, "gemma2", gemma2__context_length=8192).notes[0]


def test_other_frequency_factors_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Llama 3's rule"):
        llama3_scaling([1.0, 2.0, 3.0, 8.0], 500000.0, 8)


def changed(tmp_path: Path, name: str, **changes: object):
    """The config of the tiny model with some keys of its metadata changed, removed by ``None``."""
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, name)
    header = read_header(path)
    values = dict(header.metadata)
    for key, value in changes.items():
        key = key.replace("__", ".")
        values[key] = value
        if value is None:
            del values[key]
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    return model_config(Metadata(values), shapes, rotary_tables(header))


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3, qwen3moe, gemma2"):
        changed(tmp_path, "llama", general__architecture="mamba")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama__block_count", None),
        ("llama__block_count", 0),
        ("llama__block_count", 10**6),
        ("llama__block_count", -1),
        ("llama__block_count", True),
        ("llama__block_count", "2"),
        ("llama__attention__head_count", 0),
        ("llama__embedding_length", 65),
        ("llama__rope__freq_base", float("nan")),
        ("llama__rope__freq_base", "1e6"),
        ("llama__attention__layer_norm_rms_epsilon", None),
        ("llama__rope__freq_base", 0.0),
        ("llama__rope__freq_base", -1e4),
        ("llama__attention__head_count_kv", 0),
        ("llama__expert_count", -8),
        ("general__architecture", 7),
    ],
)
def test_a_key_that_is_missing_or_absurd_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CheckpointError):
        changed(tmp_path, "llama", **{key: value})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"llama__rope__scaling__type": "ntk", "llama__rope__scaling__factor": 2.0}),
        ("llama", {"llama__attention__value_length": 8}),
        ("llama", {"llama__rope__dimension_count": 8}),
        ("gemma3", {"gemma3__final_logit_softcapping": 30.0}),
        ("qwen2", {"qwen2__attention__key_length": 32, "qwen2__attention__value_length": 32}),
        ("phi3-longrope", {"phi3__rope__scaling__attn_factor": 2.0}),
        ("gemma2", {"gemma2__rope__scaling__factor": 2.0}),
        ("qwen2-yarn", {"qwen2__rope__scaling__yarn_attn_factor": 0.5}),
    ],
)
def test_what_mlx_lm_cannot_run_is_refused(tmp_path: Path, name: str, changes: dict) -> None:
    with pytest.raises(UnsupportedModel):
        changed(tmp_path, name, **changes)


def test_yarn_that_mlx_lm_ignores_limits_the_context(tmp_path: Path) -> None:
    config = changed(
        tmp_path,
        "qwen3moe",
        qwen3moe__rope__scaling__type="yarn",
        qwen3moe__rope__scaling__factor=4.0,
        qwen3moe__rope__scaling__original_context_length=32,
    )
    assert config.fields["max_position_embeddings"] == 32
    assert "rope_scaling" not in config.fields
    assert "no YaRN" in config.notes[0]


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_gemmas_scale_queries_by_width_over_heads(
    tmp_path: Path, name: str, layers: int
) -> None:
    """llama.cpp b11434, src/models/gemma2.cpp and gemma3.cpp, ``f_attention_scale``."""
    assert changed(tmp_path, name).fields["query_pre_attn_scalar"] == 32.0
    config = changed(tmp_path, name, **{f"{name}__block_count": layers})
    assert config.fields["query_pre_attn_scalar"] == 16.0


@pytest.mark.parametrize(
    "tensor",
    [
        "blk.2.attn_q.weight",
        "blk.00.attn_q.weight",
        "blk.0.attn_q.weight/../../evil",
        "blk.0.ssm_a.weight",
        "__metadata__",
        "output.bias",
        "",
        "a" * 300,
    ],
)
def test_a_tensor_that_the_architecture_lacks_is_refused(tensor: str) -> None:
    with pytest.raises(UnsupportedModel, match="not part of llama") as error:
        target("llama", tensor, 2)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rotary_table_of_absurd_values_is_refused(tmp_path: Path, value: float) -> None:
    table = np.full(8, value, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="not above 0"):
        rotary_tables(read_header(tmp_path / "m.gguf"))
