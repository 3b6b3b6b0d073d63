"""JSON of a model file, read in bounded memory: such files come from strangers.

What ``json`` builds is many times the text (``[],[],…`` takes 21 times its length), so the marks
that make objects are counted before parsing.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from uma.errors import CheckpointError

MAX_BYTES = 64 << 20  # the safetensors format allows 100 MB; real headers have a few MB
MAX_WIDE_BYTES = MAX_BYTES // 4  # one character outside Latin-1 can widen the whole text fourfold
MAX_CONTAINERS = 400_000  # arrays and objects; a header has three per tensor
MAX_ITEMS = 1_000_000


def shown(name: str, limit: int = 80) -> str:
    """``name`` quoted for a message: escapes instead of control characters, and not too long."""
    return ascii(name if len(name) <= limit else name[: limit - 3] + "...")


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members as a dict.

    Raises:
        ValueError: If two have the same name.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shown(twice)} occurs twice")
    return members


def loads(raw: bytes, what: str) -> Any:
    """The value of the JSON text ``raw``, whose origin ``what`` names in errors.

    Raises:
        CheckpointError: If it is not JSON, has a name twice, or would take too much memory.
    """
    if len(raw) > MAX_BYTES or (len(raw) > MAX_WIDE_BYTES and not raw.isascii()):
        raise CheckpointError(f"{what}: {len(raw):,} bytes of JSON are more than is read")
    containers = raw.count(b"[") + raw.count(b"{")
    if containers > MAX_CONTAINERS or raw.count(b",") > MAX_ITEMS:
        raise CheckpointError(f"{what}: the JSON has too many parts to be a model's")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique_members)
    except RecursionError:
        raise CheckpointError(f"{what}: the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of 4,301 digits
        raise CheckpointError(f"{what}: not valid JSON: {error}") from None


def load_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``.

    Raises:
        CheckpointError: If it cannot be read, or is not an object.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: too large to be a model's JSON file")
        value = loads(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
