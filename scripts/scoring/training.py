"""Rows of measured training memory, and what is predicted for them."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.engines import mlx_training
from uma.engines.cuda import CUDA_CONTEXT
from uma.engines.torch_training import training_terms
from uma.errors import UsageError
from uma.ledger import peak
from uma.memory.term import MemoryTerm
from uma.units import GB, GIB
from uma.workload import MemoryKind

from .rows import (
    ENGINE,
    INCOMPLETE,
    MACHINE,
    METRIC,
    MOST_BYTES,
    UNTRUSTWORTHY,
    Row,
    Skipped,
    decimal,
    number,
)
from .summary import Group
from .training_models import Case, architecture_named
from .training_native import litgpt, mlx, torchtitan, torchtune
from .training_recipes import shape_of
from .training_trainer import axolotl, fitcheck, fms, fsdp_qlora, peft, trainer
from .training_words import DOUBTS, method_of

NOT_CLAIMED = re.compile(r"megatron|mlx-vlm|mlx-tune|unsloth mlx|kquant|^torchao", re.IGNORECASE)
READERS: tuple[tuple[str, Callable[[Row, Architecture], Case]], ...] = (
    (r"^mlx_lm", mlx),
    (r"fms-acceleration", fms),
    (r"fitcheck", fitcheck),
    (r"fsdp_qlora", fsdp_qlora),
    (r"axolotl", axolotl),
    (r"lit-?gpt", litgpt),
    (r"^transformers\+peft$", peft),
    (r"torchtune", torchtune),
    (r"torchtitan", torchtitan),
    (r"qwen|swift|llama-?factory|transformers|trl|peft|longlora|xtuner|unsloth", trainer),
)
NEARLY = 0.1  # a cap on lengths is enough where it moves the peak by no more
SHORT = 64  # tokens
COMMAND = "with the command line's settings"


def score(rows: Iterable[Row]) -> dict[str, Group]:
    """Training peaks against the band that each row was measured in, and runs out of memory.

    Rows that are ready to calibrate with are a group of their own. Each is also predicted as
    options of ``uma estimate --train`` say it, without the facts of its version (``Case.facts``). A
    run that was out of memory counts as predicted if one device would need more than it has.
    """
    ready = Group("training", "torch", "calibration ready")
    other = Group("training", "torch", "other")
    oom = Group("fit", "torch", "out of memory")
    for row in rows:
        out = row["outcome"] != "ok"
        group = oom if out else ready if row["calibration_ready"] == "yes" else other
        if out or (row["is_training_peak"] == "yes" and row["peak_bytes_lo"]):
            _score(row, group, out)
    return {"training ready": ready, "training other": other, "training out of memory": oom}


def _score(row: Row, group: Group, out_of_memory: bool) -> None:
    name = row["record_id"]
    try:
        if not out_of_memory:
            case = case_of(row)
            group.errors[name] = error_of(row, case)
            with suppress(Skipped, UsageError):  # of a cap on lengths too much depends then
                group.parts.setdefault(COMMAND, {})[name] = error_of(row, case.as_commanded)
        else:
            found = _exceeds(row)
            group.confusion["true_exceeds" if found else "false_fits"] += 1
    except Skipped as skipped:
        group.skipped[name] = str(skipped)
    except UsageError:
        group.skipped[name] = INCOMPLETE


def error_of(row: Row, case: Case) -> float:
    """How far outside of the measured band the prediction lies, as a fraction of its near end."""
    predicted = predicted_bytes(row, case)
    low, high = decimal(row["peak_bytes_lo"]), decimal(row["peak_bytes_hi"])
    if not 1 <= low <= high <= MOST_BYTES:
        raise Skipped(METRIC)
    if predicted > high:
        return predicted / high - 1
    return min(0.0, predicted / low - 1)


def _exceeds(row: Row) -> bool:
    if "INFERRED" in row["notes"]:
        raise Skipped(UNTRUSTWORTHY)
    memory = number(row["device_mem_gb"])
    if not memory:
        raise Skipped(MACHINE)
    shown = {**row, "mem_kind": "device_used"}
    return predicted_bytes(shown, case_of(shown)) > memory * GB


def case_of(row: Row) -> Case:
    """The workload of a row.

    Raises:
        Skipped: With one of the reasons of the contract.
    """
    read = _reader(row)
    method_of(row)
    if row["trust"] == "D" or DOUBTS.search(row["notes"]):
        raise Skipped(UNTRUSTWORTHY)
    case = read(row, architecture_named(row["model"]))
    shape = shape_of(row)
    return replace(
        case,
        workload=replace(case.workload, mem_kind=kind_of(row)),
        stack=replace(case.stack, variable_lengths=shape.varies),
        bound=shape.bound,
    )


def _reader(row: Row) -> Callable[[Row, Architecture], Case]:
    """How rows of the program that measured are read."""
    if not NOT_CLAIMED.search(row["framework"]):
        for pattern, reader in READERS:
            if re.search(pattern, row["framework"], re.IGNORECASE):
                return reader
    raise Skipped(ENGINE)


# What was measured, by ``mem_kind``; "unknown" is what nvidia-smi or a trainer's log would show.
KINDS: dict[str, MemoryKind] = {
    "torch_allocated": "allocated",
    "torch_active": "allocated",
    "torch_reserved": "reserved",
    "torch_reserved+context": "device",
    "device_used": "device",
    "unknown": "device",
    "mlx_peak": "allocated",
}


def kind_of(row: Row) -> MemoryKind:
    """What the measured number counts.

    Raises:
        Skipped: If it is something that the estimate does not predict.
    """
    if row["mem_kind"] not in KINDS:
        raise Skipped(METRIC)
    metric, program = row["mem_metric"], row["framework"]
    if "reserved/allocated" in metric and re.search(r"lit-?gpt", program):
        return "allocated"  # finetune/lora.py prints max_memory_allocated since August 2023
    logs_reserved = re.search("torchtune|ms-swift", program)  # where no counter is named
    if row["mem_kind"] == "unknown" and ("reserved" in metric or logs_reserved):
        return "reserved"
    return KINDS[row["mem_kind"]]


def predicted_bytes(row: Row, case: Case) -> int:
    """The predicted peak of one device, or of all where the row counts them together.

    Raises:
        Skipped: If the length is only a cap, and shorter rows would need much less.
    """
    if case.bound:
        short = replace(case.workload, max_seq_length=min(SHORT, case.workload.max_seq_length))
        whole = predicted_bytes(row, replace(case, bound=False))
        least = predicted_bytes(row, replace(case, workload=short, bound=False))
        if least < (1 - NEARLY) * whole:
            raise Skipped(INCOMPLETE)
        return whole
    if case.weights is not None:
        terms = mlx_training.training_terms(case.architecture, case.weights, case.workload)
        return peak(terms)[1]
    terms = training_terms(case.architecture, case.workload, case.settings)
    together = row["mem_scope"].startswith(("total", "process (all"))
    devices = number(row["n_gpus"]) if together else 1
    return _held_bytes(row, case, terms) * max(1, devices)


def _held_bytes(row: Row, case: Case, terms: Sequence[MemoryTerm]) -> int:
    """The peak of a device; the pool of a run that ended well had no more than there was.

    torch gives free blocks back before it is out of memory (2.4, ``CUDACachingAllocator.cpp``,
    ``release_cached_blocks``).
    """
    found = peak(terms)[1]
    card = round(decimal(row["device_mem_gb"]) * GIB)
    if row["outcome"] != "ok" or not card:
        return found
    pool = sum(t.size_bytes for t in terms if t.name == "buffer_pool")
    beside = 0 if case.workload.mem_kind == "device" else CUDA_CONTEXT
    return max(found - pool, min(found, card - beside))
