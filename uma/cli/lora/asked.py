"""The options of ``uma lora train``: handed to a child, or written as a command line."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uma.dataset.examples import Overlong
    from uma.workload import Method


INTERRUPTED = 130
"""The exit code of a run that was asked to save and leave."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``uma lora train``, under their own names; sizes as they were written.

    Of ``iters`` and ``epochs`` one is ``None``. ``num_layers`` is, until the model is known, where
    nobody said it.
    """

    model: str | None
    data: Path
    adapter_path: Path
    fine_tune_type: "Method"
    num_layers: int | None
    rank: int
    scale: float
    dropout: float
    keys: list[str] | None
    iters: int | None
    epochs: int | None
    batch_size: int
    grad_accumulation_steps: int
    max_seq_length: int
    overlong: "Overlong"
    mask_prompt: bool
    packing: bool
    optimizer: str
    learning_rate: float
    warmup: int
    cosine: bool
    lr_schedule: str | None
    optimizer_config: str | None
    max_grad_norm: float | None
    seed: int
    steps_per_report: int
    steps_per_eval: int
    val_batches: int
    patience: int | None
    save_every: int
    keep: int
    resume: bool
    auto_resume: bool
    budget: str | None
    reserve: str | None
    micro_batch: int | None
    no_wire: bool
    dequantize: str
    force: bool
    dry_run: bool
    detach: bool
    allow_sleep: bool
    report_to: str | None
    project_name: str | None
    progress: str
    json: bool
    yes: bool
    no_record: bool
    wait: bool
    allow_concurrent: bool

    @property
    def quiet(self) -> bool:
        return self.json or self.progress == "json"


ONLY_HERE = {"dry_run", "json", "progress", "wait", "yes"}
"""Options that say how this command runs, and nothing of the training. A run that was detached
goes on detached."""


HANDED = "UMA_TRAINING_ASKED"
"""Variable by which a child is given exactly these options, whatever its settings say."""

_ALWAYS = ("adapter_path", "iters")


def handed(asked: Asked) -> str:
    """The options as JSON, good in any folder."""
    texts = {"data": str(asked.data.absolute()), "adapter_path": str(asked.adapter_path.absolute())}
    return json.dumps(asdict(asked) | texts)


def taken(text: str) -> Asked:
    """The options that were handed over."""
    found = json.loads(text)
    paths = {name: Path(found[name]) for name in ("data", "adapter_path")}
    return Asked(**found | paths)


def arguments(asked: Asked, defaults: Mapping[str, Any]) -> list[str]:
    """The arguments of ``uma`` that ask for the same from any folder.

    Options that have their ``defaults`` are left out, unless a variable sets them otherwise.
    """
    found = ["lora", "train"]
    if asked.model is not None:
        found.append(_absolute(asked.model))
    for field in fields(asked):
        value = getattr(asked, field.name)
        said = field.name in _ALWAYS or f"UMA_{field.name.upper()}" in os.environ
        # By identity: a 0 that is asked for equals False.
        unsaid = value is None or value is False or (value == defaults[field.name] and not said)
        if field.name != "model" and not unsaid:
            found += _option(field.name, value)
    return found


def _option(name: str, value: Any) -> Iterator[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        yield flag
        return
    for one in value if isinstance(value, list) else [value]:
        yield flag
        yield str(one.absolute()) if isinstance(one, Path) else str(one)


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if Path(model).exists() else model


def written(arguments: list[str]) -> str:
    """Arguments as a line for a shell."""
    return shlex.join(["uma", *arguments])
