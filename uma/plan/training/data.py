"""The worst batch of a data set, as the program that trains makes it."""

from uma.dataset.lengths import Batches, Batching, Lengths, batches_of
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.plan.training.case import TrainingCase
from uma.plan.training.verdict import Needs


@dataclass(frozen=True, slots=True)
class WorstBatch:
    """The batch of a data set that needs most, and what the set is made of.

    ``max_seq_length`` is what rows are cut to. ``rows`` of ``tokens`` each, padding included, are
    the batch.
    """

    lengths: Lengths
    batches: Batches
    max_seq_length: int
    rows: int
    tokens: int
    packed: bool


def with_worst_batch(
    case: TrainingCase, lengths: Lengths, *, packed: bool = False
) -> tuple[TrainingCase, WorstBatch]:
    """``case`` at the worst batch of ``lengths``: its own length is what rows are cut to.

    Raises:
        UsageError: If the trainer does not pack.
        DataError: If it would have no batch.
    """
    workload = case.workload
    batching: Batching = "torch" if case.engine == "torch" else case.trainer
    if packed and batching == "mlx_lm":
        raise UsageError("mlx_lm.lora does not pack rows; leave --packing out, or --trainer uma")
    length = workload.max_seq_length
    made = batches_of(lengths.tokens, batching, workload.batch_size, length, packed=packed)
    needs = Needs()
    tried = [case.changed(batch_size=r, max_seq_length=t) for r, t in made.shapes]
    worst = max(tried, key=needs)
    rows, tokens = worst.workload.batch_size, worst.workload.max_seq_length
    return worst, WorstBatch(lengths, made, length, rows, tokens, packed)
