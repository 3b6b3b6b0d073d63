"""What the folder of a training run says of it: how far it is, or how it ended."""

import contextlib
import hashlib
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from uma.checkpoint.adapter import WEIGHTS
from uma.errors import UmaError, UsageError
from uma.measurement.run_folder import (
    BEST,
    RUN,
    Event,
    checkpoints,
    events,
    is_held,
    read_state,
    write_json,
)

How = Literal["running", "done", "stopped", "abandoned", "patience", "failed", "killed", "lost"]


@dataclass(frozen=True, slots=True)
class Status:
    """A run as its folder shows it.

    ``how`` is ``lost`` where it ended without a word: the machine went off, or parent and child
    were killed. ``checkpoint`` is the iteration that ``command`` continues from.
    """

    folder: Path
    how: How
    iteration: int
    iters: int | None
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_iteration: int | None
    memory_bytes: int | None
    peak_memory_bytes: int | None
    left_s: float | None
    silent_s: float | None
    pid: int | None
    text: str
    remedy: str
    checkpoint: int | None
    adapter: Path | None
    best: Path | None
    command: str | None

    @property
    def can_continue(self) -> bool:
        return self.how not in ("running", "done") and self.command is not None


def read_status(folder: Path) -> Status:
    """The state of the run in ``folder``, which is not written to.

    Raises:
        UsageError: If no run was begun there.
    """
    log = events(folder)
    about = _about(folder)
    begun = max((n for n, e in enumerate(log) if e["event"] == "begin"), default=None)
    if not log and not about:
        raise UsageError(f"no run was begun in {folder}; give the --adapter-path of one")
    now = log[begun or 0 :]
    last = _last(now)
    running = is_held(folder)
    end = next((e for e in reversed(now) if e["event"] == "end"), None)
    how: How = "running" if running else (end or {}).get("how", "lost")
    how = how if how in get_args(How) else "lost"
    kept = [one for one in checkpoints(folder) if _progress(one)]
    before = _progress(kept[-1]) if kept else {}
    since = [e["time"] for e in now if e.get("time") is not None]
    best = folder / BEST
    return Status(
        folder=folder,
        how=how,
        iteration=last.get("iteration", 0),
        iters=last.get("iters", about.get("iters")),
        train_loss=last.get("train_loss", before.get("train_loss")),
        val_loss=last.get("val_loss", before.get("val_loss")),
        best_val_loss=last.get("best_val_loss", before.get("best_val_loss")),
        best_iteration=last.get("best_iteration", before.get("best_iteration")),
        memory_bytes=last.get("memory_bytes"),
        peak_memory_bytes=last.get("peak_memory_bytes"),
        left_s=last.get("left_s") if running else None,
        silent_s=time.time() - since[-1] if since else None,
        pid=about.get("pid") if running else None,
        text=(end or {}).get("text", "") if not running else "",
        remedy=(end or {}).get("remedy", "") if not running else "",
        checkpoint=int(kept[-1].name) if kept else None,
        adapter=folder if (folder / WEIGHTS).is_file() else None,
        best=best if (best / WEIGHTS).is_file() else None,
        command=_command(about, begun=bool(kept)),
    )


def _last(log: list[Event]) -> Event:
    """The newest value under each key."""
    found: Event = {}
    for event in log:
        found |= {name: value for name, value in event.items() if value is not None}
    return found


def _progress(checkpoint: Path) -> dict[str, Any]:
    """Where a checkpoint stands; nothing of one that is damaged."""
    with contextlib.suppress(UmaError):
        progress = read_state(checkpoint).progress
        return {name: getattr(progress, name) for name in progress.__slots__}
    return {}


def _about(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    kinds = {"command": str, "pid": int, "iters": int}
    whole = isinstance(found, dict) and all(
        isinstance(found[name], kind) for name, kind in kinds.items() if name in found
    )
    return found if whole else {}


def _command(about: dict[str, Any], *, begun: bool) -> str | None:
    """The command that goes on: without a checkpoint from the beginning, which is no resuming."""
    command: str | None = about.get("command")
    if command is None or begun:
        return command
    with contextlib.suppress(ValueError):  # a quotation that is not closed
        return shlex.join(word for word in shlex.split(command) if word != "--resume")
    return None


def remember(folder: Path, known: Path) -> None:
    """Note in the folder ``known`` that there is a run in ``folder``, to be found from anywhere."""
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    with contextlib.suppress(OSError, UmaError):
        known.mkdir(parents=True, exist_ok=True)
        write_json(known / f"{name}.json", {"folder": str(folder.absolute())})


def known_runs(known: Path) -> list[Path]:
    """The folders of runs that still exist, the one that was written to last first."""
    found = []
    for path in known.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(json.loads(path.read_text(encoding="utf-8"))["folder"])
            found.append(((folder / "log.jsonl").stat().st_mtime, folder))
    return [folder for _, folder in sorted(found, reverse=True)]
