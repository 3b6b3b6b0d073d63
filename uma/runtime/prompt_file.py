"""A processed prompt on disk: its cache, its tokens, and the model that it belongs to."""

import errno
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from uma.errors import CheckpointError, StorageError, UsageError
from uma.runtime.cache import PromptCache, rewind
from uma.runtime.load import LoadedModel

_VERSION = "1"


def fingerprint(loaded: LoadedModel) -> str:
    """What a cache depends on: the shapes of all parameters and a sample of their values.

    The first 16 numbers of each are taken, so a fused or fine-tuned model differs from its base.
    """
    parameters = sorted(tree_flatten(loaded.model.parameters()))
    samples = [p.reshape(-1)[:16] for _, p in parameters]
    mx.eval(samples)
    digest = hashlib.sha256(json.dumps(loaded.config, sort_keys=True, default=str).encode())
    for (name, p), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name} {p.shape} {p.dtype}".encode())
        digest.update(bytes(mx.contiguous(sample).view(mx.uint8)))
    return digest.hexdigest()


def save_prompt(path: Path, cache: PromptCache, loaded: LoadedModel) -> None:
    """Write the cache and its tokens to ``path``: whole, or not at all.

    Raises:
        UsageError: If the model keeps caches that mlx-lm cannot write.
        StorageError: If the folder cannot be written or the disk is full.
    """
    from mlx_lm.models import cache as kinds
    from mlx_lm.models.cache import save_prompt_cache

    for layer in cache.layers:
        if not hasattr(kinds, type(layer).__name__):
            raise UsageError(
                f"mlx-lm cannot save a {type(layer).__name__}; leave --prompt-cache out"
            )
    partial = _partial(path)
    metadata = {
        "uma": _VERSION,
        "tokens": json.dumps(cache.tokens),
        "model": fingerprint(loaded),
    }
    try:
        save_prompt_cache(str(partial), cache.layers, metadata)
        os.replace(partial, path)
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError, ValueError):
            partial.unlink()


def check_writable(path: Path) -> None:
    """Refuse a ``path`` that could not be written, before anything is computed for it.

    Raises:
        StorageError: If it is a folder, or its folder is missing or cannot be written.
    """
    try:
        partial = _partial(path)
        with suppress(FileNotFoundError):
            if S_ISDIR(path.stat().st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from None


def _partial(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".uma.{os.getpid()}.safetensors")


def _not_written(path: Path, error: Exception) -> StorageError:
    full = getattr(error, "errno", None) == errno.ENOSPC
    why = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
    return StorageError(f"the prompt cache {path} cannot be written: {why}")


def load_prompt(path: Path, cache: PromptCache, loaded: LoadedModel) -> int:
    """Fill ``cache`` from ``path``, as far as its context goes; tokens that it now holds.

    Raises:
        CheckpointError: If the file is missing, damaged or no prompt cache.
        UsageError: If it belongs to another model, or to other ``--kv-bits``.
    """
    from mlx_lm.models.cache import load_prompt_cache

    if not path.is_file():
        raise CheckpointError(f"there is no prompt cache {path}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / "prompt.safetensors"  # MLX opens no other suffix
            link.symlink_to(path.resolve())
            layers, metadata = load_prompt_cache(str(link), return_metadata=True)
            mx.eval([layer.state for layer in layers])
        tokens = [int(t) for t in json.loads(metadata["tokens"])]
        model = metadata["model"]
    except Exception as error:  # a hostile file can break mlx-lm's reader in any place
        raise CheckpointError(f"{path} is no prompt cache, or is damaged: {error}") from error
    if model != fingerprint(loaded):
        raise UsageError(f"{path} was made with another model; give that one or another file")
    expected, found = _kinds(cache.layers), _kinds(layers)
    if expected != found:
        raise UsageError(
            f"{path} holds {found}, and this run needs {expected}; give the same --kv-bits and "
            "--kv-group-size, or another file"
        )
    cache.layers, cache.tokens = layers, tokens
    if len(tokens) > cache.context_tokens and not rewind(cache, cache.context_tokens):
        raise UsageError(
            f"{path} holds {len(tokens)} tokens; give --context {len(tokens) + 256} or more"
        )
    return len(cache.tokens)


def _kinds(layers: list[Any]) -> str:
    """The kinds of caches in order of first use, with the width of quantized ones."""
    names = []
    for layer in layers:
        for part in getattr(layer, "caches", (layer,)):
            bits = getattr(part, "bits", None)
            group = f" in {bits} bits, groups of {part.group_size}" if bits else ""
            names.append(f"{type(part).__name__}{group}")
    return f"{len(names)} caches ({', '.join(dict.fromkeys(names))})"
