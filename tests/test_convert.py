"""``uma convert`` of Hugging Face folders: mlx-lm's numbers, in bounded memory, whole or not."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from fakehub import serving  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.utils import load_model, quantize_model  # noqa: E402
from models import CONFIGS, saved_model  # noqa: E402
from test_cli_run import document, environment, uma  # noqa: E402

from uma.checkpoint.safetensors import headers_of_folder  # noqa: E402
from uma.errors import StorageError  # noqa: E402
from uma.quantization import Quantization  # noqa: E402
from uma.runtime import convert as converting  # noqa: E402
from uma.runtime.convert import convert_folder  # noqa: E402
from uma.runtime.load import load, weights_bytes  # noqa: E402

FOUR_BITS = Quantization(4, 32)
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}


def convert(home: Path, *arguments: object, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "uma", "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(home, **more),
    )


def parameters(model: Any) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("kind", CONFIGS)
def test_mlx_lm_loads_from_the_folder_what_it_quantizes_itself(
    kind: str, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "SHARD_BYTES", shard_bytes)
    folder = saved_model(kind, tmp_path / "source")
    theirs, config = load_model(folder)
    theirs, _ = quantize_model(theirs, config, 32, 4)

    done = convert_folder(folder, tmp_path / "out", quantization=FOUR_BITS)

    ours, _ = load_model(tmp_path / "out")
    expected = parameters(theirs)
    assert parameters(ours).keys() == expected.keys()
    for name, value in parameters(ours).items():
        assert mx.array_equal(value, expected[name]).item(), name
    assert done["size_bytes"] == weights_bytes(theirs)
    assert done["form"] == load(tmp_path / "out").form
    files = {header.file for header in headers_of_folder(tmp_path / "out")}
    assert (len(files) > 1) == (shard_bytes < 1 << 30)


def test_the_result_is_never_in_memory_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_model("full", tmp_path / "source", dtype="bfloat16", **WIDE)
    shard, matrix = 500_000, 256 * 1024 * 2
    monkeypatch.setattr(converting, "SHARD_BYTES", shard)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    done = convert_folder(folder, tmp_path / "out", quantization=Quantization(8, 64))

    peak = mx.get_peak_memory() - before
    assert done["size_bytes"] > 6 * shard
    assert peak <= shard + 2 * matrix


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_model("full", tmp_path / "source")
    usage = converting.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(converting.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match="no room"):
        convert_folder(folder, tmp_path / "out", quantization=FOUR_BITS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_converted_folder_answers_and_is_not_converted_again(tmp_path: Path) -> None:
    folder = saved_model("full", tmp_path / "source")
    out = tmp_path / "out"
    done = document(convert(tmp_path, folder, "-o", out, "--quant", "8bit", "--json"))
    assert (done["schema_version"], done["form"]) == (1, "affine 8/64")
    assert document(uma(tmp_path, out, "Hi", "--max-tokens", 3, "--json"))["generation_tokens"] > 0

    for more in ((), ("--bits", 8)):
        again = convert(tmp_path, out, "-o", tmp_path / "again", *more)
        assert again.returncode == 2
        assert "is an MLX model of affine 8/64 already" in again.stderr
    wider = convert(tmp_path, out, "-o", tmp_path / "a", "--bits", 16)
    assert "more bits cannot be had" in wider.stderr
    fewer = convert(tmp_path, out, "-o", tmp_path / "four", "--bits", 4, "--json")
    assert document(fewer)["notes"] == ["requantized from affine 8/64"]


ON_A_SMALL_MACHINE = """
from dataclasses import replace
import uma.cli, uma.cli.session as session
from uma.machine import read_machine
session.live_machine = lambda: replace(read_machine(), limit_bytes=1 << 20)
uma.cli.main()
"""


def test_a_model_too_large_to_run_here_is_still_converted(tmp_path: Path) -> None:
    source = saved_model("full", tmp_path / "source")
    arguments = ["org/tiny", "-o", str(tmp_path / "out"), "--yes"]
    with serving(org__tiny=source) as hub:
        done = subprocess.run(
            [sys.executable, "-c", ON_A_SMALL_MACHINE, "convert", *arguments],
            capture_output=True,
            text=True,
            env=environment(tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0"),
        )
    assert done.returncode == 0, done.stderr
    assert "--force" not in done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4


def test_a_name_means_the_original_and_not_what_others_quantized(tmp_path: Path) -> None:
    there = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = convert(tmp_path, "llama-3-8b", "-o", tmp_path / "out", "--yes", **there)
    assert done.stderr.startswith("uma: meta-llama/Meta-Llama-3-8B-Instruct: ")


@pytest.mark.parametrize("name", ["x" * 300, "file/x"])
def test_a_folder_that_cannot_be_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = convert(tmp_path, "org/none", "-o", tmp_path / name)
    assert done.returncode == 2
    assert "cannot be a folder" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
