"""The Hugging Face hub: what a repository holds, how large it is, and fetching it.

All through ``huggingface_hub``, so HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME and the shared
cache mean what they mean elsewhere.
"""

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from uma.checkpoint import Progress
from uma.checkpoint.bounded_json import MAX_BYTES, loads
from uma.checkpoint.hub_cache import DEFAULT_REVISION, cache_folder, repository_folder
from uma.checkpoint.safetensors import (
    INDEX,
    LENGTH_BYTES,
    WEIGHTS,
    Header,
    header_length,
    indexed_files,
    parse_header,
)
from uma.errors import CheckpointError, HubError, StorageError
from uma.units import format_gib

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 5
FIRST_RANGE_BYTES = 100_000  # most safetensors headers are shorter (huggingface_hub #1855)
POLL_S = 0.2

# What a model needs; never code (*.py) nor pickles (*.bin, *.pt), which can run when read.
SAFE_PATTERNS = (
    "*.json",
    WEIGHTS,
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jinja",
)


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository at one commit; ``revision`` is the branch or tag that was asked for."""

    repo: str
    revision: str
    commit: str
    files: tuple[RepositoryFile, ...]

    def select(self, patterns: tuple[str, ...] = SAFE_PATTERNS) -> tuple[RepositoryFile, ...]:
        """The files of the top folder whose names match one of ``patterns``."""
        return tuple(
            file
            for file in self.files
            if not set(file.name) & set("/\\") and any(fnmatchcase(file.name, p) for p in patterns)
        )

    def select_gguf(self, gguf_type: str) -> tuple[RepositoryFile, ...]:
        """The GGUF files of a type, sorted: in the top folder, or in one below it."""
        return tuple(
            file
            for file in sorted(self.files, key=lambda file: file.name)
            if re.fullmatch(r"([^/\\.][^/\\]*/)?[^/\\]+\.gguf", file.name)
            and is_gguf_of_type(file.name, gguf_type)
        )


def is_gguf_of_type(name: str, gguf_type: str) -> bool:
    """Whether a file's name has ``gguf_type`` as a part, or is that name.

    >>> is_gguf_of_type("llama.Q4_K.gguf", "q4_k"), is_gguf_of_type("llama.Q4_K_M.gguf", "q4_k")
    (True, False)
    """
    part = rf"(^|[-._]){re.escape(gguf_type)}(?=[-.]|$)"
    return re.search(part, name.rpartition("/")[2], re.IGNORECASE) is not None


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def repository(repo: str, revision: str = DEFAULT_REVISION) -> Repository:
    """The files of ``repo`` and their sizes, from the hub.

    Raises:
        HubError: If the hub cannot be reached, or does not show that repository.
    """
    with hub_errors(repo):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint()).model_info(
            repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
        )
    files = tuple(
        RepositoryFile(sibling.rfilename, sibling.size or 0) for sibling in info.siblings or ()
    )
    return Repository(repo, revision, info.sha or revision, files)


def missing_bytes(repository: Repository, files: tuple[RepositoryFile, ...]) -> int:
    """How much of ``files`` the cache does not hold yet."""
    snapshot = repository_folder(repository.repo) / "snapshots" / repository.commit
    return sum(file.size_bytes for file in files if not (snapshot / file.name).exists())


def download(
    repository: Repository,
    files: tuple[RepositoryFile, ...] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch ``files``, or all that a model needs, into the hub's cache; the folder with them.

    Raises:
        HubError: If the hub cannot be reached, or refuses.
        StorageError: If the disk is too small, or the cache cannot be written.
    """
    files = repository.select() if files is None else files
    if not files:
        raise HubError(f"{repository.repo}: has no file like {', '.join(SAFE_PATTERNS)}")
    check_disk(repository, files)
    with hub_errors(repository.repo), _watched(repository, files, progress):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()
        names = [file.name.replace("[", "[[]") for file in files]
        folder = snapshot_download(
            repository.repo,
            revision=repository.revision,
            cache_dir=cache_folder(),
            allow_patterns=names,
            endpoint=endpoint(),
            etag_timeout=TIMEOUT_S,
        )
    return Path(folder)


def check_disk(repository: Repository, files: tuple[RepositoryFile, ...]) -> None:
    """Compare what is to come with what the cache's disk has free.

    Raises:
        StorageError: If it is not enough.
    """
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = missing_bytes(repository, files), shutil.disk_usage(existing).free
    if needed > free:
        raise StorageError(
            f"{repository.repo} needs {format_gib(needed)} more in {folder}, where "
            f"{format_gib(free)} are free; make room, or set HF_HOME to a larger disk"
        )


@contextmanager
def _watched(
    repository: Repository, files: tuple[RepositoryFile, ...], progress: Progress | None
) -> Iterator[None]:
    """Report, while a download runs, how far the files on the disk have grown."""
    if progress is None:
        yield
        return
    total = sum(file.size_bytes for file in files)
    blobs = repository_folder(repository.repo) / "blobs"
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            partial = sum(_size(path) for path in blobs.glob("*.incomplete"))
            progress(min(total, total - missing_bytes(repository, files) + partial), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    progress(total, total)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_remote_json(repository: Repository, name: str) -> dict[str, Any]:
    """The JSON object in the file ``name`` of ``repository``, such as its ``config.json``.

    Raises:
        HubError: If it cannot be fetched.
        CheckpointError: If it is no JSON object.
    """
    what = f"{repository.repo}/{name}"
    size_bytes = {file.name: file.size_bytes for file in repository.files}.get(name)
    if size_bytes is None:
        raise CheckpointError(f"{repository.repo}: has no {name}")
    if size_bytes > MAX_BYTES:
        raise CheckpointError(f"{what}: too large to be a model's JSON file")
    value = loads(_read_range(repository, name, 0, size_bytes), what)
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: must hold a JSON object")
    return value


def read_remote_headers(repository: Repository) -> tuple[Header, ...]:
    """The headers of all weight files of ``repository``, a few kilobytes of each.

    Raises:
        HubError: If they cannot be fetched.
        CheckpointError: If there are no safetensors weights, or they are malformed.
    """
    sizes = {file.name: file.size_bytes for file in repository.files}
    names = (
        indexed_files(read_remote_json(repository, INDEX), f"{repository.repo}/{INDEX}")
        if INDEX in sizes
        else tuple(file.name for file in repository.select((WEIGHTS,)))
    )
    if not names or not sizes.keys() >= set(names):
        raise CheckpointError(f"{repository.repo}: safetensors weights are missing")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(pool.map(lambda name: _remote_header(repository, name, sizes[name]), names))


def _remote_header(repository: Repository, name: str, file_bytes: int) -> Header:
    what = f"{repository.repo}/{name}"
    raw = _read_range(repository, name, 0, min(file_bytes, FIRST_RANGE_BYTES))
    end = LENGTH_BYTES + header_length(raw[:LENGTH_BYTES], file_bytes, what)
    if end > len(raw):
        raw += _read_range(repository, name, len(raw), end)
    return parse_header(raw[LENGTH_BYTES:end], file_bytes, what)


def _read_range(repository: Repository, name: str, begin: int, end: int) -> bytes:
    """Bytes ``begin`` to ``end`` of a file, and no more even if the server sends it all."""
    if end <= begin:
        return b""
    with hub_errors(repository.repo):
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(repository.repo, name, revision=repository.commit, endpoint=endpoint())
        headers: Mapping[str, str] = build_hf_headers() | {
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        raw = b""
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            hf_raise_for_status(response)
            if begin and response.status_code != 206:
                raise HubError(f"{repository.repo}: the hub does not serve parts of files")
            for chunk in response.iter_bytes():
                raw += chunk
                if len(raw) >= end - begin:
                    break
    if len(raw) < end - begin:
        raise HubError(f"{repository.repo}/{name}: the connection broke; try again")
    return raw[: end - begin]


@contextmanager
def hub_errors(repo: str, kind: str = "model") -> Iterator[None]:
    """Say in one line what the hub refused, and what to do."""
    local = f"or give a folder with the {kind}'s files instead of a name"
    if is_offline():
        raise HubError(
            f"{repo} is not in the cache at {cache_folder()}, and HF_HUB_OFFLINE is set; "
            f"unset it, {local}"
        )
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{repo} is gated: accept its terms at {endpoint()}/{repo} and set HF_TOKEN, {local}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{endpoint()} has no {kind} {repo}, or it is private; check the name, set HF_TOKEN, "
            f"{local}"
        ) from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubError(f"{repo}: {reason}; check the revision") from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubError(
            f"{repo}: {endpoint()} cannot be reached or refused ({reason}); "
            f"check the network and HF_ENDPOINT, {local}"
        ) from None
    except errors.HFValidationError as error:
        raise HubError(f"{repo} is not the name of a repository: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{cache_folder()}: the disk is full; make room") from None
        raise StorageError(f"{cache_folder()}: cannot be written: {error}") from None
