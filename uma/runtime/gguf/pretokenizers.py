"""How byte-level BPE splits text before merging, by the name that ``tokenizer.ggml.pre`` gives."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from uma.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """Regular expressions applied one after another, each within the pieces of the one before.

    What an expression does not match is a piece too. ``ignore_merges`` takes a piece that is a
    token whole. ``add_bos`` holds where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool
    add_bos: bool


def pretokenizer(name: str) -> Pretokenizer:
    """The pre-tokenizer called ``name`` in llama.cpp.

    Raises:
        UnsupportedModel: An unknown name; the text lists the known ones.
    """
    table = _table()
    for pattern, names in table["names"].items():
        if name in names:
            return Pretokenizer(
                tuple(table["patterns"][pattern]),
                name in table["ignore_merges"],
                name in table["add_bos"],
            )
    raise UnsupportedModel(
        f"pre-tokenizer {name[:40]!r} of this GGUF file is not known; known: "
        f"{', '.join(known_names())}. Use the original model's tokenizer instead"
    )


def known_names() -> list[str]:
    """Every name that ``pretokenizer`` knows."""
    return sorted(name for names in _table()["names"].values() for name in names)


@cache
def _table() -> dict[str, Any]:
    path = Path(__file__).with_name("pretokenizers.json")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
