"""The fine-tuning map: each method for each chosen model, the longest rows and largest batch."""

from collections.abc import Iterator, Sequence

from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource
from uma.errors import UmaError, UsageError
from uma.frozen import dataclass
from uma.plan.capacity.facts import Speed, TrainingRow, speed
from uma.plan.capacity.map import Place
from uma.plan.estimate import Change
from uma.plan.inference import Request
from uma.plan.mlx_case import mlx_case
from uma.plan.training.estimate import TrainingCase, TrainingEstimate, training_estimate
from uma.speed.stored import even_reads
from uma.speed.training import training_tps
from uma.units import format_gib
from uma.workload import DEFAULT_NUM_LAYERS, Method, Trainer, TrainingWorkload

LENGTH = 2048
BATCH = 1


@dataclass(frozen=True, slots=True)
class Way:
    """A method as it is known, and the options that ask for it."""

    name: str
    method: Method
    bits: int
    all_layers: bool = False
    trainer: Trainer = "mlx_lm"


WAYS = (
    Way("QLoRA", "lora", 4),
    Way("QLoRA by uma lora train", "lora", 4, trainer="uma"),
    Way("DoRA on 4 bits", "dora", 4),
    Way("LoRA", "lora", 16),
    Way("full, all layers", "full", 16, all_layers=True),
)
"""Under MLX; PyTorch, on cards, has no second trainer."""


def training_rows(
    models: Sequence[tuple[ModelSource, Architecture]], place: Place
) -> Iterator[TrainingRow]:
    """A row for each model and method, with checkpointing, which trades time for memory."""
    on_torch = place.machine.kind == "discrete"
    for source, architecture in models:
        for way in WAYS:
            if on_torch and way.trainer == "uma":
                continue
            try:
                yield _row(source.name, way, _case(source, architecture, way, place), place)
            except UmaError as error:
                yield _no_row(source.name, way, place, str(error))


def _row(name: str, way: Way, case: TrainingCase, place: Place) -> TrainingRow:
    found = training_estimate(case)
    needed = found.ledger.predicted_peak_bytes
    budget = found.ledger.budget_bytes or 0
    return TrainingRow(
        model=name,
        method=way.name,
        options=_options(way, case),
        engine=case.engine,
        batch_size=BATCH,
        max_seq_length=LENGTH,
        total_bytes=needed,
        headroom_bytes=budget - needed,
        verdict=found.ledger.verdict,
        largest_seq_length=found.largest["max_seq_length"],
        largest_batch_size=found.largest["batch_size"],
        trainable_parameters=found.trainable_parameters,
        train=_speed(case, found, place),
        measures=tuple(f"{m.name}: {format_gib(m.saves_bytes)} less" for m in found.measures),
    )


def _no_row(name: str, way: Way, place: Place, reason: str) -> TrainingRow:
    return TrainingRow(
        model=name,
        method=way.name,
        options="",
        engine="torch" if place.machine.kind == "discrete" else "mlx",
        batch_size=BATCH,
        max_seq_length=LENGTH,
        total_bytes=None,
        headroom_bytes=None,
        verdict="unknown",
        largest_seq_length=None,
        largest_batch_size=None,
        trainable_parameters=None,
        train=Speed(reason=reason),
        reason=reason,
    )


def _case(source: ModelSource, architecture: Architecture, way: Way, place: Place) -> TrainingCase:
    """
    Raises:
        UsageError: If the base cannot be had in those bits, or cannot be trained so.
    """
    machine, on_torch = place.machine, place.machine.kind == "discrete"
    layers = None if way.all_layers else min(DEFAULT_NUM_LAYERS, len(architecture.layers))
    quantized = "" if way.bits == 16 else "nf4" if on_torch else f"{way.bits} bits"
    workload = TrainingWorkload(
        method=way.method,
        num_layers=None if on_torch else layers,
        batch_size=BATCH,
        max_seq_length=LENGTH,
        grad_checkpoint=1,
        quantized=quantized,
        mem_kind="device" if on_torch else "allocated",
    )
    if on_torch:
        return TrainingCase(architecture, machine, place.budget, "torch", workload)
    first = mlx_case(source, machine, Request(), architecture=architecture)
    base = first if first.bits == way.bits else first.changed(Change(bits=way.bits))
    if base is None:
        raise UsageError(f"its weights are stored in {first.bits} bits")
    weights = base.cases[-1].form.weights
    return TrainingCase(
        architecture, machine, place.budget, "mlx", workload, weights, trainer=way.trainer
    )


def _options(way: Way, case: TrainingCase) -> str:
    """The options of ``uma estimate`` for the same."""
    words = [f"--train {way.method}", f"--batch-size {BATCH}", f"--max-seq-length {LENGTH}"]
    words.append("--grad-checkpoint")
    words += ["--trainer uma"] if way.trainer == "uma" else []
    words.append("--quant nf4" if case.workload.quantized == "nf4" else f"--bits {way.bits}")
    if way.all_layers and case.engine == "mlx":
        words.append("--num-layers -1")
    return " ".join(words)


def _speed(case: TrainingCase, found: TrainingEstimate, place: Place) -> Speed:
    if found.ledger.verdict == "exceeds":
        return Speed(reason="it does not fit")
    size = sum(t.size_bytes for t in found.ledger.terms if t.name == "weights")
    return speed(
        training_tps(
            case.architecture,
            even_reads(case.architecture, size),
            place.processors,
            case.engine,
            case.workload,
            trained_elements=found.trainable_parameters,
        )
    )
