"""One JSON file for each run, kept on this machine and sent nowhere.

A record says what ran on what and what it took. It never holds a prompt, an answer, a path, a
user's or a host's name: text passes only under the keys listed here, and only if it looks like
none of these.
"""

import json
import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

_SECTIONS = (
    "command",
    "model",
    "machine",
    "versions",
    "settings",
    "ledger",
    "process",
    "speeds",
    "calibration",
)
# Keys whose values may be text, by the section that they belong to.
_TEXT_KEYS = frozenset(
    {
        "command",
        *("name", "kind", "model_type", "config_basis"),
        *("backend", "limit_source", "chip", "cpu", "os", "os_version"),
        *("mlx", "mlx_lm", "uma", "python"),
        *("form", "budget_source", "blas"),
        *("basis", "source", "phase", "verdict"),
        *("device", "kernel", "date"),
        *("fine_tune_type", "optimizer", "overlong"),
    }
)
_LISTS = ("terms", "trials")  # of objects; any other list is left out, token ids among them
_KEY = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,120}")
_COMMAND = re.compile(r"(?:uma )?(?:run|bench|convert|doctor|bandwidth|lora [a-z]+|measure [a-z]+)")
_PATH = re.compile(r"(?:^|[\s\"'(=:])(?:[/~]\S|\.{1,2}/|[A-Za-z]:/)|\\|file:")


@dataclass(frozen=True, slots=True)
class Written:
    """Where a record was kept, or a note on why it was not."""

    path: Path | None
    note: str | None = None


def write_record(record: Mapping[str, object], folder: Path) -> Written:
    """Keep ``record``, sanitized and dated, as a file of its own; a failure is only noted.

    The file appears whole or not at all, and no two runs share a name.
    """
    import tempfile

    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept = {"schema_version": SCHEMA_VERSION, "time": stamp, **sanitize(record)}
    name = f"{stamp.replace(':', '').replace('-', '')}-{os.urandom(6).hex()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file, indent=1)
                file.write("\n")
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        return Written(None, f"no record kept in {folder}: {error.strerror}")
    return Written(folder / name)


def read_records(folder: Path) -> list[dict[str, object]]:
    """The records of ``folder``, oldest first; files that are none of this version are left out."""
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("schema_version") == SCHEMA_VERSION:
            records.append(record)
    return records


def model_name(reference: str, *, local: bool, known: Collection[str] | None = None) -> str:
    """How a record names a model: a folder or file of this machine only if its name is public.

    ``known`` are the public names: those of the catalog unless given.

    >>> model_name("/home/ann/secret/SmolLM2-135M", local=True, known=["smollm2-135m"])
    'smollm2-135m'
    >>> model_name("/home/ann/my-novel", local=True, known=["smollm2-135m"])
    'local model'
    """
    if not local:
        return reference
    if known is None:
        from uma.catalog import models

        known = [model.hf_id.rsplit("/", 1)[-1] for model in models()]
    last = Path(reference).name.lower()
    return next((name for name in known if name.lower() == last), "local model")


def sanitize(record: Mapping[str, object]) -> dict[str, object]:
    """What of ``record`` may be kept: its known sections, in them numbers and listed text.

    Text that has a path or the name of the host or of the user in it becomes ``None``.
    """
    names = _own_names()
    return {k: _clean(k, v, names) for k, v in record.items() if k in _SECTIONS and _kept(k, v)}


def scrubbed(value: object) -> Any:
    """``value``, nested as it may be, without texts that a record would not keep.

    For documents whose keys and texts are all our own, such as a bundle for a bug report.
    """
    return _scrubbed(value, _own_names())


def _scrubbed(value: object, names: Collection[str]) -> object:
    if isinstance(value, Mapping):
        return {key: _scrubbed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(item, names) for item in value]
    if isinstance(value, str):
        return value if _harmless(value, names) else None
    return value


def _own_names() -> set[str]:
    """The names of this host and user, in lower case."""
    import getpass
    import platform

    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    node = platform.node()
    words = (node, node.partition(".")[0], user, Path.home().name)
    return {word.lower() for word in words if word}


def _kept(key: object, value: object) -> bool:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        return False
    if isinstance(value, str):
        return key in _TEXT_KEYS
    if isinstance(value, list | tuple):
        return key in _LISTS
    return value is None or isinstance(value, bool | int | float | Mapping)


def _clean(key: str, value: object, names: Collection[str]) -> object:
    if isinstance(value, Mapping):
        return {k: _clean(k, v, names) for k, v in value.items() if _kept(k, v)}
    if isinstance(value, list | tuple):
        return [_clean(key, item, names) for item in value if isinstance(item, Mapping)]
    if isinstance(value, str):
        if key == "command" and not _COMMAND.fullmatch(value):
            return None
        return value if _harmless(value, names) else None
    return value


def _harmless(text: str, names: Collection[str]) -> bool:
    if not _TEXT.fullmatch(text) or _PATH.search(text):
        return False
    words = re.split(r"[^\w.-]+", text.lower())
    return not any(name in words for name in names)
