"""The options of ``uma lora train``, and the command line that says the same."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uma.dataset.examples import Overlong
    from uma.workload import Method


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``uma lora train``, under their own names; sizes as they were written."""

    model: str | None
    data: Path
    adapter_path: Path
    fine_tune_type: "Method"
    num_layers: int
    rank: int
    scale: float
    dropout: float
    keys: list[str] | None
    iters: int
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


ONLY_HERE = {"dry_run", "detach", "json", "progress", "wait", "yes"}
"""Options that say how this command runs, and nothing of the training."""


def arguments(asked: Asked, defaults: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """The arguments of ``uma`` that ask for the same from any folder.

    Options that have their ``defaults`` are left out. Without defaults all are given, so that
    no variable and no ``config.toml`` speaks for them.
    """
    found = ["lora", "train"]
    if asked.model is not None:
        found.append(_absolute(asked.model))
    for field in fields(asked):
        value = getattr(asked, field.name)
        default = None if field.name == "adapter_path" else defaults.get(field.name)
        # By identity: a 0 that is asked for equals False.
        unsaid = value is None or value is False or value == default
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
