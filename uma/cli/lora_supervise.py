"""The process that a person started: it lets a child train, and says how that ended."""

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.cli.lora_asked import Asked, arguments
from uma.cli.progress import say
from uma.errors import UmaError
from uma.units import format_gib

if TYPE_CHECKING:
    from uma.runtime.lora.supervise import Cause, Ended

INTERRUPTED = 130
OUTPUT = "output.txt"
POLL_S = 0.2


def supervise(asked: Asked) -> int:
    """Train in a child; with ``--auto-resume`` in another, with less at a time. The exit code."""
    from uma.runtime.lora.supervise import cause_of, run_child

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
    from uma.report.fine_tuning import kept_text

    samples = ended.samples
    seen = "" if samples.last_bytes is None else f", {format_gib(samples.last_bytes)} held then"
    most = "" if samples.peak_bytes is None else f", {format_gib(samples.peak_bytes)} at most"
    text = f"{cause.text}{seen}{most}"
    with suppress(UmaError):
        if asked.adapter_path.is_dir():
            end = {"event": "end", "how": "killed", "cause": cause.cause, "text": text}
            append(asked.adapter_path, end | {"code": ended.code, "remedy": cause.remedy})
    try:
        status = read_status(asked.adapter_path)
    except UmaError:
        say(f"uma: training ended before its first step: {text}\n  do: {cause.remedy}")
        return
    of = "" if status.iters is None else f" of {status.iters:,}"
    lines = [f"uma: training ended after iteration {status.iteration:,}{of}: {text}"]
    if cause.quote:
        lines.append(f"last words: {cause.quote}")
    if status.memory_bytes is not None:
        lines.append(
            f"last memory line: {format_gib(status.memory_bytes)}, at most "
            f"{format_gib(status.peak_memory_bytes or 0)} in arrays"
        )
    lines.append(f"kept: {kept_text(status)}")
    lines.append(f"do: {cause.remedy}")
    if status.command is not None:
        continued = status.command if status.checkpoint is not None else "the same command"
        lines.append(f"continue: {continued}")
    say("\n  ".join(lines))


def _smaller(asked: Asked) -> Asked | None:
    """The same training with half as many rows at once, from the last checkpoint if there is one;
    ``None`` if it was a single one already."""
    from uma.measurement.run_folder import checkpoints, events

    plans = [event["plan"] for event in events(asked.adapter_path) if event.get("plan")]
    if not plans or plans[-1]["micro_batch"] == 1:
        say("one row at once is the least: not tried again", asked.quiet)
        return None
    rows = -(-plans[-1]["micro_batch"] // 2)
    return replace(asked, micro_batch=rows, resume=bool(checkpoints(asked.adapter_path)))


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
    before, begun = output.tell(), _begins(events(folder))
    with output:
        process = subprocess.Popen(
            _uma(arguments(replace(asked, detach=False))),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(),
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
