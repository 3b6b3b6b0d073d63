"""How long a fine-tuning run takes, as an interval."""

from contextlib import suppress
from dataclasses import replace

from uma.errors import UmaError, UsageError
from uma.frozen import dataclass
from uma.memory.adapters import adapters
from uma.memory.reads import WeightReads
from uma.plan.fine_tuning import FineTuningPlan, positions
from uma.speed import NotKnown, Rate, processors_of, training_tps
from uma.speed.stored import even_reads

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
    flops_per_s: tuple[float, float] | None = None,
) -> Duration | NotKnown:
    """How long ``iters`` batches and their validations take, loading left out.

    ``flops_per_s`` is the rate of a large product of matrices as this processor showed it just
    now, usual and best; without it the chip's listed figures are used, where MLX was measured on
    such chips.
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
    forward, whole = _products(plan)
    work = trained + checked * forward / whole
    return Duration(work / found.high, work / found.low, iters, found.source)


def _listed(plan: FineTuningPlan) -> Rate | NotKnown:
    case = plan.case
    rows, length = plan.worst
    workload = replace(case.workload, batch_size=rows, max_seq_length=length, grad_checkpoint=1)
    trained = 0.0 if workload.method == "full" else _adapter_elements(plan)
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


def _measured(plan: FineTuningPlan, flops_per_s: tuple[float, float]) -> Rate:
    _, whole = _products(plan)
    usual, best = flops_per_s
    shown = " to ".join(f"{rate / 1e9:,.0f}" for rate in flops_per_s)
    return Rate(
        PRODUCTS_LOW * usual / (2 * whole),
        usual / (2 * whole),
        PRODUCTS_HIGH * best / (2 * whole),
        "bound",
        f"a product of matrices timed now at {shown} GFLOP/s",
    )


def _products(plan: FineTuningPlan) -> tuple[float, float]:
    """Numbers that a position is multiplied with: forward alone, and in a step of our trainer.

    Trained layers run once more before their way back, in which their input's gradient costs as
    much, and that of each trained number. Only positions with a target pass the head, which has
    one way back. Attention's scores are left out.
    """
    case = plan.case
    reads, layers = _reads(plan), len(case.architecture.layers)
    share = min(1.0, (case.workload.num_layers or layers) / layers)
    targets = sum(found for _, found in case.rows.train) / positions(plan.shapes)
    body, head = reads.active_elements - reads.head_elements, targets * reads.head_elements
    forward = body + head
    if case.workload.method == "full":
        return forward, forward + share * 3 * body + head
    own = _adapter_elements(plan)
    return forward + own, forward + share * 2 * body + head + 4 * own


def _adapter_elements(plan: FineTuningPlan) -> float:
    with suppress(UsageError):  # the layers have none: it is on the head or the embedding alone
        return float(sum(a.size for a in adapters(plan.case.architecture, plan.case.workload)))
    return 0.0


def _reads(plan: FineTuningPlan) -> WeightReads:
    return even_reads(plan.case.architecture, plan.case.form.weights.size_bytes)
