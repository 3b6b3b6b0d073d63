"""Estimates from GGUF headers, against what llama.cpp's own converter writes for a known config.

tests/data/gguf_keys.json: the keys of llama.cpp b11434 (scripts/record_gguf_keys.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.checkpoint.gguf_config import FAMILIES, Keys, fields_of

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
