"""Estimates from GGUF headers, against what llama.cpp's own converter writes for a known config.

tests/data/gguf_keys.json: the keys of llama.cpp b11434 (scripts/record_gguf_keys.py).
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.checkpoint.gguf import read_header
from uma.checkpoint.gguf_config import FAMILIES, Keys, config_of_gguf, fields_of
from uma.cli import main
from uma.errors import CheckpointError, UnsupportedModel

MODELS = Path(__file__).parent.parent / "uma/data/models"
WRITTEN = json.loads((Path(__file__).parent / "data/gguf_keys.json").read_text())
KNOWN = {n: k for n, k in WRITTEN.items() if k["general.architecture"] in FAMILIES}


def published(name: str) -> Architecture:
    return architecture_from_config(json.loads((MODELS / f"{name}.json").read_text()))


def read(keys: dict[str, Any], like: Architecture) -> Architecture:
    """The architecture of a file with these keys, whose vocabulary is that of ``like``."""
    name = keys["general.architecture"]
    values = {f"{name}.{key}": value for key, value in keys.items()}
    shapes = {"token_embd.weight": (like.vocab_size, like.hidden_size)}
    if not like.tie_word_embeddings:
        shapes["output.weight"] = shapes["token_embd.weight"]
    return architecture_from_config(fields_of(Keys(values, name), shapes))


@pytest.mark.parametrize("name", KNOWN)
def test_the_keys_of_a_file_describe_the_layers_of_the_published_config(name: str) -> None:
    """What caches and buffers follow from: mixers, feed-forward parts, sizes."""
    theirs = published(name)
    ours = read(KNOWN[name], theirs)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.vocab_size == theirs.vocab_size
    assert [x.mixers for x in ours.layers] == [x.mixers for x in theirs.layers]
    assert [x.feed_forward for x in ours.layers] == [x.feed_forward for x in theirs.layers]


def test_every_family_but_one_is_checked_so() -> None:
    """The converter's Qwen3 Next needs the tensors; its keys are those of Qwen3.5's experts."""
    assert FAMILIES.keys() - {k["general.architecture"] for k in KNOWN.values()} == {"qwen3next"}
    keys = KNOWN["Qwen__Qwen3.5-35B-A3B"] | {"general.architecture": "qwen3next"}
    theirs = published("Qwen__Qwen3.5-35B-A3B")
    assert [x.mixers for x in read(keys, theirs).layers] == [x.mixers for x in theirs.layers]


def file_of(path: Path, keys: dict[str, Any], vocab_size: int = 100) -> Path:
    """A GGUF file with these keys, and no tensors but embeddings."""
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    name = keys["general.architecture"]
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{name}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, keys["embedding_length"]), "f2"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("deepseek-ai__DeepSeek-V3", 61 * 576 * 2),
        ("LiquidAI__LFM2-1.2B", 6 * 8 * 64 * 2 * 2),
    ],
)
def test_an_estimate_of_a_file_has_its_weights_and_the_caches_of_its_keys(
    name: str, row: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of a token in the cache: 576 numbers in 61 layers, 2 x 512 in six of sixteen."""
    path = file_of(tmp_path / "m.gguf", KNOWN[name])
    main(["estimate", str(path), "--engine", "llama.cpp", "--vram", "80GB", "--json"])
    terms = {t["name"]: t["size_bytes"] for t in json.loads(capsys.readouterr().out)["terms"]}
    assert terms["weights"] == read_header(path).size_bytes
    assert terms["kv_cache"] == 8192 * row


def test_an_unknown_architecture_is_refused_with_the_known(tmp_path: Path) -> None:
    keys = {"general.architecture": "clip", "embedding_length": 64, "block_count": 2}
    with pytest.raises(UnsupportedModel, match=r"'?clip'? is not known; known: llama, afmoe"):
        config_of_gguf(read_header(file_of(tmp_path / "m.gguf", keys)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 1 << 20), ("block_count", 0), ("embedding_length", None)],
)
def test_keys_that_are_no_sizes_are_refused(key: str, value: Any) -> None:
    keys = {**KNOWN["Qwen__Qwen3-0.6B"], key: value}
    with pytest.raises(CheckpointError):
        read(keys, published("Qwen__Qwen3-0.6B"))


def test_a_list_shorter_than_the_layers_is_refused() -> None:
    name = "LiquidAI__LFM2-1.2B"
    keys = {**KNOWN[name], "attention.head_count_kv": [8, 0]}
    with pytest.raises(CheckpointError, match="head_count_kv"):
        read(keys, published(name))
