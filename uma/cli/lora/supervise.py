"""The process that a person started: it lets a child train, and says how that ended."""

import json as json_module
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uma.cli.lora.asked import HANDED, INTERRUPTED, Asked, handed
from uma.cli.progress import SHOWN, say
from uma.errors import UmaError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.measurement.run_status import Status
    from uma.runtime.lora.supervise import Cause, Ended

OUTPUT = "output.txt"
POLL_S = 0.2
_TRAIN = (sys.executable, "-m", "uma", "lora", "train")


def supervise(asked: Asked) -> int:
    """Train in a child; with ``--auto-resume`` in another, with less at a time. The exit code."""
    from uma.measurement.run_folder import events
    from uma.runtime.lora.supervise import cause_of, run_child

    asked = _on_disk(asked)
    while True:
        begun = _begins(events(asked.adapter_path), os.getpid())
        given = {HANDED: handed(asked), SHOWN: "1" if sys.stderr.isatty() else ""}
        ended = run_child(_TRAIN, given, allow_sleep=asked.allow_sleep)
        cause = cause_of(ended)
        if ended.output:
            print(ended.output, end="", flush=True)
        if cause is None:
            told = not ended.code or ended.output
            if not told and _begins(events(asked.adapter_path), os.getpid()) > begun:
                _tell_kept(asked.adapter_path)
            return _code(ended)
        _tell(asked, ended, cause)
        wanted = asked.auto_resume and cause.smaller_helps and not ended.asked_to_stop
        again = _smaller(asked) if wanted else None
        if again is None:
            return 1
        say(f"going on with {again.micro_batch} of the longest rows at once", asked.quiet)
        asked = again


def _code(ended: "Ended") -> int:
    if ended.code >= 0:
        return ended.code
    return INTERRUPTED if ended.asked_to_stop else 1


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
        say(f"uma: training ended before it began: {text}\n  do: {remedy}")
        return
    say("\n  ".join(_told(status, text, remedy, cause.quote)))


def _told(status: "Status", text: str, remedy: str, quote: str) -> Iterator[str]:
    from uma.report.run_status import kept_text

    at = "before its first report"
    if status.iteration:
        of = "" if status.iters is None else f" of {status.iters:,}"
        at = f"after iteration {status.iteration:,}{of}"
    yield f"uma: training ended {at}: {text}"
    if quote:
        yield f"last words: {quote}"
    if status.memory_bytes is not None and status.peak_memory_bytes is not None:
        yield (
            f"last memory line: {format_gib(status.memory_bytes)}, at most "
            f"{format_gib(status.peak_memory_bytes)} in arrays"
        )
    yield f"kept: {kept_text(status)}"
    yield f"do: {remedy}"
    yield from _continued(status)


def _continued(status: "Status") -> Iterator[str]:
    if status.command is not None:
        yield f"continue: {status.command if status.checkpoint else 'the same command'}"


def _tell_kept(folder: Path) -> None:
    """What is left of a run that has said itself why it failed, and how to go on."""
    from uma.measurement.run_status import read_status
    from uma.report.run_status import kept_text

    status = read_status(folder)
    say("\n  ".join([f"  kept: {kept_text(status)}", *_continued(status)]))


def _remedy(asked: Asked, cause: "Cause") -> str:
    """What to change of a training; the table of failures speaks of inference."""
    if not cause.smaller_helps:
        return cause.remedy
    rows = _last_rows(asked)
    less = "a shorter --max-seq-length"
    if rows > 1:
        by_itself = "" if asked.auto_resume else " (--auto-resume goes on with that by itself)"
        less = f"--micro-batch {-(-rows // 2)}{by_itself}, or {less}"
    if cause.cause in ("timeout", "interactivity", "gpu_hang"):
        return f"{cause.remedy} Or give {less}."
    return f"Give {less}, or end other programs."


def _last_rows(asked: Asked) -> int:
    """Rows at once of the last attempt, which may have ended before it said them."""
    from uma.measurement.run_folder import last_plan

    most = asked.micro_batch or asked.batch_size
    return int(min(most, last_plan(asked.adapter_path).get("micro_batch", most)))


def _smaller(asked: Asked) -> Asked | None:
    """The same training with half as many rows at once, from its last checkpoint.

    From the beginning if there is none; ``None`` if it was a single row already.
    """
    from uma.measurement.run_folder import checkpoints

    rows = _last_rows(asked)
    if rows == 1:
        say("one row at once is the least: not tried again", asked.quiet)
        return None
    resume = bool(checkpoints(asked.adapter_path))
    return replace(asked, micro_batch=-(-rows // 2), resume=resume)


def detach(asked: Asked) -> int:
    """Let another process supervise, without this terminal; wait until training has begun."""
    from uma.measurement.run_folder import events, unwritable
    from uma.runtime.lora.supervise import child_environment

    asked = _on_disk(asked)
    folder = asked.adapter_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = (folder / OUTPUT).open("ab")
    except OSError as error:
        raise unwritable(folder, error) from None
    before, log = output.tell(), events(folder)
    with output:
        process = subprocess.Popen(
            _TRAIN,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**child_environment(), HANDED: handed(asked)},
            start_new_session=True,
        )
    begun = _begins(log, process.pid)
    while process.poll() is None and _begins(events(folder), process.pid) == begun:
        time.sleep(POLL_S)
    if process.poll() is not None:
        with (folder / OUTPUT).open(encoding="utf-8", errors="replace") as file:
            file.seek(before)
            say(file.read().rstrip())
        return process.returncode
    _tell_detached(asked, process.pid)
    return 0


def _tell_detached(asked: Asked, pid: int) -> None:
    from uma.report import SCHEMA_VERSION

    folder = asked.adapter_path.absolute()
    if asked.json:
        document = {"pid": pid, "run": str(folder), "output": str(folder / OUTPUT)}
        print(json_module.dumps({"schema_version": SCHEMA_VERSION} | document, indent=2))
        return
    print(f"training goes on as process {pid}; uma lora status {folder}")
    print(f"it writes to {folder / OUTPUT}; kill {pid} saves and ends it")


def _begins(log: list[dict[str, Any]], pid: int) -> int:
    """How often a child of the process ``pid`` began: another may train in the folder."""
    return sum(event["event"] == "begin" and event.get("parent") == pid for event in log)
