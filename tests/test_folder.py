"""The MODEL argument on this disk: folders, files, paths that are not there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_gguf_header import written

from uma.checkpoint import default_model
from uma.checkpoint.source import fetch, locate, probe
from uma.errors import CheckpointError, UnknownName


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No cache of this machine, and a folder of its own to stand in."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("UMA_CACHE_DIR", str(tmp_path / "uma"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def model_folder(path: Path, metadata=None, **config) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file({"w": np.zeros((4, 8), np.float32)}, path / "model.safetensors", metadata=metadata)
    return path


def test_a_folder_gives_its_config_and_exact_bytes(tmp_path):
    folder = model_folder(tmp_path / "m", hidden_size=8)
    source = locate(str(folder))
    assert source.kind == "huggingface"
    assert source.config == {"model_type": "llama", "hidden_size": 8}
    assert source.weight_bytes == 4 * 8 * 4
    assert source.weight_files == (folder / "model.safetensors",)
    assert source.origin == "safetensors headers"
    assert probe(source) is source


def test_an_mlx_folder_is_told_by_its_quantization_or_its_format(tmp_path):
    quantized = model_folder(tmp_path / "q", quantization={"bits": 4, "group_size": 64})
    assert locate(str(quantized)).kind == "mlx"
    assert locate(str(model_folder(tmp_path / "f", metadata={"format": "mlx"}))).kind == "mlx"


def test_a_relative_folder_comes_before_a_name(tmp_path):
    model_folder(Path("org/tiny"))
    assert locate("org/tiny").path == Path("org/tiny")
    model_folder(Path("llama-3-8b"))
    assert locate("llama-3-8b").path == Path("llama-3-8b")


def test_a_folder_that_holds_no_model_does_not_hide_a_name():
    Path("llama-3-8b").mkdir()
    assert locate("llama-3-8b").kind == "catalog"


def test_a_gguf_file_gives_its_header(tmp_path):
    path = written(tmp_path / "tiny.gguf")
    source = locate(str(path))
    assert (source.kind, source.origin) == ("gguf", "gguf header")
    assert source.gguf_headers[0].metadata["general.architecture"] == "llama"
    assert source.weight_bytes == sum(t.size_bytes for t in source.gguf_headers[0].tensors)


def test_a_gguf_is_known_by_its_first_bytes_too(tmp_path):
    assert locate(str(written(tmp_path / "sha256-abc"))).kind == "gguf"


def test_a_part_of_a_split_gguf_asks_for_the_others(tmp_path):
    first = written(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"1 of its 2 files .* m-00002-of-00002\.gguf"):
        locate(str(first))


@pytest.mark.parametrize(
    "path", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "nope.gguf", "nope/", "a\\b", "C:\\m"]
)
def test_a_path_that_is_not_there_is_said_to_be_missing(path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        locate(path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb", "~nobody-of-that-name", "%s", "\udcff"])
def test_a_name_that_no_path_can_have_is_an_error_like_any(name):
    with pytest.raises((CheckpointError, UnknownName)) as error:
        locate(name)
    assert len(str(error.value)) < 500


def test_a_name_that_is_unknown_is_not_called_a_missing_path():
    with pytest.raises(UnknownName, match="nearest"):
        locate("lama-3-8b")


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as error:
        locate(str(path))
    assert "\n" not in str(error.value)


def test_a_folder_without_config_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    refused(tmp_path / "m", "has no config.json")


def test_a_folder_of_gguf_files_names_one_to_give(tmp_path):
    (tmp_path / "m").mkdir()
    written(tmp_path / "m" / "x.gguf")
    refused(tmp_path / "m", r"give one of them: .*x\.gguf")


def test_an_adapter_is_told_from_a_model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "m", "--adapter-path")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_and_never_opened(tmp_path, name):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")
    refused(folder, rf"only {name}, a format that can run code")


def test_weights_of_another_layout_are_named(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    refused(folder, "consolidated.safetensors; use the Hugging Face or MLX layout")


def test_a_config_alone_is_told_to_lack_weights(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for path in (folder, folder / "config.json"):
        source = locate(str(path))
        assert source.config == json.loads((folder / "config.json").read_text())
        assert source.path is None
        for get in (probe, fetch):
            with pytest.raises(CheckpointError, match="download the weights"):
                get(source)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", '{"a":1,"a":2}'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    refused(folder, r"config\.json")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    folder = model_folder(tmp_path / "m")
    refused(folder / "model.safetensors", "give a .gguf file, a config.json")


def test_an_alias_is_described_by_the_catalog_without_a_network():
    source = locate("llama-3-70b", bits=4)
    assert (source.kind, source.origin, source.config_basis) == (
        "catalog",
        "catalog shapes",
        "derived",
    )
    assert source.config["num_hidden_layers"] == 80
    assert source.repo == "mlx-community/Meta-Llama-3-70B-Instruct-4bit"


def test_a_repository_that_is_not_cached_has_the_quantization_of_its_name():
    config = locate("mlx-community/Qwen3-14B-8bit").config
    assert config["quantization"] == {"group_size": 64, "bits": 8}
    config = locate("mlx-community/GLM-4.7-8bit-gs32").config
    assert config["quantization"] == {"group_size": 32, "bits": 8}
    assert "quantization" not in locate("meta-llama/Meta-Llama-3-70B-Instruct", bits=4).config
    assert "quantization" not in locate("mlx-community/gpt-oss-20b-MXFP4-Q8").config


def cache(repo: str, folder: Path, tmp_path: Path) -> Path:
    """Put ``folder`` into the hub's cache as ``repo``, in the layout of huggingface_hub."""
    place = tmp_path / "hf" / "hub" / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    shutil.copytree(folder, place / "snapshots" / "abc")
    return place / "snapshots" / "abc"


def test_headers_win_over_the_catalog_where_the_repository_is_cached(tmp_path):
    folder = model_folder(tmp_path / "m", quantization={"bits": 4, "group_size": 64})
    snapshot = cache("mlx-community/Meta-Llama-3-70B-Instruct-4bit", folder, tmp_path)
    source = locate("llama-3-70b", bits=4)
    assert (source.path, source.origin) == (snapshot, "safetensors headers")
    assert source.weight_bytes == 4 * 8 * 4


def test_a_cached_original_serves_where_the_quantized_repository_is_not_cached(tmp_path):
    original = "meta-llama/Meta-Llama-3-70B-Instruct"
    snapshot = cache(original, model_folder(tmp_path / "m"), tmp_path)
    source = locate("llama-3-70b", bits=4)
    assert (source.path, source.repo) == (snapshot, original)
    assert source.resolution.quantize_on_load


def test_a_snapshot_that_lacks_shards_is_still_to_be_fetched(tmp_path):
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    cache("org/tiny", folder, tmp_path)
    source = locate("org/tiny")
    assert (source.kind, source.path, source.repo) == ("hub", None, "org/tiny")


def test_nothing_means_the_default_model():
    source = locate(None)
    assert (source.kind, source.path) == ("default", None)
    assert source.download_bytes == default_model.WHEEL.wheel_bytes
    assert source.config["num_hidden_layers"] == 30
    assert locate("smollm2-135m").kind == "default"
    assert locate(default_model.HF_ID).repo == default_model.HF_ID
    assert locate("SmolLM2-135M-Instruct").kind == "default"


def test_the_default_model_in_the_cache_is_read_from_its_header(tmp_path, monkeypatch):
    path = written(tmp_path / "tiny.gguf")
    (tmp_path / "uma" / "models").mkdir(parents=True)
    shutil.copy(path, tmp_path / "uma" / "models" / default_model.FILE)
    monkeypatch.setattr(
        default_model,
        "WHEEL",
        default_model.WheelMember("", "", 0, "", "", path.stat().st_size, ""),
    )
    source = locate(None)
    assert (source.kind, source.origin) == ("default", "gguf header")
    assert source.path == tmp_path / "uma" / "models" / default_model.FILE
