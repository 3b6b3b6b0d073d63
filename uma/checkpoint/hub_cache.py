"""Where the Hugging Face cache keeps a repository, read from its layout alone.

Importing ``huggingface_hub`` takes longer than a whole estimate.
"""

import os
from pathlib import Path

DEFAULT_REVISION = "main"


def cache_folder() -> Path:
    """The hub's cache (huggingface_hub 2.4, ``constants.HF_HUB_CACHE``)."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface"
    )
    folder = (
        os.environ.get("HF_HUB_CACHE")
        or os.environ.get("HUGGINGFACE_HUB_CACHE")
        or os.path.join(home, "hub")
    )
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def repository_folder(repo: str, kind: str = "models") -> Path:
    """Where a repository of a ``kind``, such as ``datasets``, is kept."""
    return cache_folder() / f"{kind}--{repo.replace('/', '--')}"


def cached_snapshot(
    repo: str, revision: str = DEFAULT_REVISION, kind: str = "models"
) -> Path | None:
    """The folder of ``repo`` in the hub's cache, or None; files of it may still be missing."""
    folder = repository_folder(repo, kind)
    try:
        commit = (folder / "refs" / revision).read_text("ascii").strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None
