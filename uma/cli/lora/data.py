"""From ``--data`` and a model's name to checked splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from uma.cli.options import RunOptions
from uma.cli.progress import progress
from uma.errors import UsageError

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.dataset.check import Split
    from uma.dataset.examples import Encoder, Overlong


def model_on_disk(name: str | None, *, quiet: bool, yes: bool) -> "ModelSource":
    """The model as a folder of this disk, fetched or converted where it has to be."""
    from uma.cli.plan import located
    from uma.cli.session import on_disk, require_mlx

    require_mlx(quiet)
    # ``force``: the plan of ``uma run`` says nothing of training.
    chosen = RunOptions(model=name, quiet=quiet, yes=yes, force=True)
    source = on_disk(chosen, located(chosen))
    assert source.path is not None
    return source


def tokenizer_of(name: str | None, *, quiet: bool, yes: bool) -> "tuple[ModelSource, Encoder]":
    """The model as a folder of this disk, and its tokenizer."""
    source = model_on_disk(name, quiet=quiet, yes=yes)
    from uma.runtime.load import open_tokenizer
    from uma.runtime.lora.encoder import TokenizerEncoder

    assert source.path is not None
    return source, TokenizerEncoder(open_tokenizer(source.path, source.config or {}))


def data_folder(data: Path | None, *, quiet: bool = False) -> Path:
    """The folder that ``--data`` names, fetched where it is a data set of the hub.

    Raises:
        UsageError: If it was not given.
        HubError: If the hub has no such data set, or cannot be reached.
    """
    if data is None:
        raise UsageError("give the data: --data FOLDER, which holds train.jsonl")
    if data.exists():
        return data
    from uma.dataset.hub import hub_data, hub_folder

    found = hub_data(data.as_posix())
    if found is None:
        return data
    from uma.paths import cache_folder

    with progress(f"fetching {found.repo}", quiet=quiet):
        return hub_folder(found, cache_folder())


def checked(
    folder: Path,
    encoder: "Encoder",
    *,
    mask_prompt: bool,
    max_seq_length: int,
    overlong: "Overlong",
    quiet: bool,
    only: Sequence[str] = (),
    count_roles: bool = False,
) -> "dict[str, Split]":
    """Every file of a data folder, or those of ``only``, read and tokenized.

    Raises:
        DataError: If the training file or one of ``only`` is missing, or a file holds no rows.
    """
    from uma.dataset.check import check_split, split_files

    splits = {}
    for name, path in split_files(folder, only or ("train",)).items():
        if only and name not in only:
            continue
        with progress(f"tokenizing {path.name}", quiet=quiet) as show:
            splits[name] = check_split(
                name,
                path,
                encoder,
                mask_prompt=mask_prompt,
                max_seq_length=max_seq_length,
                overlong=overlong,
                count_roles=count_roles,
                progress=show,
            )
    return splits
