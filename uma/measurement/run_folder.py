"""The folder of a training run: what lies in it, and whether a process works there."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uma.checkpoint.lock import try_lock
from uma.errors import Busy, CheckpointError, StorageError

CHECKPOINTS, STATE, OPTIMIZER = "checkpoints", "state.json", "optimizer.safetensors"
LOG, RUN, LOCK, BEST = "log.jsonl", "run.json", ".lock", "best"

Event = dict[str, Any]


@dataclass(slots=True)
class Progress:
    """Where a run stands, and the last losses.

    ``best_val_loss`` is the lowest after an update, ``worse`` the validations since then.
    """

    iteration: int = 0
    trained_tokens: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_iteration: int | None = None
    worse: int = 0


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
        if not try_lock(file):
            raise Busy(f"another process trains in {run}; uma lora status {run} shows it")
        yield
    finally:
        os.close(file)


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


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def events(run: Path) -> list[Event]:
    """The log of a run, oldest first; lines that were cut short are left out."""
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
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


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
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror or error}")
