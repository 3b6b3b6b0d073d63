"""A model held in memory for a command of ``uma lora``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from uma.cli.progress import progress, say

if TYPE_CHECKING:
    from uma.runtime.load import LoadedModel


@contextmanager
def heavy(command: str, *, quiet: bool, wait: bool, allow_concurrent: bool) -> Iterator[None]:
    """Hold the lock of heavy commands.

    Raises:
        Busy: If another one holds it.
    """
    from uma.paths import state_folder
    from uma.system.lock import heavy_command

    with heavy_command(
        command,
        state_folder(),
        wait=wait,
        allow_concurrent=allow_concurrent,
        on_wait=lambda holder: say(f"waiting for {holder}", quiet),
    ) as note:
        if note is not None:
            say(f"note: {note}", quiet)
        yield


def loaded_model(folder: Path, dequantize: str, quiet: bool) -> "LoadedModel":
    """The model as it is computed with: as stored, or in float32 where that is faster.

    Raises:
        CheckpointError, UnsupportedModel: As ``uma.runtime.load.load``.
    """
    from uma.runtime.backend import backend
    from uma.runtime.load import load

    wide = dequantize == "always" or (dequantize == "auto" and backend() == "cpu")
    with progress("loading layers", quiet=quiet) as show:
        return load(folder, dequantize_to="float32" if wide else None, progress=show)
