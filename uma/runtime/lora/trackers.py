"""Where the numbers of a run go beside its own log: Weights & Biases, SwanLab, TensorBoard."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from uma.errors import RuntimeUnavailable, UsageError
from uma.runtime.lora.event_file import EventFile

TRACKERS = ("wandb", "swanlab", "tensorboard", "jsonl")
_EVENTS = ("train", "validation")
_TIMES = ("iteration", "best_iteration", "time")

Report = Callable[[Mapping[str, Any]], None]
_Opened = tuple[Report, Callable[[], None]]
"""What takes reports, and what ends it."""


def trackers(text: str | None) -> tuple[str, ...]:
    """The names of ``--report-to``, as mlx_lm.lora separates them: by commas.

    Raises:
        UsageError: If one is unknown.
        RuntimeUnavailable: If its package is not installed.
    """
    names = tuple(name.strip().lower() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--report-to {name!r} is not one of {', '.join(TRACKERS)}")
        if name in ("wandb", "swanlab") and find_spec(name) is None:
            raise RuntimeUnavailable(
                f"--report-to {name} needs its package: pip install {name} (tensorboard and jsonl "
                "need none)"
            )
    return names


@contextmanager
def reporting(
    names: Sequence[str],
    folder: Path,
    project: str | None,
    settings: Mapping[str, Any],
    on_failure: Callable[[str], None],
) -> Iterator[Report]:
    """A function that takes the events of a run in ``folder``; ``jsonl`` is the run's own log.

    What the packages print goes to stderr: stdout holds the result. One that fails is told of and
    left out from there on: it is no reason to end the run.

    Raises:
        RuntimeUnavailable: If one cannot begin, which is before the run does.
    """
    reports: dict[str, Report] = {}
    ends: dict[str, Callable[[], None]] = {}

    def report(event: Mapping[str, Any]) -> None:
        if event.get("event") not in _EVENTS:
            return
        numbers = {
            name: float(value)
            for name, value in event.items()
            if type(value) in (int, float) and name not in _TIMES
        }
        for name, one in list(reports.items()):
            try:
                one({"iteration": event["iteration"], "numbers": numbers})
            except Exception as error:  # a package's own: any kind
                del reports[name]
                on_failure(f"{name} takes no more reports: {error}")

    try:
        for name in filter(_OPEN.__contains__, names):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                reports[name], ends[name] = _OPEN[name](folder, project, settings)
            except Exception as error:
                raise RuntimeUnavailable(f"--report-to {name} cannot begin: {error}") from error
        yield report
    finally:
        for name, end in ends.items():
            try:
                end()
            except Exception as error:
                on_failure(f"{name} did not end well: {error}")


def _package(name: str, folder: Path, project: str | None, settings: Mapping[str, Any]) -> _Opened:
    module: Any = import_module(name)
    about: dict[str, Any] = {"project": project or Path.cwd().name, "config": dict(settings)}
    if name == "wandb":
        about |= {"name": folder.name, "dir": str(folder)}
    else:
        about |= {"experiment_name": folder.name, "logdir": str(folder / "swanlog")}

    def end() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            module.finish()

    with contextlib.redirect_stdout(sys.stderr):
        module.init(**about)
    return lambda event: module.log(event["numbers"], step=event["iteration"]), end


def _tensorboard(folder: Path, _: str | None, __: Mapping[str, Any]) -> _Opened:
    file = EventFile(folder, time.time(), os.getpid())
    return lambda event: file.write(time.time(), event["iteration"], event["numbers"]), file.close


_OPEN: dict[str, Callable[[Path, str | None, Mapping[str, Any]], _Opened]] = {
    "wandb": partial(_package, "wandb"),
    "swanlab": partial(_package, "swanlab"),
    "tensorboard": _tensorboard,
}
