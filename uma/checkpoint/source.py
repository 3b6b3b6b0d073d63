"""What the MODEL argument is: a folder, a GGUF file, a hub repository, a catalog alias, or nothing.

``locate`` asks the disk alone, ``probe`` reads the little of the hub that an estimate needs, and
``fetch`` downloads. Each gives a ``ModelSource`` that says where its facts come from.
"""

import os
import re
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from uma.catalog import Basis, model_config
from uma.checkpoint import DEFAULT_MODEL, DEFAULT_MODEL_ID, Progress
from uma.checkpoint.bounded_json import load_object
from uma.checkpoint.hub_cache import DEFAULT_REVISION, cached_snapshot
from uma.checkpoint.names import Resolution, resolve
from uma.errors import CheckpointError, HubError
from uma.frozen import dataclass
from uma.paths import cache_folder

# A model of the catalog needs no file, and reading files takes modules of some size.
if TYPE_CHECKING:
    from uma.checkpoint.gguf import GGUFHeader
    from uma.checkpoint.hub import Repository, RepositoryFile
    from uma.checkpoint.safetensors import Header

CONFIG_ALONE = "config.json without weights"

Kind = Literal["mlx", "huggingface", "gguf", "hub", "catalog", "default"]
"""``mlx``, ``huggingface`` and ``gguf`` are on this disk, also where they came from the hub."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What is known of a model before it is loaded.

    ``path`` is its folder or GGUF file on this disk, None while it is still to be fetched from
    ``repo``. ``weight_bytes`` sums the tensors as stored, and ``origin`` names what that and
    ``config`` were read from. ``published_bytes`` is what others say a repository holds. A model of
    kind ``catalog`` is known by its shapes: from the catalog, or from a ``config.json`` alone.
    """

    name: str
    kind: Kind
    origin: str
    path: Path | None = None
    repo: str | None = None
    revision: str = DEFAULT_REVISION
    config: dict[str, Any] | None = field(default=None, repr=False)
    config_basis: Basis = "exact"
    weight_files: tuple[Path, ...] = ()
    weight_bytes: int | None = None
    headers: "tuple[Header, ...]" = field(default=(), repr=False)
    gguf_headers: "tuple[GGUFHeader, ...]" = field(default=(), repr=False)
    download_bytes: int | None = None
    published_bytes: int | None = None
    resolution: Resolution | None = None


def locate(
    model: str | None,
    *,
    bits: int | None = None,
    quant: str | None = None,
    revision: str | None = None,
    cache_dir: Path | None = None,
) -> ModelSource:
    """What ``model`` is, from this disk alone; None means the default model.

    Raises:
        CheckpointError: If a path does not exist, or what it names is not a whole model.
        UnknownName: If no model is called so, or several are.
    """
    if model is None or model.lower() == DEFAULT_MODEL.lower():
        return _default(model or DEFAULT_MODEL, cache_dir)
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):  # unlike Path.is_file, false for a name that no path can have
        return _from_file(model, path)
    if os.path.isdir(path) and (_looks_like_path(model) or _holds_model(path)):
        return _from_config(model, path) if _is_config_alone(path) else _from_folder(model, path)
    if _looks_like_path(model):
        raise CheckpointError(
            f"{model}: no such file or folder; give one, or a name such as llama-3-8b"
        )
    resolution = resolve(model, bits, quant)
    source = _from_hub(resolution, revision or DEFAULT_REVISION)
    if source.path is None and resolution.repo == DEFAULT_MODEL_ID and "/" not in model:
        return _default(model, cache_dir)
    return source


def probe(source: ModelSource) -> ModelSource:
    """``source`` with its config, weight bytes and download size read from the hub, if it is there.

    Raises:
        HubError: If the hub cannot be reached, or refuses.
        CheckpointError: If the repository is not a whole model.
    """
    _require_weights(source)
    if source.path is not None or source.repo is None:
        return source
    from uma.checkpoint import hub

    repository = hub.repository(source.repo, source.revision)
    files = _gguf_files_of(source, repository)
    if files:
        return replace(
            source,
            download_bytes=hub.missing_bytes(repository, files),
            weight_bytes=sum(file.size_bytes for file in files),
            origin="gguf file size",
        )
    headers = hub.read_remote_headers(repository)
    return replace(
        source,
        config=hub.read_remote_json(repository, "config.json"),
        config_basis="exact",
        headers=headers,
        weight_bytes=sum(header.size_bytes for header in headers),
        download_bytes=hub.missing_bytes(repository, repository.select()),
        origin="safetensors headers",
    )


def fetch(
    source: ModelSource, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> ModelSource:
    """``source`` with its files on this disk, downloaded where they are not.

    Raises:
        HubError: If the hub or the package index cannot be reached, or refuses.
        StorageError: If the disk is too small, or the cache cannot be written.
        CheckpointError: If what came is not a whole model.
    """
    if source.path is not None:
        return source
    if source.kind == "default":
        from uma.checkpoint import default_model

        folder = cache_dir or models_folder()
        default_model.fetch_default_model(folder, progress)
        return _default(source.name, folder)
    _require_weights(source)
    if source.repo is None:
        raise HubError(f"{source.name}: no repository is known to fetch it from")
    from uma.checkpoint import hub

    repository = hub.repository(source.repo, source.revision)
    files = _gguf_files_of(source, repository)
    if files:
        folder = hub.download(repository, files, progress)
        found = _from_gguf(source.name, folder / files[0].name)
    else:
        found = _from_folder(source.name, hub.download(repository, progress=progress))
    return replace(found, repo=source.repo, revision=source.revision, resolution=source.resolution)


def _require_weights(source: ModelSource) -> None:
    if source.origin == CONFIG_ALONE:
        raise CheckpointError(
            f"{source.name}: has no weights, which is enough for an estimate; to run it download "
            "the weights, and give their folder"
        )


def models_folder() -> Path:
    """Where models are kept that do not come from the hub."""
    return cache_folder() / "models"


def _default(name: str, cache_dir: Path | None) -> ModelSource:
    from uma.checkpoint import default_model

    path = default_model.find_default_model(cache_dir or models_folder())
    if path is not None:
        return replace(_from_gguf(name, path), kind="default")
    resolution = resolve(DEFAULT_MODEL_ID)
    assert resolution.model is not None  # the catalog has its own default
    config = model_config(resolution.model)
    return ModelSource(
        name=name,
        kind="default",
        origin="catalog shapes",
        config=config.values,
        config_basis=config.basis,
        download_bytes=default_model.WHEEL.wheel_bytes,
        published_bytes=default_model.WHEEL.size_bytes,
        resolution=resolution,
    )


def _looks_like_path(model: str) -> bool:
    """Whether ``model`` can only be meant as a path: a hub id has one slash and no such ending."""
    return (
        model.startswith((".", "~", "/", "\\"))
        or model.count("/") > 1
        or "\\" in model
        or model.endswith("/")
        or model.lower().endswith((".gguf", ".safetensors", ".json", ".bin"))
        or bool(re.match(r"[A-Za-z]:[/\\]", model))
    )


def _holds_model(folder: Path) -> bool:
    return any(
        next(folder.glob(pattern), None) is not None
        for pattern in ("config.json", "*.safetensors", "*.gguf")
    )


def _from_file(name: str, path: Path) -> ModelSource:
    if path.suffix.lower() == ".gguf":
        return _from_gguf(name, path)
    if path.name == "config.json":
        return _from_config(name, path)
    from uma.checkpoint.gguf import MAGIC

    try:
        with open(path, "rb") as file:
            if file.read(4) == MAGIC:
                return _from_gguf(name, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    raise CheckpointError(
        f"{path}: not a GGUF file; give a .gguf file, a config.json, or the folder that holds it"
    )


def _is_config_alone(folder: Path) -> bool:
    """Whether a folder has a configuration, and nothing that could be weights or name them."""
    weights = ("safetensors", "safetensors.index.json", "gguf", "bin", "pt", "pth", "pkl")
    return (folder / "config.json").is_file() and not any(
        next(folder.glob(f"*.{ending}"), None) for ending in weights
    )


def _from_config(name: str, path: Path) -> ModelSource:
    """A configuration, the file or its folder: what an estimate needs, and no more."""
    file = path / "config.json" if path.is_dir() else path
    return ModelSource(name=name, kind="catalog", origin=CONFIG_ALONE, config=load_object(file))


def _from_gguf(name: str, path: Path) -> ModelSource:
    from uma.checkpoint.gguf_split import files_of_model, read_model

    files = files_of_model(path)
    header = read_model(path)
    return ModelSource(
        name=name,
        kind="gguf",
        origin="gguf header",
        path=files[0],
        weight_files=files,
        weight_bytes=header.size_bytes,
        gguf_headers=(header,),
    )


def _from_folder(name: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise CheckpointError(_no_config(folder))
    from uma.checkpoint.safetensors import headers_of_folder

    config = load_object(folder / "config.json")
    headers = headers_of_folder(folder)
    mlx = "quantization" in config or any(h.metadata.get("format") == "mlx" for h in headers)
    return ModelSource(
        name=name,
        kind="mlx" if mlx else "huggingface",
        origin="safetensors headers",
        path=folder,
        config=config,
        weight_files=tuple(Path(header.file) for header in headers),
        weight_bytes=sum(header.size_bytes for header in headers),
        headers=headers,
    )


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: holds an adapter; give the model, and this as --adapter-path"
    files = sorted(folder.glob("*.gguf"))
    if files:
        return f"{folder}: has no config.json but GGUF files; give one of them: {files[0]}"
    return f"{folder}: has no config.json, so it is not a model's folder"


def _gguf_files_of(source: ModelSource, repository: "Repository") -> "tuple[RepositoryFile, ...]":
    """The files of the GGUF type that was asked; none where MLX or Hugging Face weights were.

    Raises:
        CheckpointError: If there are none of that type, or nothing but GGUF and no type was asked.
    """
    from uma.checkpoint.safetensors import WEIGHTS

    wanted = source.resolution.gguf_type if source.resolution else None
    files = () if wanted is None else repository.select_gguf(wanted)
    names = [file.name for file in repository.files if file.name.endswith(".gguf")]
    only_gguf = names and not repository.select((WEIGHTS,))
    if not files and (wanted is not None or only_gguf):
        lacks = (
            f"no GGUF of type {wanted}" if wanted else f"only GGUF; add a type: {source.repo}:Q8_0"
        )
        known = ", ".join(names[:12]) or "no GGUF files at all"
        raise CheckpointError(f"{source.repo}: has {lacks}; it has {known}")
    return files


def _from_hub(resolution: Resolution, revision: str) -> ModelSource:
    """A repository in the hub's cache, or one still to be fetched, described by the catalog.

    The 16-bit original in the cache serves as well as a quantized repository that is not.
    """
    repos = [resolution.repo]
    if resolution.model is not None and "/" not in resolution.name:
        repos.append(resolution.model.hf_id)
    for repo in repos:
        source = _from_cache(resolution, repo, revision)
        if source is not None:
            return source
    source = ModelSource(
        name=resolution.name,
        kind="hub",
        origin="not read yet",
        repo=resolution.repo,
        revision=revision,
        published_bytes=resolution.repository.size_bytes if resolution.repository else None,
        resolution=resolution,
    )
    if resolution.model is None:
        return source
    config = model_config(resolution.model)
    return replace(
        source,
        kind="catalog",
        origin="catalog shapes",
        config=config.values | _stored_quantization(resolution),
        config_basis=config.basis,
    )


def _stored_quantization(resolution: Resolution) -> dict[str, Any]:
    """What the config of a repository given by its id adds to its model's, as its name tells.

    64 is the group size that ``mlx_lm.convert`` takes unless told otherwise (mlx-lm 0.32.2).
    """
    row = resolution.repository
    if row is None or "/" not in resolution.name or row.bits in (None, 16):
        return {}
    if row.mode not in ("affine", ""):
        return {}
    group_size = 32 if row.repo.endswith("-gs32") else 64
    return {"quantization": {"group_size": group_size, "bits": row.bits}}


def _from_cache(resolution: Resolution, repo: str, revision: str) -> ModelSource | None:
    """The model in the hub's cache, or None if it is not there as a whole."""
    folder = cached_snapshot(repo, revision)
    if folder is None:
        return None
    from uma.checkpoint.hub import is_gguf_of_type

    known = (
        resolution if repo == resolution.repo else replace(resolution, repo=repo, repository=None)
    )
    try:
        if known.gguf_type is not None:
            files = sorted(
                path
                for path in (*folder.glob("*.gguf"), *folder.glob("*/*.gguf"))
                if is_gguf_of_type(path.name, known.gguf_type)
            )
            source = _from_gguf(resolution.name, files[0]) if files else None
        else:
            source = _from_folder(resolution.name, folder)
    except CheckpointError:
        return None  # an interrupted download; fetching goes on with it
    return source and replace(source, repo=repo, revision=revision, resolution=known)
