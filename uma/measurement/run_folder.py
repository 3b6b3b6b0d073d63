"""The folder of a training run: what lies in it, and whether a process works there."""

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uma.checkpoint.adapter import WEIGHTS
from uma.checkpoint.lock import try_lock
from uma.errors import Busy, CheckpointError, StorageError, UsageError

CHECKPOINTS, STATE, OPTIMIZER = "checkpoints", "state.json", "optimizer.safetensors"
LOG, RUN, LOCK, BEST = "log.jsonl", "run.json", ".lock", "best"
_NO_RUN = {"config.json": "a model", "train.jsonl": "a data set"}

Event = dict[str, Any]

_COUNTS = ("iteration", "iters", "best_iteration", "memory_bytes", "peak_memory_bytes")
_NUMBERS = ("train_loss", "val_loss", "best_val_loss", "left_s", "s_per_iter", "time")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(_NUMBERS, int | float),
    **dict.fromkeys(("how", "text", "remedy"), str),
    "plan": dict,
}


@dataclass(slots=True)
class Progress:
    """Where a run stands, and the last losses.

    ``best_val_loss`` is the lowest, the untouched model's at iteration 0 among them; ``worse`` are
    the validations since then, and ``validated`` is the iteration of the last one.
    """

    iteration: int = 0
    trained_tokens: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_iteration: int | None = None
    worse: int = 0
    validated: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint says beside its arrays; ``settings`` is what a resumed run must equal.

    ``environment`` is what the numbers depend on beside it: bit for bit only where it is the same.
    """

    progress: Progress
    random_state: int
    settings: dict[str, Any]
    environment: dict[str, Any]


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (run / CHECKPOINTS).glob("[0-9]" * 7)
    return sorted(path for path in found if (path / STATE).is_file())


def damaged(checkpoint: Path) -> str:
    """What to do about a checkpoint whose files are damaged."""
    return f"move {checkpoint} away, and --resume goes on from the checkpoint before it"


def read_state(checkpoint: Path) -> State:
    """The state of a checkpoint.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        found = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return State(**found | {"progress": Progress(**found["progress"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE} cannot be read: {error}; {damaged(checkpoint)}"
        ) from error


def last_progress(run: Path) -> Progress:
    """Where a run stood at its newest checkpoint, which must be there."""
    return read_state(checkpoints(run)[-1]).progress


def state_text(state: State) -> str:
    return json.dumps(asdict(state), indent=1) + "\n"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that differ, as ``name: was, is``."""
    names = sorted({*one, *other})
    return [
        f"{name}: was {one.get(name)}, is {other.get(name)}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def require_place(run: Path, resume: bool) -> None:
    """Refuse a folder in which no run can begin, or none go on; nothing is written.

    Raises:
        UsageError: If it is no folder, or one of something else, or as ``require_free``.
        StorageError: If it cannot be looked at.
        Busy: If a process trains there.
    """
    try:
        is_folder = stat.S_ISDIR(run.stat().st_mode)
    except FileNotFoundError:
        is_folder = not run.is_symlink()  # it will be made, but not behind a dead link
    except OSError as error:
        raise unwritable(run, error) from None
    if not is_folder:
        raise UsageError(f"{run} is a file or a dead link; give a folder as --adapter-path")
    for name, what in _NO_RUN.items():
        if (run / name).is_file():
            raise UsageError(f"{run} is the folder of {what}; give another --adapter-path")
    if is_held(run):
        raise _busy(run)
    require_free(run, resume)


def require_free(run: Path, resume: bool) -> None:
    """Refuse to write over another run, and to resume what is not there.

    Raises:
        UsageError: With what to do instead.
    """
    there = checkpoints(run)
    if resume and not there:
        raise UsageError(f"{run} has no checkpoint to resume; leave out --resume to begin")
    if not resume and (there or (run / WEIGHTS).exists()):
        raise UsageError(
            f"{run} holds another run; continue it with --resume, or give another --adapter-path"
        )


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep other processes out of the folder, which is made if need be.

    The system lets go of the lock when the process ends, however it ends.

    Raises:
        Busy: If another process trains there.
        StorageError: If nothing can be written there.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(run, error) from None
    try:
        if not _locked(run, file):
            raise _busy(run)
        yield
    finally:
        os.close(file)


def _locked(run: Path, file: int) -> bool:
    try:
        return try_lock(file)
    except OSError as error:
        raise StorageError(
            f"{run} cannot be locked: {error.strerror}; give an --adapter-path on another disk"
        ) from None


def _busy(run: Path) -> Busy:
    return Busy(f"another process trains in {run}; uma lora status {run} shows it")


def is_held(run: Path) -> bool:
    """Whether a process trains in the folder now."""
    try:
        file = os.open(run / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(file)
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)


def append(run: Path, event: Event) -> None:
    """Add a line to the log of a run, with the time.

    Raises:
        StorageError: If it cannot be written.
    """
    line = json.dumps(event | {"time": round(time.time(), 3)}) + "\n"
    try:
        with (run / LOG).open("ab") as file:
            # A line that a full disk or a kill cut short must not swallow this one.
            cut = file.tell() and not _ends_a_line(run / LOG)
            file.write(("\n" if cut else "").encode() + line.encode())
    except OSError as error:
        raise unwritable(run / LOG, error) from error


def failed(error: BaseException) -> Event:
    return {"event": "end", "how": "failed", "text": str(error)}


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def last_plan(run: Path) -> dict[str, Any]:
    """How the newest attempt of a run was cut, or nothing where none has begun."""
    plans = [event["plan"] for event in events(run) if event.get("plan")]
    return dict(plans[-1]) if plans else {}


def events(run: Path) -> list[Event]:
    """The log of a run, oldest first; lines that are cut short or damaged are left out."""
    try:
        lines = (run / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and _is_whole(event):
            found.append(event)
    return found


def _is_whole(event: Event) -> bool:
    """Whether what is read of an event is of its kind."""
    return isinstance(event.get("event"), str) and all(
        isinstance(event[name], kind)
        for name, kind in _KINDS.items()
        if event.get(name) is not None
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a small file at once.

    Raises:
        StorageError: If it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror or error}")
