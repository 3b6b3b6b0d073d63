"""A training estimate as text and as JSON."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from uma.catalog.listed import ListedModel
from uma.ledger import phase_totals
from uma.memory.term import MemoryTerm, Phase
from uma.plan.training.case import TrainingCase
from uma.plan.training.estimate import TrainingEstimate
from uma.plan.training.inverses import MOST
from uma.units import format_gib
from uma.workload import Sharding

if TYPE_CHECKING:
    from uma.plan.training.data import WorstBatch
    from uma.plan.training.measures import Measure


def training_text(
    found: TrainingEstimate,
    model_name: str,
    largest_model: ListedModel | None = None,
    traced: tuple[MemoryTerm, ...] | None = None,
) -> str:
    """The verdict, the terms, the phases, what fits, what would help; a traced step's phases."""
    lines = [*_lines(found, model_name, largest_model)]
    if traced is not None:
        totals = _phases(traced)
        phases = ", ".join(f"{name} {format_gib(size)} ({size:,} B)" for name, size in totals)
        lines.append(f"traced from mlx-lm's own code, nothing evaluated: {phases}")
    return "\n".join(lines)


def _lines(
    found: TrainingEstimate, model_name: str, largest_model: ListedModel | None
) -> Iterator[str]:
    workload, ledger = found.case.workload, found.ledger
    yield f"{model_name}: {_method(found)} under {_program(found)} on {found.case.machine.name}"
    yield (
        f"{_counted(workload.batch_size, 'row')} of {_counted(workload.max_seq_length, 'token')}, "
        f"{workload.optimizer}, "
        f"{_checkpointing(found)}"
    )
    if choices := ", ".join(_choices(found.case)):
        yield f"with {choices}"
    yield ""
    yield f"{ledger.verdict}: {'; '.join(_headline(found))}"
    yield f"the {found.phase} phase needs most"
    yield ""
    for term in ledger.terms:
        if term.size_bytes and term.phase in ("always", found.phase):
            size = format_gib(term.size_bytes)
            yield f"  {term.name:17} {size:>11}  {term.basis:6}  {term.source}"
    totals = _phases(ledger.terms)
    yield ""
    yield "phases: " + ", ".join(f"{name} {format_gib(size)}" for name, size in totals)
    fits = [
        f"{name} {value:,}{' or more' if value >= MOST[name] else ''}"
        for name, value in found.largest.items()
        if value
    ]
    fitting = ", ".join(fits) or "nothing"
    if largest_model is not None:
        fitting += f", model {largest_model.name}"
    yield f"largest that fits, each alone: {fitting}"
    yield from _places(found)
    if found.data is not None:
        yield from _data(found.data)
    if found.measures:
        enough = found.measures_suffice
        yield "what makes it fit:" if enough else "what helps, but is not enough:"
    for measure in found.measures:
        yield f"  {measure.name}: saves {_saved(measure)}; time: {measure.cost}"
        yield f"    {' '.join(measure.options)}"
    yield from (f"note: {note}" for note in found.notes)


def _phases(terms: Iterable[MemoryTerm]) -> list[tuple[Phase, int]]:
    """What each phase holds, in the order of a step."""
    totals = phase_totals(terms)
    return [(phase, totals[phase]) for phase in get_args(Phase) if phase in totals]


def _choices(case: TrainingCase) -> Iterator[str]:
    """What is asked for otherwise than the program does by itself."""
    workload, stack = case.workload, case.stack
    if workload.dtype == "float16":
        yield "float16"
    if stack.precision != "16-bit":
        yield f"{stack.precision} precision"
    if workload.targets:
        yield f"adapters on {' and '.join(workload.targets)}"
    if workload.grad_accumulation_steps > 1:
        yield f"{workload.grad_accumulation_steps} batches for an update"
    if workload.loss != "naive":
        yield _LOSSES[workload.loss]
    if workload.attention is not None:
        yield f"{workload.attention} attention"
    if stack.lora_dropout:
        yield "dropout before adapters"
    if stack.fused_kernels:
        yield f"{stack.fused_kernels.capitalize()} kernels"
    if stack.prepare_kbit:
        yield "a base prepared by PEFT"
    if stack.optimizer_in_backward:
        yield "the optimizer in the backward pass"
    if case.engine == "torch" and workload.mem_kind != "device":
        yield f"memory {workload.mem_kind} by torch"


_LOSSES = {"fused": "the loss in one kernel", "sliced": "the loss in slices"}


def _headline(found: TrainingEstimate) -> Iterator[str]:
    """What is needed of what there is; first the host, where that is what lacks."""
    needed, budget = found.ledger.predicted_peak_bytes, found.ledger.budget_bytes or 0
    device = _of(needed, budget)
    if found.host.excess_bytes:
        yield f"the host {_of(found.host.held_bytes, found.host.room_bytes or 0)}"
        device = f"the device {device}"
    yield device


def _saved(measure: "Measure") -> str:
    saved = format_gib(measure.saves_bytes)
    if measure.host_saves_bytes <= 0:
        return saved
    on_host = f"{format_gib(measure.host_saves_bytes)} on the host"
    return f"{saved}, {on_host}" if measure.saves_bytes else on_host


def _of(needed: int, room: int) -> str:
    rest = f"{format_gib(room - needed)} left"
    if needed > room:
        rest = f"{format_gib(needed - room)} too much"
    return f"{format_gib(needed)} of {format_gib(room)}, {rest}"


def _counted(count: int, noun: str) -> str:
    """
    >>> _counted(1, "row"), _counted(1024, "token")
    ('1 row', '1,024 tokens')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _program(found: TrainingEstimate) -> str:
    if found.case.engine == "torch":
        name = found.case.stack.name
        return "torch" if name == "trainer" else f"torch ({name})"
    if found.case.workload.sharding.zero_stage:
        return "mlx, fully_shard"
    return "mlx_lm.lora" if found.case.trainer == "mlx_lm" else "uma lora train"


def _places(found: TrainingEstimate) -> Iterator[str]:
    """Where state lies, for one device and for all, and what is sent."""
    spread, places = found.case.workload.sharding, found.places
    if spread.devices > 1 or places.host_bytes or places.disk_bytes:
        whose = f"one of {spread.devices} devices" if spread.devices > 1 else "the device"
        yield f"state of {whose} ({_spread(spread)}): " + ", ".join(
            f"{format_gib(size)} {where}"
            for where, size in (
                ("on it", places.device_bytes),
                ("on the host", places.host_bytes),
                ("on the disk", places.disk_bytes),
            )
            if size
        )
    if (found.host_bytes or found.disk_bytes) and spread.devices > 1:
        host, disk = format_gib(found.host_bytes), format_gib(found.disk_bytes)
        yield f"of all devices: {host} on the host, {disk} on the disk"
    if places.sent_bytes:
        sent = (f"{name} {format_gib(size)}" for name, size in places.sent_bytes.items())
        yield f"each device sends for an update: {', '.join(sent)}"


def _spread(spread: Sharding) -> str:
    """How the devices share the work.

    >>> _spread(Sharding(data=16, zero_stage=3, shard_group=8, fsdp=True))
    'data 16, FSDP in groups of 8'
    """
    degrees = ("data", "tensor", "pipeline", "sequence")
    words = [f"{name} {getattr(spread, name)}" for name in degrees if getattr(spread, name) > 1]
    if spread.fsdp:
        words.append(f"FSDP in groups of {spread.shard_group}" if spread.shard_group else "FSDP")
    elif spread.zero_stage:
        words.append(f"ZeRO {spread.zero_stage}")
    return ", ".join(words) or "no sharding"


def _data(data: "WorstBatch") -> Iterator[str]:
    lengths, batches = data.lengths, data.batches
    cut, lost = lengths.cut(data.max_seq_length)
    yield (
        f"data: {_counted(len(lengths.tokens), 'row')}, {lengths.total:,} tokens; half have up to "
        f"{lengths.at(0.5):,}, 95 % up to {lengths.at(0.95):,}, the longest {lengths.longest:,} "
        f"(line {lengths.longest_line})"
    )
    packed = "packed " if data.packed else ""
    yield (
        f"  {batches.count:,} {packed}batches a pass, {batches.padding_share:.0%} padding; the "
        f"worst: {data.rows} x {data.tokens:,} tokens, which is what is estimated"
    )
    if cut:
        share, are = lost / lengths.total, "is" if cut == 1 else "are"
        yield (
            f"  {_counted(cut, 'row')} {are} longer than {data.max_seq_length:,} tokens and {are} "
            f"cut: {lost:,} "
            f"tokens lost ({share:.1%}); that is no lack of memory"
        )
    if lengths.problems:
        yield f"  {_counted(lengths.problems, 'row')} cannot be used: uma lora check lists them"


def _method(found: TrainingEstimate) -> str:
    workload = found.case.workload
    rank = "" if workload.method == "full" else f" of rank {workload.rank}"
    base = f" on {workload.quantized}" if workload.quantized else ""
    return f"{workload.method}{rank}{base}, {found.trainable_parameters:,} trained parameters"


def _checkpointing(found: TrainingEstimate) -> str:
    every = found.case.workload.grad_checkpoint
    if found.case.trainer == "uma":
        return "every layer checkpointed, attention and loss in slices"
    if not every:
        return "no checkpointing"
    return "every layer checkpointed" if every == 1 else f"a checkpoint every {every} layers"


def training_json(
    found: TrainingEstimate,
    model: dict[str, Any],
    largest_model: ListedModel | None = None,
    traced: tuple[MemoryTerm, ...] | None = None,
) -> dict[str, Any]:
    """The document of ``uma estimate --train --json``."""
    case, ledger = found.case, found.ledger
    needed = ledger.predicted_peak_bytes
    return {
        "schema_version": 1,
        "model": model,
        "machine": {"name": case.machine.name, "kind": case.machine.kind},
        "engine": case.engine,
        "trainer": case.trainer if case.engine == "mlx" else None,
        "stack": case.stack.name if case.engine == "torch" else None,
        "workload": _workload_json(case),
        "trainable_parameters": found.trainable_parameters,
        "terms": [_term_json(term) for term in ledger.terms],
        "total_bytes": needed,
        "binding_phase": found.phase,
        "phases": {f"{name}_bytes": size for name, size in _phases(ledger.terms)},
        "budget_bytes": ledger.budget_bytes,
        "limit_bytes": ledger.limit_bytes,
        "sharding": _sharding_json(found),
        "traced": traced and [_term_json(term) for term in traced],
        "headroom_bytes": (ledger.budget_bytes or 0) - needed,
        "verdict": ledger.verdict,
        "largest": {**found.largest, "model": largest_model and largest_model.name},
        "largest_or_more": [n for n, value in found.largest.items() if value and value >= MOST[n]],
        "measures_suffice": found.measures_suffice,
        "measures": [_measure_json(measure) for measure in found.measures],
        "data": None if found.data is None else _data_json(found.data),
        "notes": list(found.notes),
    }


def _workload_json(case: TrainingCase) -> dict[str, Any]:
    workload, stack = case.workload, case.stack
    return {
        "method": workload.method,
        "rank": None if workload.method == "full" else workload.rank,
        "targets": list(workload.targets),
        "num_layers": workload.num_layers,
        "batch_size": workload.batch_size,
        "max_seq_length": workload.max_seq_length,
        "grad_checkpoint": workload.grad_checkpoint,
        "grad_accumulation_steps": workload.grad_accumulation_steps,
        "optimizer": workload.optimizer,
        "dtype": workload.dtype,
        "quantized": workload.quantized or None,
        "loss": workload.loss,
        "attention": workload.attention,
        "mem_kind": workload.mem_kind,
        "precision": stack.precision,
        "prepare_kbit": stack.prepare_kbit,
        "lora_dropout": stack.lora_dropout,
        "optimizer_in_backward": stack.optimizer_in_backward,
        "fused_kernels": stack.fused_kernels,
    }


def _sharding_json(found: TrainingEstimate) -> dict[str, Any]:
    """State by where it lies, for one device and for all; what one device sends, by cause."""
    spread, places = found.case.workload.sharding, found.places
    return {
        "devices": spread.devices,
        "data": spread.data,
        "tensor": spread.tensor,
        "pipeline": spread.pipeline,
        "sequence": spread.sequence,
        "zero_stage": spread.zero_stage,
        "fsdp": spread.fsdp,
        "shard_group": spread.shard_group or None,
        "offload_optimizer": spread.offload_optimizer or None,
        "offload_parameters": spread.offload_parameters or None,
        "device_state_bytes": places.device_bytes,
        "device_host_bytes": places.host_bytes,
        "device_disk_bytes": places.disk_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.disk_bytes,
        "host_room_bytes": found.host.room_bytes,
        "host_excess_bytes": found.host.excess_bytes,
        "sent_bytes": places.sent_bytes,
    }


def _data_json(data: "WorstBatch") -> dict[str, Any]:
    lengths, batches = data.lengths, data.batches
    cut, lost = lengths.cut(data.max_seq_length)
    return {
        "rows": len(lengths.tokens),
        "unusable_rows": lengths.problems,
        "tokens": lengths.total,
        "median_tokens": lengths.at(0.5),
        "p95_tokens": lengths.at(0.95),
        "longest_tokens": lengths.longest,
        "longest_line": lengths.longest_line,
        "max_seq_length": data.max_seq_length,
        "truncated_rows": cut,
        "truncated_tokens": lost,
        "packed": data.packed,
        "batches": batches.count,
        "padding_share": batches.padding_share,
        "worst_batch_rows": data.rows,
        "worst_batch_tokens": data.tokens,
    }


def _term_json(term: MemoryTerm) -> dict[str, Any]:
    return {
        "name": term.name,
        "size_bytes": term.size_bytes,
        "basis": term.basis,
        "source": term.source,
        "phase": term.phase,
    }


def _measure_json(measure: "Measure") -> dict[str, Any]:
    return {
        "name": measure.name,
        "options": list(measure.options),
        "saves_bytes": measure.saves_bytes,
        "host_saves_bytes": measure.host_saves_bytes,
        "cost": measure.cost,
    }
