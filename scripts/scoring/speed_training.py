"""Speed of training: what a row trained and how fast, and what ``uma.speed`` predicts for it.

What a row trained is read by ``training.py``, as for its memory. Rates count padded tokens, as
ours do. ``mlx_lm.lora`` counts targets alone, so that its rows are not taken.
"""

import re
from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture
from uma.errors import UmaError
from uma.memory.reads import WeightReads
from uma.speed import NotKnown, Processor, Rate, even_reads, training_tps
from uma.workload import TrainingWorkload

from . import training
from .rows import INCOMPLETE, MACHINE, METRIC, Row, Skipped, decimal
from .speed_devices import device_named
from .summary import source_of

# Rates of one device, by the words of the row; others are of all devices.
OF_ONE = re.compile(r"per[- ]gpu", re.IGNORECASE)
SPLIT_ROWS = re.compile(
    r"\bCP ?[2-9]"
)  # context parallelism, whose rows are counted by their parts
NOT_STATED = re.compile(r"not stated\)|as printed|median tokens|step 1 log", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A row as ``uma.speed`` needs it."""

    row_id: str
    source: str
    engine: str
    model: str
    chip: str
    measured_tps: float
    architecture: Architecture
    reads: WeightReads
    processors: tuple[Processor, ...]
    workload: TrainingWorkload
    trained_elements: float
    quantity: str = "training"
    host: None = None
    batch_size: int = 1
    split: str = "layer"

    @property
    def tokens(self) -> float:
        return self.workload.tokens * self.workload.sharding.data


def predict(case: TrainingCase) -> Rate | NotKnown:
    return training_tps(
        case.architecture,
        case.reads,
        case.processors,
        case.engine,
        case.workload,
        trained_elements=case.trained_elements,
    )


def computing(case: TrainingCase) -> TrainingCase:
    """The same without what devices exchange, and without the optimizer's step."""
    endless = tuple(replace(one, link_bytes_per_s=10**18) for one in case.processors)
    return replace(case, processors=endless, trained_elements=0.0)


def group_of(case: TrainingCase) -> str:
    if case.reads.experts:
        return "training, torch, mixture of experts"
    several = case.workload.sharding.devices > 1
    return f"training, torch, {'several devices' if several else 'one device'}"


def case_of(row: Row) -> TrainingCase:
    """The case of a row that tells its tokens per second.

    Raises:
        Skipped: If its program, model, device or configuration is not told or not claimed.
    """
    if NOT_STATED.search(row["time_note"]) and row["n_gpus"] != "1":
        raise Skipped(INCOMPLETE)
    if SPLIT_ROWS.search(row["parallelism"]):
        raise Skipped(METRIC)
    try:
        found = training.case_of(row)
    except UmaError as error:
        raise Skipped(INCOMPLETE) from error
    spread = found.workload.sharding
    if spread.offload_optimizer or spread.offload_parameters:
        raise Skipped(MACHINE)  # how fast the host is is not told
    of_one = OF_ONE.search(row["time_note"]) or spread.data == 1
    return _case(
        row,
        "torch",
        found.architecture,
        found.workload,
        decimal(row["tokens_per_s"]) * (spread.devices if of_one else 1),
    )


def _case(
    row: Row, engine: str, architecture: Architecture, workload: TrainingWorkload, tps: float
) -> TrainingCase:
    if not tps:
        raise Skipped(INCOMPLETE)
    device = _processor(row["device"])
    if device.bandwidth_bytes_per_s is None or device.training_flops_per_s is None:
        raise Skipped(MACHINE)
    return TrainingCase(
        row_id=row["record_id"],
        source=source_of(row["source"]),
        engine=engine,
        model=row["model"],
        chip=device.name,
        measured_tps=tps,
        architecture=architecture,
        reads=even_reads(architecture, architecture.num_parameters),
        processors=(device,) * workload.sharding.devices,
        workload=workload,
        trained_elements=_trained(architecture, workload),
    )


def _processor(told: str) -> Processor:
    """The device of a row, whose text may count them and say their memory.

    Raises:
        Skipped: If it is none of the catalog.
    """
    plain = re.sub(r"^\d+ ?x |\(.*?\)|HBM2e|Mac mini|MacBook \w+", "", told).strip()
    memory = re.search(r"(\d+) ?GB", plain)
    name = re.sub(r"\s*\d+ ?GB.*", "", plain).replace("Apple  ", "Apple ")
    if not name:
        raise Skipped(MACHINE)
    return device_named(name, "", memory[1] if memory else "", None)


def _trained(architecture: Architecture, workload: TrainingWorkload) -> float:
    """Numbers that are trained: all, or two thin matrices beside each target."""
    if workload.method == "full":
        return architecture.num_parameters
    layers = architecture.layers[-(workload.num_layers or len(architecture.layers)) :]
    return sum(
        workload.rank * sum(parameter.shape[-2:])
        for layer in layers
        for parameter in layer.parameters
        if parameter.kind == "matrix"
        and (not workload.targets or parameter.name.endswith(workload.targets))
    )
