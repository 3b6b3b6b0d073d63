"""How a training run stands, as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from uma.measurement.run_status import Status
from uma.report import SCHEMA_VERSION
from uma.units import format_gib

_HOW = {
    "running": "running",
    "done": "done",
    "stopped": "stopped on request",
    "abandoned": "left, because the process that started it was gone",
    "patience": "ended: the validation loss no longer falls",
    "failed": "failed",
    "killed": "ended by the system",
    "lost": "ended without a word: the machine went off, or all its processes were killed",
}


def status_text(found: Status) -> str:
    """How a run stands, what survives of it, and how to go on."""
    return "\n".join(_status_lines(found))


def _status_lines(found: Status) -> Iterator[str]:
    of = "" if found.iters is None else f" of {found.iters:,}"
    pid = "" if found.pid is None else f" (process {found.pid})"
    yield f"{found.folder}: {_HOW[found.how]}{pid}, iteration {found.iteration:,}{of}"
    losses = []
    if found.train_loss is not None:
        losses.append(f"loss {found.train_loss:.3f}")
    if found.val_loss is not None:
        losses.append(f"validation loss {found.val_loss:.3f}")
    if found.best_val_loss is not None and found.best_iteration is not None:
        at = f"at iteration {found.best_iteration:,}" if found.best_iteration else "before training"
        losses.append(f"lowest {found.best_val_loss:.3f} {at}")
    if losses:
        yield "  " + ", ".join(losses)
    memory = []
    if found.memory_bytes is not None:
        memory.append(f"memory {format_gib(found.memory_bytes)}")
    if found.peak_memory_bytes is not None:
        memory.append(f"at most {format_gib(found.peak_memory_bytes)}")
    if found.left_s is not None:
        memory.append(f"{span(found.left_s)} left")
    if found.silent_s is not None:
        memory.append(f"last line {span(found.silent_s)} ago")
    if memory:
        yield "  " + ", ".join(memory)
    if found.text:
        yield f"  {found.text}"
    if found.how != "running":
        yield f"  kept: {kept_text(found)}"
    if found.remedy:
        yield f"  do: {found.remedy}"
    if found.can_continue:
        yield f"  continue: {found.command}"


def kept_text(found: Status) -> str:
    """What survives of a run."""
    kept = []
    if found.checkpoint is not None:
        kept.append(f"the checkpoint of iteration {found.checkpoint:,}")
    if found.adapter is not None:
        kept.append(f"the adapter in {found.adapter}")
    if found.best is not None:
        kept.append(f"the best one in {found.best}")
    return ", ".join(kept) or "nothing: it had not come to a checkpoint"


def status_json(found: Status) -> dict[str, Any]:
    """The document of ``uma lora status --json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(found.folder),
        "state": found.how,
        "iteration": found.iteration,
        "iters": found.iters,
        "train_loss": found.train_loss,
        "val_loss": found.val_loss,
        "best_val_loss": found.best_val_loss,
        "best_iteration": found.best_iteration,
        "memory_bytes": found.memory_bytes,
        "peak_memory_bytes": found.peak_memory_bytes,
        "left_s": found.left_s,
        "silent_s": found.silent_s,
        "pid": found.pid,
        "text": found.text or None,
        "remedy": found.remedy or None,
        "checkpoint_iteration": found.checkpoint,
        "adapter_path": None if found.adapter is None else str(found.adapter),
        "best_adapter_path": None if found.best is None else str(found.best),
        "command": found.command if found.can_continue else None,
    }


def span(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> span(40), span(400), span(40000), span(400000)
    ('40 s', '7 min', '11.1 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
