"""The hub through huggingface_hub, against a hub on loopback."""

import json
import shutil
import socket
import time
from collections import namedtuple

import numpy as np
import pytest
from fakehub import COMMIT, serving
from safetensors.numpy import save_file
from test_gguf_header import written

from uma.checkpoint import hub, hub_cache, source
from uma.checkpoint.safetensors import read_header
from uma.errors import CheckpointError, HubError, StorageError

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}


@pytest.fixture
def remote(tmp_path):
    """A repository of two shards, with files that are never wanted."""
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    weight_map = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        tensors = {f"layers.{i}.{j}": np.full((50, 50), j, np.float32) for j in range(40)}
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for unwanted in ("modeling_evil.py", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / unwanted).write_bytes(b"x" * 1000)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return tmp_path / "hf"


@pytest.fixture
def server(remote, home, monkeypatch):
    with serving(org__tiny=remote) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_a_repository_lists_its_files_and_sizes(server, remote):
    repository = hub.repository("org/tiny")
    assert repository.commit == COMMIT
    sizes = {file.name: file.size_bytes for file in repository.files}
    assert sizes["config.json"] == (remote / "config.json").stat().st_size
    assert "onnx/config.json" in sizes


def test_only_safe_files_of_the_top_folder_are_wanted(server):
    names = {file.name for file in hub.repository("org/tiny").select()}
    assert names == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_a_download_lands_in_the_hubs_cache_and_is_found_there_again(server, remote):
    assert hub_cache.cached_snapshot("org/tiny") is None
    seen = []
    folder = hub.download(hub.repository("org/tiny"), progress=lambda *counts: seen.append(counts))
    assert (folder / "config.json").read_bytes() == (remote / "config.json").read_bytes()
    assert not (folder / "modeling_evil.py").exists()
    assert not (folder / "pytorch_model.bin").exists()
    total = sum(file.size_bytes for file in hub.repository("org/tiny").select())
    assert seen[-1] == (total, total)
    assert hub_cache.cached_snapshot("org/tiny") == folder
    assert hub.missing_bytes(hub.repository("org/tiny"), hub.repository("org/tiny").select()) == 0


def test_the_cache_is_where_huggingface_hub_keeps_it(home):
    from huggingface_hub import constants

    home_of_theirs = constants.HF_HOME
    assert str(hub_cache.cache_folder()) == constants.HF_HUB_CACHE.replace(
        home_of_theirs, str(home)
    )


def test_headers_are_read_from_ranges_without_the_weights(server, remote):
    repository = hub.repository("org/tiny")
    server.bytes_sent = 0
    headers = hub.read_remote_headers(repository)
    local = [read_header(path) for path in sorted(remote.glob("model-*.safetensors"))]
    assert [h.tensors for h in headers] == [h.tensors for h in local]
    assert server.bytes_sent < sum(h.size_bytes for h in headers) / 2
    assert hub.read_remote_json(repository, "config.json") == CONFIG


def test_a_header_longer_than_the_first_range_is_read_whole(server, remote):
    path = remote / "model-00001-of-00002.safetensors"
    save_file({f"{'n' * 3000}{i}": np.zeros(1, np.float32) for i in range(60)}, path)
    assert read_header(path).data_offset > hub.FIRST_RANGE_BYTES
    headers = hub.read_remote_headers(hub.repository("org/tiny"))
    assert headers[0].tensors == read_header(path).tensors


def test_a_hub_without_ranges_is_said_to_have_none(server, remote):
    server.ignores_ranges = True
    repository = hub.repository("org/tiny")
    assert len(hub.read_remote_headers(repository)) == 2
    path = remote / "model-00001-of-00002.safetensors"
    save_file({f"{'n' * 3000}{i}": np.zeros(1, np.float32) for i in range(60)}, path)
    with pytest.raises(HubError, match="does not serve parts"):
        hub.read_remote_headers(hub.repository("org/tiny"))


def test_a_hub_that_sends_whole_files_is_cut_off(server, remote):
    size = 64 << 20
    save_file({"w": np.zeros(size, np.uint8)}, remote / "model-00001-of-00002.safetensors")
    server.ignores_ranges = True
    hub.read_remote_headers(hub.repository("org/tiny"))
    assert server.bytes_sent < size


def test_a_malformed_remote_header_is_refused(server, remote):
    (remote / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="org/tiny/model-00001"):
        hub.read_remote_headers(hub.repository("org/tiny"))


def test_missing_remote_shards_are_refused(server, remote):
    (remote / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        hub.read_remote_headers(hub.repository("org/tiny"))


def test_an_unknown_repository_is_refused_with_what_to_do(server):
    with pytest.raises(HubError, match=r"has no model org/nope.*HF_TOKEN.*folder"):
        hub.repository("org/nope")


def test_an_unknown_revision_is_refused(server):
    with pytest.raises(HubError, match="check the revision"):
        hub.repository("org/tiny", "v9")


def test_a_gated_repository_needs_the_token(server, monkeypatch):
    server.gated.add("org/tiny")
    server.token = "hf_secret"
    with pytest.raises(HubError, match=r"gated: accept its terms at .*/org/tiny"):
        hub.repository("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert hub.repository("org/tiny").commit == COMMIT


def test_offline_nothing_is_asked_and_the_error_says_so(server, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set.*folder"):
        hub.repository("org/tiny")
    assert server.requests == []


def test_a_dead_endpoint_is_told_within_seconds(home, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        before = time.monotonic()
        with pytest.raises(HubError, match=r"cannot be reached.*HF_ENDPOINT.*folder"):
            hub.repository("org/tiny")
        assert time.monotonic() - before < 3


def test_a_silent_endpoint_is_told_within_seconds(home, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        before = time.monotonic()
        with pytest.raises(HubError, match="cannot be reached"):
            hub.repository("org/tiny")
        assert time.monotonic() - before < 5


def test_a_download_larger_than_the_disk_is_refused_before_it_starts(server, monkeypatch):
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    repository = hub.repository("org/tiny")
    server.requests.clear()
    with pytest.raises(StorageError, match=r"org/tiny needs .* free; make room"):
        hub.download(repository)
    assert server.requests == []


def test_a_cache_that_cannot_be_written_is_a_storage_error(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    repository = hub.repository("org/tiny")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written"):
        hub.download(repository)


def test_a_model_goes_from_a_name_to_a_probe_to_the_disk(server, remote):
    found = source.locate("org/tiny")
    assert (found.kind, found.path, found.config) == ("hub", None, None)
    probed = source.probe(found)
    assert probed.config == CONFIG
    assert probed.weight_bytes == 2 * 40 * 50 * 50 * 4
    assert probed.origin == "safetensors headers"
    fetched = source.fetch(probed)
    assert fetched.weight_bytes == probed.weight_bytes
    assert fetched.download_bytes is None
    server.requests.clear()
    assert source.locate("org/tiny").path == fetched.path
    assert server.requests == []


def test_a_download_that_was_cut_is_fetched_to_its_end(server):
    folder = source.fetch(source.locate("org/tiny")).path
    (folder / "model-00002-of-00002.safetensors").unlink()
    again = source.locate("org/tiny")
    assert again.path is None
    assert source.fetch(again).weight_bytes == 2 * 40 * 50 * 50 * 4


def test_a_gguf_repository_gives_the_file_of_the_asked_type(home, monkeypatch, tmp_path):
    folder = tmp_path / "gguf"
    (folder / "Q8_0").mkdir(parents=True)
    for name in ("tiny.Q4_K_M.gguf", "tiny.Q4_K.gguf", "Q8_0/tiny.Q8_0.gguf"):
        written(folder / name)
    with serving(org__tiny=folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        found = source.probe(source.locate("org/tiny:q4_k"))
        assert found.download_bytes == (folder / "tiny.Q4_K.gguf").stat().st_size
        assert source.fetch(found).path.name == "tiny.Q4_K.gguf"
        assert source.locate("org/tiny:Q4_K").kind == "gguf"
        assert source.fetch(source.locate("org/tiny:Q8_0")).path.name == "tiny.Q8_0.gguf"
        assert source.locate("org/tiny:Q8_0").kind == "gguf"
        with pytest.raises(CheckpointError, match=r"no GGUF of type Q9.*tiny\.Q4_K\.gguf"):
            source.fetch(source.locate("org/tiny:Q9"))
        with pytest.raises(CheckpointError, match="only GGUF; add a type: org/tiny:Q8_0"):
            source.probe(source.locate("org/tiny"))
