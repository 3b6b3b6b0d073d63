"""The process that a person started: it lets a child train, and says how that ended."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import Asked, arguments
from uma.cli.progress import say
from uma.errors import UmaError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.measurement.run_status import Status
    from uma.runtime.lora.supervise import Cause, Ended

INTERRUPTED = 130
OUTPUT = "output.txt"
POLL_S = 0.2


def supervise(asked: Asked) -> int:
    """Train in a child; with ``--auto-resume`` in another, with less at a time. The exit code."""
    from uma.runtime.lora.supervise import cause_of, run_child

    _require_idle(asked)
    asked = _on_disk(asked)
    while True:
        ended = run_child(_uma(arguments(asked)), allow_sleep=asked.allow_sleep)
        cause = cause_of(ended)
        if ended.output:
            print(ended.output, end="", flush=True)
        if cause is None:
            return _code(ended)
        _tell(asked, ended, cause)
        again = _smaller(asked) if asked.auto_resume and cause.smaller_helps else None
        if again is None:
            return 1
        say(f"going on with {again.micro_batch} of the longest rows at once", asked.quiet)
        asked = again


def _uma(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "uma", *arguments]


def _code(ended: "Ended") -> int:
    if ended.code >= 0:
        return ended.code
    return INTERRUPTED if ended.asked_to_stop else 1


def _require_idle(asked: Asked) -> None:
    """Refuse a folder in which another process trains, before anything is read."""
    from uma.measurement.run_folder import held

    if asked.adapter_path.is_dir():
        with held(asked.adapter_path):
            pass


def _on_disk(asked: Asked) -> Asked:
    """Fetch a model that is not here, while there is somebody to ask."""
    from uma.cli.options import RunOptions
    from uma.cli.plan import located
    from uma.cli.session import on_disk, require_mlx

    require_mlx(asked.quiet)
    chosen = RunOptions(model=asked.model, quiet=asked.quiet, yes=asked.yes, force=True)
    source = located(chosen)
    if source.path is None:
        on_disk(chosen, source)
    return replace(asked, yes=True)


def _tell(asked: Asked, ended: "Ended", cause: "Cause") -> None:
    """Say what happened, what is left and how to go on; the log of the run keeps it too."""
    from uma.measurement.run_folder import append
    from uma.measurement.run_status import read_status

    samples, text, remedy = ended.samples, cause.text, _remedy(asked, cause)
    if samples.last_bytes is not None and samples.peak_bytes is not None:
        text += (
            f" The process held {format_gib(samples.last_bytes)}, "
            f"at most {format_gib(samples.peak_bytes)}."
        )
    end = {"event": "end", "how": "killed", "cause": cause.cause, "code": ended.code}
    with suppress(UmaError):
        if asked.adapter_path.is_dir():
            append(asked.adapter_path, end | {"text": text, "remedy": remedy})
    try:
        status = read_status(asked.adapter_path)
    except UmaError:
        say(f"uma: training ended before its first step: {text}\n  do: {remedy}")
        return
    say("\n  ".join(_told(status, text, remedy, cause.quote)))


def _told(status: "Status", text: str, remedy: str, quote: str) -> Iterator[str]:
    from uma.report.run_status import kept_text

    of = "" if status.iters is None else f" of {status.iters:,}"
    yield f"uma: training ended after iteration {status.iteration:,}{of}: {text}"
    if quote:
        yield f"last words: {quote}"
    if status.memory_bytes is not None and status.peak_memory_bytes is not None:
        yield (
            f"last memory line: {format_gib(status.memory_bytes)}, at most "
            f"{format_gib(status.peak_memory_bytes)} in arrays"
        )
    yield f"kept: {kept_text(status)}"
    yield f"do: {remedy}"
    if status.command is not None:
        yield f"continue: {status.command if status.checkpoint else 'the same command'}"


def _remedy(asked: Asked, cause: "Cause") -> str:
    """What to change of a training; the table of failures speaks of inference."""
    if not cause.smaller_helps:
        return cause.remedy
    rows = _last_rows(asked)
    less = "a shorter --max-seq-length"
    if rows is None or rows > 1:
        half = "fewer rows at once" if rows is None else f"--micro-batch {-(-rows // 2)}"
        less = f"{half} (--auto-resume goes on with that by itself), or {less}"
    if cause.cause in ("timeout", "interactivity", "gpu_hang"):
        return f"{cause.remedy} Or give {less}."
    return f"Give {less}, or end other programs."


def _last_rows(asked: Asked) -> int | None:
    """Rows at once of the last attempt."""
    from uma.measurement.run_folder import events

    plans = [event["plan"] for event in events(asked.adapter_path) if event.get("plan")]
    return plans[-1]["micro_batch"] if plans else None


def _smaller(asked: Asked) -> Asked | None:
    """The same training with half as many rows at once, from its last checkpoint.

    From the beginning if there is none; ``None`` if it was a single row already.
    """
    from uma.measurement.run_folder import checkpoints

    rows = _last_rows(asked)
    if rows is None or rows == 1:
        say("one row at once is the least: not tried again", asked.quiet)
        return None
    resume = bool(checkpoints(asked.adapter_path))
    return replace(asked, micro_batch=-(-rows // 2), resume=resume)


def detach(asked: Asked) -> int:
    """Let another process supervise, without this terminal; wait until training has begun."""
    from uma.measurement.run_folder import events, unwritable
    from uma.runtime.lora.supervise import DETACHED, child_environment

    _require_idle(asked)
    asked = _on_disk(asked)
    folder = asked.adapter_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = (folder / OUTPUT).open("ab")
    except OSError as error:
        raise unwritable(folder, error) from None
    before, begun = output.tell(), _begins(events(folder))
    with output:
        process = subprocess.Popen(
            _uma(arguments(replace(asked, detach=False))),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**child_environment(), DETACHED: "1"},
            start_new_session=True,
        )
    while process.poll() is None and _begins(events(folder)) == begun:
        time.sleep(POLL_S)
    if process.poll() is not None:
        with (folder / OUTPUT).open(encoding="utf-8", errors="replace") as file:
            file.seek(before)
            say(file.read().rstrip())
        return process.returncode
    print(f"training goes on as process {process.pid}; uma lora status {folder.absolute()}")
    print(f"it writes to {folder / OUTPUT}; kill {process.pid} saves and ends it")
    return 0


def _begins(log: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "begin" for event in log)
