"""Data sets of the Hugging Face hub, as a folder of the files that training reads."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from uma.checkpoint.hub import TIMEOUT_S, endpoint, hub_errors, is_offline
from uma.checkpoint.hub_cache import DEFAULT_REVISION, cache_folder, cached_snapshot
from uma.errors import DataError, RuntimeUnavailable, StorageError, UsageError
from uma.frozen import dataclass

_FILE = re.compile(
    r"(?:^|/)(train|validation|valid|dev|test)(?:[-_.\d][^/]*)?\.(?:jsonl|parquet)", re.IGNORECASE
)
_OURS = {"validation": "valid", "dev": "valid"}
_SLICE = re.compile(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
_KEYS = {
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "chat_feature": "messages",
    "text_feature": "text",
}
_SPLITS = {"train_split": "train", "valid_split": "valid", "test_split": "test"}


@dataclass(frozen=True, slots=True)
class HubData:
    """A data set of the hub: which of its splits are ours, and how its rows name their keys."""

    repo: str
    splits: Mapping[str, str] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def hub_data(text: str) -> HubData | None:
    """What ``--data`` means if it is no folder: ``owner/name``, or mlx_lm.lora's ``hf_dataset``.

    The latter, as JSON, takes the splits that mlx-lm 0.32.2 takes by default
    (``tuner/datasets.py``, ``load_custom_hf_dataset``): 80 % of train, and its last tenth.

    Raises:
        UsageError: If it is JSON and has no path, or a key that is not known.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith((".", "/")):
        return HubData(text)
    if not text.startswith("{"):
        return None
    try:
        asked = json.loads(text)
        path = asked.pop("path")
    except (ValueError, KeyError, AttributeError):
        raise UsageError(f"hf_dataset has no path: {text}") from None
    known = {*_KEYS, *_SPLITS, "config"}
    if wrong := [key for key in asked if key not in known]:
        raise UsageError(f"hf_dataset has no {wrong[0]!r}; it has path, {', '.join(sorted(known))}")
    if asked.get("config"):
        raise UsageError("hf_dataset: a config cannot be chosen; put its files in a folder")
    given = {"train_split": "train[:80%]", "valid_split": "train[-10%:]"} | asked
    splits = {ours: given[key] for key, ours in _SPLITS.items() if given.get(key)}
    return HubData(path, splits, {_KEYS[k]: v for k, v in asked.items() if k in _KEYS})


def hub_folder(data: HubData, cache: Path) -> Path:
    """The data set under ``cache`` as train.jsonl, valid.jsonl and test.jsonl, fetched if need be.

    Raises:
        HubError: If the hub cannot be reached, or has no such data set.
        DataError: If it has no JSON lines or Parquet files named after splits.
        RuntimeUnavailable: If it is Parquet, and pyarrow is not installed.
    """
    snapshot = _snapshot(data.repo)
    asked = f"{snapshot.name} {data.splits} {dict(data.keys)}"
    name = f"{data.repo.replace('/', '--')}-{sha256(asked.encode()).hexdigest()[:12]}"
    folder = cache / "datasets" / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            _write(data, snapshot, temporary)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def _snapshot(repo: str) -> Path:
    """The files of the splits in the hub's cache."""
    if is_offline() and (cached := cached_snapshot(repo, kind="datasets")) is not None:
        return cached
    with hub_errors(repo, "data set"):
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        info = HfApi(endpoint=endpoint()).dataset_info(
            repo, revision=DEFAULT_REVISION, timeout=TIMEOUT_S
        )
        names = [sibling.rfilename for sibling in info.siblings or ()]
        chosen = [name for name in names if _FILE.search(name)]
        if not chosen:
            found = ", ".join(names[:5]) or "nothing"
            raise DataError(
                f"{repo} has no .jsonl or .parquet files named train, validation or test "
                f"(it has {found})"
            )
        folder = snapshot_download(
            repo,
            allow_patterns=[name.replace("[", "[[]") for name in chosen],
            endpoint=endpoint(),
            etag_timeout=TIMEOUT_S,
            repo_type="dataset",
            cache_dir=cache_folder(),
        )
    return Path(folder)


def _write(data: HubData, snapshot: Path, folder: Path) -> None:
    files: dict[str, list[Path]] = {}
    for path in sorted(p for p in snapshot.rglob("*") if p.is_file()):
        if match := _FILE.search(path.relative_to(snapshot).as_posix()):
            name = match[1].lower()
            files.setdefault(_OURS.get(name, name), []).append(path)
    splits = data.splits or {name: name for name in files}
    for ours, wanted in splits.items():
        rows = _rows(data.repo, wanted, files)
        text = "".join(json.dumps(_renamed(row, data.keys)) + "\n" for row in rows)
        (folder / f"{ours}.jsonl").write_text(text, encoding="utf-8")


def _rows(repo: str, wanted: str, files: Mapping[str, Sequence[Path]]) -> list[Any]:
    """The rows of ``name``, ``name[:80%]`` or ``name[-100:]``."""
    match = _SLICE.fullmatch(wanted.replace(" ", ""))
    if match is None:
        raise UsageError(f"hf_dataset: {wanted!r} is no split such as train[:80%]")
    name = _OURS.get(match[1], match[1])
    if name not in files:
        raise DataError(f"{repo} has no split {match[1]} (it has {', '.join(files)})")
    rows = [row for path in files[name] for row in _read(path)]
    begin, end = (_place(part, len(rows)) for part in (match[2], match[3]))
    return rows[begin:end]


def _place(text: str | None, rows: int) -> int | None:
    """``datasets`` 5.2 rounds a share to the nearest row (``arrow_reader.py``)."""
    if text is None:
        return None
    return round(int(text[:-1]) * rows / 100) if text.endswith("%") else int(text)


def _read(path: Path) -> Iterator[Any]:
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path)
        return
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from None


def _parquet(path: Path) -> list[Any]:
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise RuntimeUnavailable(
            f"{path.name} is Parquet, which needs pyarrow: pip install pyarrow; or put the rows "
            "into a folder as train.jsonl"
        )
    parquet: Any = import_module("pyarrow.parquet")
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def _renamed(row: Any, keys: Mapping[str, str]) -> Any:
    """A row under mlx-lm's own keys; the row itself if nothing is renamed."""
    if not keys or not isinstance(row, dict):
        return row
    found = {ours: row[theirs] for ours, theirs in keys.items() if theirs in row}
    return found | ({"tools": row["tools"]} if "tools" in row else {})
