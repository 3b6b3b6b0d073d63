"""How long a fine-tuning run takes, as an interval."""

from dataclasses import replace

from uma.errors import UmaError
from uma.frozen import dataclass
from uma.memory.adapters import adapters
from uma.memory.reads import WeightReads
from uma.plan.fine_tuning import FineTuningPlan, positions
from uma.speed import NotKnown, Rate, processors_of, training_tps
from uma.speed.stored import even_reads
from uma.speed.training import passes

PRODUCTS_LOW, PRODUCTS_HIGH = 0.25, 1.0
"""Of the rate of one large product, what a whole step of training reaches on a CPU."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of a run, and of one iteration, at least and at most; ``source`` says from what."""

    low_s: float
    high_s: float
    iters: int
    source: str

    @property
    def s_per_iter(self) -> tuple[float, float]:
        return self.low_s / self.iters, self.high_s / self.iters


def duration(
    plan: FineTuningPlan,
    *,
    iters: int,
    validations: int,
    val_batches: int,
    flops_per_s: float | None = None,
) -> Duration | NotKnown:
    """How long ``iters`` batches and their validations take, loading left out.

    ``flops_per_s`` is the rate of a large product of matrices as this processor showed it just
    now; without it the chip's listed figures are used, where MLX was measured on such chips.
    """
    rows = plan.case.rows
    batches = -(-len(rows.train) // rows.batch_size)
    trained = positions(plan.shapes) / batches * iters
    each = -(-len(rows.validation) // rows.batch_size)
    of_each = each if val_batches < 0 else min(each, val_batches)
    share = of_each / each if each else 0.0
    checked = positions(plan.case.validation_shapes(plan.cut)) * share * validations
    found = _measured(plan, flops_per_s) if flops_per_s else _listed(plan)
    if isinstance(found, NotKnown):
        return found
    # A forward pass is a third of a step that also goes back, and a quarter of one that
    # goes forward twice.
    work = trained + checked / 3
    return Duration(work / found.high, work / found.low, iters, found.source)


def _listed(plan: FineTuningPlan) -> Rate | NotKnown:
    case = plan.case
    rows, length = plan.worst
    workload = replace(case.workload, batch_size=rows, max_seq_length=length, grad_checkpoint=1)
    trained = 0.0
    if workload.method != "full":
        trained = float(sum(a.size for a in adapters(case.architecture, workload)))
    try:
        return training_tps(
            case.architecture,
            _reads(plan),
            processors_of(case.machine),
            "mlx",
            workload,
            trained_elements=trained,
        )
    except UmaError as error:
        return NotKnown(str(error))


def _measured(plan: FineTuningPlan, flops_per_s: float) -> Rate:
    case = plan.case
    reads = _reads(plan)
    workload = replace(case.workload, grad_checkpoint=1)
    often = passes(workload, len(case.architecture.layers))
    best = flops_per_s / (2 * reads.active_elements * often)
    return Rate(
        best * PRODUCTS_LOW,
        best,
        best * PRODUCTS_HIGH,
        "bound",
        f"a product of matrices timed now at {flops_per_s / 1e9:,.0f} GFLOP/s",
    )


def _reads(plan: FineTuningPlan) -> WeightReads:
    return even_reads(plan.case.architecture, plan.case.form.weights.size_bytes)
