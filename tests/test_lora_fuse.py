"""Fusing an adapter: what is left of it, what is written, and when it is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.lora import LoRALinear
from models import saved_model

from uma.checkpoint.adapter import WEIGHTS, adapter_header
from uma.cli import main
from uma.errors import CheckpointError, StorageError, UsageError
from uma.quantization import Quantization
from uma.runtime.load import add_adapter, load, open_model
from uma.runtime.lora import fuse
from uma.runtime.lora.adapter import Adapter, put_adapter, save_adapter
from uma.runtime.lora.fusion import AdapterLost, Fusion, fuse_adapter

ROWS = [[5, 9, 200, 31, 7], [300, 11, 12]]
FOUR = {"bits": 4, "group_size": 32, "mode": "affine"}


def adapter(base: Path, folder: Path, size: float = 0.05, **settings: Any) -> Path:
    """An adapter of random second factors times ``size``; other arrays are 1.3 times the base's."""
    asked = Adapter(**{"num_layers": 2, "rank": 4, "scale": 2.0} | settings)
    model, _ = open_model(base)
    mx.random.seed(1)
    trained = put_adapter(model, asked)
    changed = {
        name: mx.random.normal(value.shape) * size
        if name.endswith("lora_b")
        else value * (1 if name.endswith("lora_a") else 1.3)
        for name, value in trained.items()
    }
    save_adapter(folder, changed, asked.config())
    return folder


def tokens(folder: Path, adapter_path: Path | None = None) -> list[int]:
    """What plain mlx_lm generates."""
    model = mlx_lm.load(
        str(folder), adapter_path=None if adapter_path is None else str(adapter_path)
    )[0]
    model.eval()
    steps = generate_step(mx.array([5, 9, 200]), model, max_tokens=12)
    return [int(token) for token, _ in steps]


def fused(base: Path, adapter_path: Path, out: Path, **asked: Any) -> dict[str, Any]:
    return fuse_adapter(base, adapter_path, out, Fusion(**asked), ROWS, float32=True)


@pytest.mark.parametrize(
    ("kind", "method"),
    [("full", "lora"), ("full", "dora"), ("full", "full"), ("moe", "lora"), ("sliding", "lora")],
)
def test_a_fused_model_gives_the_tokens_of_model_and_adapter_in_mlx_lm(
    tmp_path: Path, kind: str, method: str
) -> None:
    base = saved_model(kind, tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter", method=method)
    found = fused(base, trained, tmp_path / "fused")
    assert found["kept_share"] == pytest.approx(1, abs=1e-3)
    assert found["error_share"] < 1e-3
    assert tokens(tmp_path / "fused") == tokens(base, trained)
    assert tokens(tmp_path / "fused") != tokens(base)


def test_uma_run_uses_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter", size=1.0)
    fused(base, trained, tmp_path / "fused")
    texts = []
    for model in (
        [str(base), "--adapter-path", str(trained)],
        [str(tmp_path / "fused")],
        [str(base)],
    ):
        capsys.readouterr()
        assert main(["run", *model, "--prompt", "Hi", "--max-tokens", "6", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]


def test_what_few_bits_would_swallow_is_refused_and_nothing_written(tmp_path: Path) -> None:
    """V3, F1: ``mlx_lm.fuse`` (0.32.2) writes a model that does what the base does."""
    base = saved_model("full", tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter", size=0.003)
    theirs = tmp_path / "theirs"
    command = [sys.executable, "-m", "mlx_lm", "fuse", "--model", str(base), "--save-path"]
    subprocess.run([*command, str(theirs), "--adapter-path", str(trained)], check=True)
    logits = [fuse.logits_of(load(f).model, ROWS) for f in (base, theirs)]
    adapted = fuse.logits_of(load(base, adapter_path=trained).model, ROWS)
    assert fuse.kept(logits[0], adapted, logits[1]).share < 0.5
    with pytest.raises(AdapterLost, match=r"(?s)--bits 8: keeps (9\d|10\d)%.*--dequantize") as no:
        fused(base, trained, tmp_path / "fused")
    assert "Nothing was written" in str(no.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "theirs"]


@pytest.mark.parametrize(
    ("asked", "quantized"),
    [
        ({"form": Quantization(8, 32)}, True),
        ({"form": "dense"}, True),
        ({"form": "dense", "dense": True}, False),
    ],
)
def test_the_fused_matrices_may_have_more_bits_than_the_others(
    tmp_path: Path, asked: dict[str, Any], quantized: bool
) -> None:
    base = saved_model("full", tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter", size=0.01)
    found = fused(base, trained, tmp_path / "fused", **asked)
    assert found["kept_share"] == pytest.approx(1, abs=0.05)
    model, _ = mlx_lm.load(str(tmp_path / "fused"))
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    last, first = model.layers[-1].self_attn.q_proj, model.layers[0].self_attn.q_proj
    bits = asked["form"].bits if asked["form"] != "dense" else None
    assert getattr(last, "bits", None) == bits
    assert getattr(first, "bits", None) == (4 if quantized else None)
    assert ("quantization" in config) is quantized
    assert tokens(tmp_path / "fused") == tokens(base, trained)


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_a_base_of_another_format_is_fused_and_loads_again(
    tmp_path: Path, mode: str, group_size: int, bits: int
) -> None:
    """F3: a dequantized fusion crashed, or its config still said that it is quantized."""
    quantization = {"bits": bits, "group_size": group_size, "mode": mode}
    base = saved_model("full", tmp_path / "base", quantization=quantization)
    trained = adapter(base, tmp_path / "adapter", size=0.3)
    for name, asked in (("some", {"form": "dense"}), ("all", {"form": "dense", "dense": True})):
        found = fused(base, trained, tmp_path / name, **asked)
        assert found["kept_share"] == pytest.approx(1, abs=0.01)
        assert found["error_share"] < 0.02
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert ("quantization" in config) is (name == "some")
        assert len(tokens(tmp_path / name)) == 12


def test_fusing_in_four_bits_loses_what_the_reference_says() -> None:
    """V3: 8, 2, 1.5 and 68 % of adapters of growing size, 97 % in 8 bits (``mlx_lm.fuse``)."""
    mx.random.seed(0)
    shares = []
    for bits, size in ((4, 0.1), (4, 0.3), (4, 1), (4, 10), (8, 1)):
        base = nn.QuantizedLinear.from_linear(nn.Linear(512, 512, bias=False), 64, bits)
        adapted = LoRALinear.from_base(base, r=8, scale=20.0)
        adapted.lora_b = mx.random.normal((8, 512)) * (1e-4 * size)
        x = mx.random.normal((64, 512))
        ours = fuse.fused(adapted, "stored")(x)
        shares.append(fuse.kept(base(x), adapted(x), ours).share)
    assert max(shares[:3]) < 0.2
    assert 0.5 < shares[3] < 0.9
    assert shares[4] > 0.9


def test_few_bits_asked_of_a_dense_base_are_refused_with_what_would_do(tmp_path: Path) -> None:
    base = saved_model("full", tmp_path / "base", dtype="float32")
    trained = adapter(base, tmp_path / "adapter", size=0.003)
    with pytest.raises(AdapterLost, match=r"--bits 8: keeps (9\d|10\d)%.*") as no:
        fused(base, trained, tmp_path / "fused", form=Quantization(2, 32))
    assert "--bits 16: keeps 100%" in str(no.value)


def test_sixteen_bits_swallow_small_changes_too(tmp_path: Path) -> None:
    """A change below half of a weight's last bit is lost: bfloat16 has 8 bits."""
    base = saved_model("full", tmp_path / "base", dtype="bfloat16")
    trained = adapter(base, tmp_path / "adapter", size=0.0002)
    with pytest.raises(AdapterLost, match=r"(?s)as stored, it keeps .*--adapter-path") as no:
        fused(base, trained, tmp_path / "fused")
    assert "--bits" not in str(no.value)


def test_adding_in_float32_keeps_more_than_mlx_lm_in_bfloat16() -> None:
    mx.random.seed(0)
    base = nn.Linear(256, 256, bias=False)
    base.set_dtype(mx.bfloat16)
    adapted = LoRALinear.from_base(base, r=8, scale=20.0)
    adapted.lora_b = mx.random.normal((8, 256)) * 1e-3
    exact = base.weight.astype(mx.float32) + (20 * adapted.lora_b.T) @ adapted.lora_a.T
    ours, theirs = (
        m.weight.astype(mx.float32) for m in (fuse.fused(adapted, "stored"), adapted.fuse())
    )
    assert fuse.fused(adapted, "stored").weight.dtype == mx.bfloat16
    assert mx.linalg.norm(ours - exact).item() < mx.linalg.norm(theirs - exact).item()
    assert adapted.linear is base
    assert base.weight.dtype == mx.bfloat16


def test_quantized_experts_are_fused_too(tmp_path: Path) -> None:
    base = saved_model("moe", tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter", size=0.3)
    found = fused(base, trained, tmp_path / "fused", form=Quantization(8, 32))
    assert found["kept_share"] == pytest.approx(1, abs=0.02)
    model = mlx_lm.load(str(tmp_path / "fused"))[0]
    assert model.layers[-1].mlp.switch_mlp.up_proj.bits == 8
    assert model.layers[0].mlp.switch_mlp.up_proj.bits == 4


def test_the_check_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    base = saved_model("moe", tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter")
    model, _ = open_model(base)
    add_adapter(model, trained)
    before = [name for name, _ in tree_flatten(model.parameters())]
    logits = fuse.logits_of(model, ROWS)
    with fuse.as_if_fused(model, model, "dense"):
        assert fuse.kept(logits * 0, logits, fuse.logits_of(model, ROWS)).error < 1e-3
    assert [name for name, _ in tree_flatten(model.parameters())] == before
    assert mx.array_equal(fuse.logits_of(model, ROWS), logits)


def test_an_existing_folder_is_never_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter")
    there = tmp_path / "fused"
    there.mkdir()
    command = ["lora", "fuse", str(base), "--adapter-path", str(trained), "-o", str(there)]
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err
    with pytest.raises(StorageError, match="exists by now"):
        fused(base, trained, there)
    assert list(there.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "fused"]


def test_a_disk_that_fills_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter")

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[write] No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(StorageError, match="No space left"):
        fused(base, trained, tmp_path / "fused")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_an_adapter_that_does_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter", size=0.0)
    command = ["lora", "fuse", str(base), "--adapter-path", str(trained), "-o"]
    assert main([*command, str(tmp_path / "fused")]) == 2
    assert "it is not trained" in capsys.readouterr().err


def test_a_fusion_that_is_not_finite_is_refused_even_by_force(tmp_path: Path) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter", size=1e36)
    with pytest.raises(UsageError, match="the adapter gives logits that are not finite"):
        fused(base, trained, tmp_path / "fused", force=True)
    assert not (tmp_path / "fused").exists()


def test_an_adapter_of_integers_is_refused(tmp_path: Path) -> None:
    base = saved_model("full", tmp_path / "base")
    trained = adapter(base, tmp_path / "adapter")
    weights = {n: w.astype(mx.int32) for n, w in mx.load(str(trained / WEIGHTS)).items()}
    mx.save_safetensors(str(trained / WEIGHTS), weights)
    with pytest.raises(CheckpointError, match="is I32, and an adapter has numbers with fractions"):
        adapter_header(trained)


def test_the_command_reports_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved_model("full", tmp_path / "base", quantization=FOUR)
    trained = adapter(base, tmp_path / "adapter")
    capsys.readouterr()
    command = ["lora", "fuse", str(base), "--adapter-path", str(trained), "--bits", "8"]
    assert main([*command, "-o", str(tmp_path / "fused"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept_share"] == pytest.approx(1, abs=0.02)
    assert found["form"] == "affine 8/64 + affine 4/32"
    assert main(["run", str(tmp_path / "fused"), "Hi", "--max-tokens", "3", "--json"]) == 0
