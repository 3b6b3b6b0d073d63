"""From ``--data`` and a model's name to checked splits."""

from pathlib import Path
from typing import TYPE_CHECKING

from uma.cli.options import RunOptions
from uma.cli.progress import progress

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.dataset.check import Split
    from uma.dataset.examples import Encoder, Overlong


def tokenizer_of(name: str | None, *, quiet: bool, yes: bool) -> "tuple[ModelSource, Encoder]":
    """The model as a folder on this disk, and its tokenizer."""
    from uma.cli.plan import located
    from uma.cli.session import on_disk, require_mlx

    require_mlx(quiet)
    # ``force``: the plan of ``uma run`` says nothing of training.
    chosen = RunOptions(model=name, quiet=quiet, yes=yes, force=True)
    source = on_disk(chosen, located(chosen))
    assert source.path is not None
    from uma.runtime.load import open_tokenizer
    from uma.runtime.lora.encoder import TokenizerEncoder

    return source, TokenizerEncoder(open_tokenizer(source.path, source.config or {}))


def checked(
    folder: Path,
    encoder: "Encoder",
    *,
    mask_prompt: bool,
    max_seq_length: int,
    overlong: "Overlong",
    quiet: bool,
) -> "dict[str, Split]":
    """Every file of a data folder, read and tokenized."""
    from uma.dataset.check import check_split, split_files

    splits = {}
    for name, path in split_files(folder).items():
        with progress(f"tokenizing {path.name}", quiet=quiet) as show:
            splits[name] = check_split(
                name,
                path,
                encoder,
                mask_prompt=mask_prompt,
                max_seq_length=max_seq_length,
                overlong=overlong,
                progress=show,
            )
    return splits
