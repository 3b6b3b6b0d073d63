"""Loading: the same numbers as mlx-lm's own path, within one layer's memory, and clear refusals."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.nn as nn  # noqa: E402
import mlx_lm  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402
from mlx_lm.utils import load_model, quantize_model  # noqa: E402
from models import CONFIGS, build_model, saved_model  # noqa: E402

from uma.architecture import architecture_from_config  # noqa: E402
from uma.checkpoint.source import locate  # noqa: E402
from uma.errors import CheckpointError, UmaError, UnsupportedModel  # noqa: E402
from uma.plan.forms import forms_of  # noqa: E402
from uma.quantization import Quantization  # noqa: E402
from uma.runtime.forms import to_float32  # noqa: E402
from uma.runtime.load import load  # noqa: E402

FORMATS = [
    *(Quantization(bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
    Quantization(4, 32, "mxfp4"),
    Quantization(8, 32, "mxfp8"),
    Quantization(4, 16, "nvfp4"),
]
PROMPT = [5 + i % 300 for i in range(40)]


def parameters(model: Any) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


def assert_equal_parameters(ours: Any, theirs: Any) -> None:
    ours, theirs = parameters(ours), parameters(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert mx.array_equal(ours[name], value).item(), name


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_quantizing_on_load_gives_the_arrays_of_mlx_lm_convert(
    quantization: Quantization, tmp_path: Path
) -> None:
    folder = saved_model("full", tmp_path)
    theirs, config = load_model(folder)
    q = quantization
    theirs, _ = quantize_model(theirs, config, q.group_size, q.bits, mode=q.mode)

    loaded = load(folder, quantization=q)

    assert_equal_parameters(loaded.model, theirs)
    assert loaded.form == f"{q.mode} {q.bits}/{q.group_size}"
    assert loaded.weights_bytes == sum(p.nbytes for p in parameters(theirs).values())


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_predicate_of_each_model_decides_what_is_quantized(kind: str, tmp_path: Path) -> None:
    folder = saved_model(kind, tmp_path)
    theirs, config = load_model(folder)
    theirs, _ = quantize_model(theirs, config, 32, 4)

    assert_equal_parameters(load(folder, quantization=Quantization(4, 32)).model, theirs)


def test_rows_of_a_matrix_are_quantized_alike_whether_in_slices_or_whole(tmp_path: Path) -> None:
    folder = saved_model("moe", tmp_path, moe_intermediate_size=512)  # 4 experts of 512x64
    theirs, config = load_model(folder)
    theirs, _ = quantize_model(theirs, config, 32, 4, mode="mxfp4")

    assert_equal_parameters(load(folder, quantization=Quantization(4, 32, "mxfp4")).model, theirs)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of 2 MB in bfloat16: large beside what evaluation itself takes."""
    folder = tmp_path_factory.mktemp("wide")
    return saved_model(
        "full",
        folder,
        dtype="bfloat16",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        head_dim=64,
    )


def layer_bytes(folder: Path) -> int:
    model, _ = load_model(folder, lazy=True)
    return sum(p.nbytes for p in parameters(model.layers[0]).values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": Quantization(4, 64)},
        {"quantization": Quantization(2, 32)},
        {"quantization": Quantization(4, 32, "mxfp4")},
        {"quantization": Quantization(8, 32, "mxfp8")},
        {"quantization": Quantization(4, 64), "dequantize_to": "float32"},
        {"dequantize_to": "float32"},
    ],
    ids=str,
)
def test_loading_peaks_within_one_and_a_half_layers_above_the_result(
    options: dict[str, Any], wide: Path
) -> None:
    gc.collect()  # models of other tests
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    loaded = load(wide, **options)

    source = layer_bytes(wide)
    assert mx.get_active_memory() - before == pytest.approx(loaded.weights_bytes, abs=64)
    assert mx.get_peak_memory() - before <= loaded.weights_bytes + 1.5 * source


def test_embedding_and_head_are_converted_before_the_layers_are_held(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path, vocab_size=65536, intermediate_size=8192)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(folder, quantization=Quantization(8, 32))
    peak = mx.get_peak_memory() - before
    source = 65536 * 64 * 4
    matrix = source * (8 + 2) // 32  # 8 bits, and a scale and a bias in float32 for 32 weights
    assert peak == pytest.approx(2 * matrix + source, rel=0.02)
    assert peak < loaded.weights_bytes + source


def store_experts_one_by_one(folder: Path) -> None:
    """Rewrite the weights as Hugging Face's Qwen 3 has them: a matrix for each expert."""
    path = folder / "model.safetensors"
    weights = {}
    for name, value in mx.load(str(path)).items():
        before, stacked, after = name.partition("switch_mlp.")
        for i, expert in enumerate(value if stacked else ()):
            weights[f"{before}experts.{i}.{after}"] = expert
        if not stacked:
            weights[name] = value
    mx.eval(weights)
    mx.save_safetensors(str(path), weights)
    (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("kind", ["moe", "full"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_plan_knows_what_quantizing_takes_above_the_result(
    kind: str, bits: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    folder = saved_model(
        kind, tmp_path, dtype="bfloat16", moe_intermediate_size=512, num_experts=8, **sizes
    )
    if kind == "moe":
        store_experts_one_by_one(folder)
    source = locate(str(folder))
    (form,) = forms_of(source, architecture_from_config(source.config), bits=bits)
    gc.collect()
    mx.reset_peak_memory()

    loaded = load(folder, quantization=form.quantization)

    # The peak is at the last matrix; what other tests left may be freed before.
    above = mx.get_peak_memory() - mx.get_active_memory()
    assert loaded.weights_bytes == form.weights.size_bytes
    assert sum(term.size_bytes for term in form.load_terms) == pytest.approx(above, rel=0.01)


def test_full_precision_is_what_mlx_lm_loads(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path, dtype="bfloat16")
    theirs, _ = load_model(folder)
    loaded = load(folder)
    assert_equal_parameters(loaded.model, theirs)
    assert loaded.form == "bfloat16"


def test_a_quantized_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    stored = {"bits": 4, "group_size": 32}
    folder = saved_model("full", tmp_path, quantization=stored)
    theirs, _ = load_model(folder)
    loaded = load(folder, quantization=Quantization(4, 32))
    assert_equal_parameters(loaded.model, theirs)
    assert loaded.notes == ()


def test_requantizing_is_said(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path, quantization={"bits": 8, "group_size": 32})
    loaded = load(folder, quantization=Quantization(4, 32))
    assert loaded.form == "affine 4/32"
    assert loaded.notes == ("requantized from affine 8/32",)


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("kind", ["full", "moe", "latent"])
def test_float32_holds_the_values_that_the_quantized_matrices_stand_for(
    kind: str, mode: str, tmp_path: Path
) -> None:
    folder = saved_model(kind, tmp_path, quantization={"bits": 4, "group_size": 32, "mode": mode})
    theirs, _ = load_model(folder)

    loaded = load(folder, dequantize_to="float32")

    ours = parameters(loaded.model)
    assert {p.dtype for p in ours.values()} == {mx.float32}
    assert loaded.form == "float32"
    modules = dict(theirs.named_modules())
    for name, value in ours.items():
        module = modules[name.rpartition(".")[0]]
        expected = module[name.rpartition(".")[2]]
        if name.endswith(".weight") and "scales" in module:
            expected = mx.dequantize(
                expected,
                module.scales,
                module.get("biases"),
                module.group_size,
                module.bits,
                module.mode,
            )
        assert mx.array_equal(value, expected).item(), name


@pytest.mark.parametrize("bias", [False, True])
def test_one_token_as_a_column_gives_what_it_gives_as_a_row(bias: bool) -> None:
    linear, embedding = nn.Linear(96, 160, bias=bias), nn.Embedding(50, 96)
    one, many = mx.random.normal((1, 1, 96)), mx.random.normal((1, 3, 96))
    rows = [linear(one), linear(many), embedding.as_linear(one), embedding.as_linear(many)]
    mx.eval(rows)
    linear, embedding = to_float32("", linear), to_float32("", embedding)
    assert type(linear) is not nn.Linear
    columns = [linear(one), linear(many), embedding.as_linear(one), embedding.as_linear(many)]
    for row, column in zip(rows, columns, strict=True):
        assert row.shape == column.shape
        assert mx.allclose(row, column, atol=1e-5)


def test_dtype_casts_scales_and_leaves_packed_numbers(tmp_path: Path) -> None:
    stored = {"bits": 4, "group_size": 32}
    folder = saved_model("full", tmp_path, dtype="float16", quantization=stored)
    loaded = load(folder, dtype="float32")
    dtypes = {str(p.dtype) for p in parameters(loaded.model).values()}
    assert dtypes == {"mlx.core.uint32", "mlx.core.float32"}
    assert loaded.form == "affine 4/32"


def save_adapter(folder: Path, config: dict[str, Any]) -> Path:
    """A LoRA adapter with random weights, in the two files that mlx_lm.lora writes."""
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    model = build_model(config)
    model.freeze()
    linear_to_lora_layers(model, 2, lora)
    weights = {
        name: mx.random.normal(value.shape) * 0.1
        for name, value in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora})
    )
    return folder


@pytest.mark.parametrize("dequantize_to", [None, "float32"])
def test_an_adapter_stays_on_in_every_form(dequantize_to: str | None, tmp_path: Path) -> None:
    stored = {"bits": 4, "group_size": 32}
    folder = saved_model("full", tmp_path / "model", quantization=stored)
    adapter = save_adapter(tmp_path / "adapter", CONFIGS["full"])
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(adapter))
    expected = theirs(mx.array([PROMPT]))

    loaded = load(folder, dequantize_to=dequantize_to, adapter_path=adapter)

    found = loaded.model(mx.array([PROMPT]))
    without = load(folder).model(mx.array([PROMPT]))
    assert mx.allclose(found, expected, atol=1e-3).item()
    assert not mx.allclose(without, expected, atol=1e-1).item()
    sizes = {n: p.nbytes for n, p in parameters(loaded.model).items() if "lora" in n}
    assert loaded.adapter_bytes == sum(sizes.values()) > 0


def test_progress_counts_layers_to_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(saved_model("full", tmp_path), progress=lambda done, total: calls.append((done, total)))
    # Embedding, final norm, head, four layers.
    assert calls == [(i, 7) for i in range(1, 8)]


def test_sharded_weights_are_found(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path)
    whole = load(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    mx.eval(weights)
    for i, part in enumerate((names[::2], names[1::2])):
        shard = folder / f"model-0000{i + 1}-of-00002.safetensors"
        mx.save_safetensors(str(shard), {name: weights[name] for name in part})
    (folder / "model.safetensors").unlink()
    assert_equal_parameters(load(folder).model, whole.model)


def break_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


DAMAGE: dict[str, tuple[Any, type[UmaError], str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        CheckpointError,
        "has no config.json",
    ),
    "config is not JSON": (
        lambda f: (f / "config.json").write_text("{"),
        CheckpointError,
        "is not JSON",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        CheckpointError,
        r"no model\*\.safetensors",
    ),
    "unknown model type": (
        lambda f: break_config(f, model_type="no_such_model"),
        UnsupportedModel,
        "no_such_model",
    ),
    "a key is missing": (
        lambda f: break_config(f, hidden_size=None),
        CheckpointError,
        "does not describe",
    ),
    "another shape": (
        lambda f: break_config(f, hidden_size=128),
        CheckpointError,
        "not those of its config",
    ),
    "more layers than weights": (
        lambda f: break_config(f, num_hidden_layers=5),
        CheckpointError,
        "Missing 9 parameters",
    ),
    "own Python code": (
        lambda f: break_config(f, model_file="evil.py"),
        UnsupportedModel,
        "is not run",
    ),
    "weights cut in the header": (
        lambda f: cut(f / "model.safetensors", 100),
        CheckpointError,
        "cannot be read",
    ),
    "weights cut in the data": (
        lambda f: cut(f / "model.safetensors", 500_000),
        CheckpointError,
        "cannot be read",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        CheckpointError,
        "has no tokenizer.json",
    ),
    "tokenizer is not JSON": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        CheckpointError,
        "the tokenizer",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_gives_one_clear_error(name: str, tmp_path: Path) -> None:
    damage, error, text = DAMAGE[name]
    folder = saved_model("full", tmp_path)
    damage(folder)
    with pytest.raises(error, match=text) as raised:
        load(folder)
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)


def test_a_missing_adapter_is_named(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path / "model")
    with pytest.raises(CheckpointError, match="nowhere"):
        load(folder, adapter_path=tmp_path / "nowhere")
