"""A model held in memory for a command of ``uma lora``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from uma.cli.options import RunOptions
from uma.cli.progress import progress, say
from uma.errors import DoesNotFit
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.runtime.load import LoadedModel

SHORT = 512  # tokens of a prompt


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


def form_that_fits(
    source: "ModelSource", dequantize: str, *, force: bool
) -> Literal["always", "never"]:
    """``--dequantize`` as the plan of a short prompt decides it: float32 on a CPU, if that fits.

    Raises:
        DoesNotFit: If no form of the weights fits, unless it is forced.
    """
    from uma.cli.plan import plan_of
    from uma.cli.session import live_machine

    chosen = RunOptions(model=source.name, context=SHORT, dequantize=dequantize)
    plan = plan_of(chosen, source, live_machine()).plan
    if plan.verdict == "exceeds" and not force:
        peak, machine = plan.ledger.predicted_peak_bytes, plan.machine
        raise DoesNotFit(
            f"{source.name} takes {format_gib(peak)}, and the limit is "
            f"{format_gib(machine.limit_bytes)} ({machine.limit_source}); --force tries it"
        )
    return "always" if plan.form.kind == "float32" else "never"


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
