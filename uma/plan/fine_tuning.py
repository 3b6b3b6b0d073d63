"""A fine-tuning run before its first step: its worst batch, what that needs, and what to lower."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.dataset.passes import Shape, shapes
from uma.engines.mlx_own_step import (
    ATTENTION_SLICE_BYTES,
    LOSS_SLICE_BYTES,
    own_training_terms,
)
from uma.errors import UnsupportedModel
from uma.frozen import dataclass
from uma.ledger import Ledger, Verdict, peak
from uma.machine import Budget, Machine, verdict
from uma.memory.term import MemoryTerm
from uma.plan.inference import Form
from uma.units import MIB, format_gib
from uma.workload import TrainingWorkload

SMALLER_SLICES = ((16 * MIB, 8 * MIB), (4 * MIB, 2 * MIB))
"""Of loss and attention, tried after the smallest micro-batch: they take more time."""


Row = tuple[int, int]
"""Inputs of a row of a batch, and how many of them have something to predict."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The data as batches see it."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    batch_size: int

    def shapes(self, pass_tokens: int | None) -> Counter[Shape]:
        """Every shape of a training epoch, and how often it passes."""
        return shapes([inputs for inputs, _ in self.train], self.batch_size, pass_tokens)

    def validation_shapes(self, pass_tokens: int | None) -> Counter[Shape]:
        return shapes([inputs for inputs, _ in self.validation], self.batch_size, pass_tokens)

    def most_targets(self, shape: Shape) -> int:
        """More than any pass of this shape has, in whichever order of batches."""
        rows, length = shape
        every = (*self.train, *self.validation)
        return rows * max(targets for inputs, targets in every if inputs <= length)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch is cut to take less memory: none of it changes what is trained.

    ``micro_batch`` rows of the longest length go through the model at once, shorter ones more at a
    time; ``None`` is a whole batch. The slices are those of the loss and of attention's scores.
    """

    micro_batch: int | None = None
    loss_slice_bytes: int = LOSS_SLICE_BYTES
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What is to be trained on which data, and where. The workload's batch is replaced by ours."""

    architecture: Architecture
    form: Form
    machine: Machine
    budget: Budget
    workload: TrainingWorkload
    rows: Rows

    def pass_tokens(self, cut: Cut) -> int | None:
        """Positions of one pass: the micro-batch's rows of the longest length."""
        if cut.micro_batch is None:
            return None
        return cut.micro_batch * longest(self.rows.shapes(None))

    def shapes(self, cut: Cut) -> Counter[Shape]:
        """Every shape of a training epoch, and how often it passes."""
        return self.rows.shapes(self.pass_tokens(cut))

    def validation_shapes(self, cut: Cut) -> Counter[Shape]:
        return self.rows.validation_shapes(self.pass_tokens(cut))

    def terms(self, cut: Cut) -> tuple[Shape, tuple[MemoryTerm, ...]]:
        """The pass that needs most memory, and its terms."""
        every = [*self.shapes(cut), *self.validation_shapes(cut)]
        found = [(shape, self._terms_of(shape, cut)) for shape in _largest(every)]
        return max(found, key=lambda one: peak(one[1])[1])

    def _terms_of(self, shape: Shape, cut: Cut) -> tuple[MemoryTerm, ...]:
        rows, length = shape
        # Positions with nothing to predict do not pass the head.
        logits = 4 * self.architecture.vocab_size * self.rows.most_targets(shape)
        return own_training_terms(
            self.architecture,
            self.form.weights,
            # The last token of a row is only a target.
            replace(self.workload, batch_size=rows, max_seq_length=length + 1),
            backend=self.machine.backend,
            loss_slice_bytes=min(cut.loss_slice_bytes, logits),
            attention_slice_bytes=cut.attention_slice_bytes,
        )


@dataclass(frozen=True, slots=True)
class FineTuningPlan:
    """The plan of a run. ``worst`` is the pass that needs most, as rows and padded length.

    ``shapes`` counts the passes of an epoch: MLX meets no others. ``notes`` are for a reader.
    """

    case: FineTuning
    cut: Cut
    ledger: Ledger
    worst: Shape
    shapes: Counter[Shape]
    notes: tuple[str, ...]

    @property
    def pass_tokens(self) -> int | None:
        return self.case.pass_tokens(self.cut)

    @property
    def loss_rows(self) -> int:
        """Positions of a slice of the loss, whose logits are float32."""
        return max(16, self.cut.loss_slice_bytes // (4 * self.case.architecture.vocab_size))

    @property
    def micro_batch(self) -> int:
        """Rows of the longest length that go through the model at once."""
        return self.cut.micro_batch or self.case.rows.batch_size

    @property
    def padding(self) -> float:
        """The share of all positions of an epoch that hold no token."""
        return 1 - sum(inputs for inputs, _ in self.case.rows.train) / positions(self.shapes)


def plan_fine_tuning(case: FineTuning, cut: Cut, *, smaller: bool) -> FineTuningPlan:
    """The plan of ``case`` cut as asked; with ``smaller`` cut further until it fits the budget.

    A cut that does not fit is still returned: its verdict says so. It is unknown where the step of
    this model's layers is not modelled.
    """
    tried = cut
    try:
        for one in _cuts(cut, case.rows.batch_size) if smaller else [cut]:
            tried = one
            worst, terms = case.terms(one)
            if peak(terms)[1] <= case.budget.budget_bytes:
                break
    except (UnsupportedModel, NotImplementedError) as error:
        return _weights_alone(case, cut, str(error))
    ledger = _ledger(case, terms, verdict(peak(terms)[1], case.budget))
    return FineTuningPlan(
        case, tried, ledger, worst, case.shapes(tried), tuple(_notes(case, cut, tried))
    )


def _weights_alone(case: FineTuning, cut: Cut, reason: str) -> FineTuningPlan:
    every = case.shapes(cut)
    weights = case.form.weights
    too_large = verdict(weights.size_bytes, case.budget) == "exceeds"
    note = "the memory of a step of this model is not predicted" + (f": {reason}" if reason else "")
    return FineTuningPlan(
        case,
        cut,
        _ledger(case, (weights,), "exceeds" if too_large else "unknown"),
        max(every, key=lambda shape: shape[0] * shape[1]),
        every,
        (note,),
    )


def _ledger(case: FineTuning, terms: tuple[MemoryTerm, ...], found: Verdict) -> Ledger:
    return Ledger(terms, case.budget.budget_bytes, case.budget.limit_bytes, found)


def _cuts(asked: Cut, batch_size: int) -> Iterator[Cut]:
    """Smaller and smaller: half the micro-batch each time, then smaller slices."""
    yield asked
    rows = asked.micro_batch or batch_size
    while rows > 1:
        rows = -(-rows // 2)
        yield replace(asked, micro_batch=rows)
    for loss, attention in SMALLER_SLICES:
        yield Cut(rows, loss, attention)


def _notes(case: FineTuning, asked: Cut, taken: Cut) -> Iterator[str]:
    if taken == asked:
        return
    rows, batch = taken.micro_batch or case.rows.batch_size, case.rows.batch_size
    yield (
        f"to stay within {format_gib(case.budget.budget_bytes)} ({case.budget.winner}) "
        f"{_rows(rows)} of a batch of {batch} go through the model at once; an update still sees "
        f"{_rows(batch * case.workload.grad_accumulation_steps)}"
    )
    if taken.loss_slice_bytes != asked.loss_slice_bytes:
        yield (
            f"slices of the loss take {format_gib(taken.loss_slice_bytes)}, of attention "
            f"{format_gib(taken.attention_slice_bytes)}"
        )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _largest(found: list[Shape]) -> list[Shape]:
    """The shapes that no other has both more rows and longer ones than."""
    return [
        one
        for one in set(found)
        if not any(a >= one[0] and b >= one[1] for a, b in set(found) - {one})
    ]


def longest(found: Counter[Shape]) -> int:
    return max(length for _, length in found)


def positions(found: Counter[Shape]) -> int:
    """Positions of all passes of an epoch, padding included."""
    return sum(rows * length * count for (rows, length), count in found.items())


def remedies(plan: FineTuningPlan) -> list[str]:
    """What would fit, the cheapest change first; each is tried."""
    case = plan.case
    nothing = ["nothing short of a smaller or a quantized base would fit"]
    if plan.ledger.terms == (case.form.weights,):
        return nothing
    found = []
    cut = plan_fine_tuning(case, plan.cut, smaller=True)
    if cut.ledger.verdict in ("fits", "tight"):
        found.append(f"--budget auto: {_rows(cut.micro_batch)} at once, the same updates")
    best = cut.cut
    most = max(inputs for inputs, _ in case.rows.train)
    for length in (most // 2, most // 4, most // 8):
        if length < 64:
            break
        shorter = replace(case, rows=_shortened(case.rows, length))
        if peak(shorter.terms(best)[1])[1] <= case.budget.budget_bytes:
            found.append(f"--max-seq-length {length + 1} with --overlong split, and --budget auto")
            break
    layers = case.workload.num_layers or len(case.architecture.layers)
    if layers > 4:
        fewer = replace(case, workload=replace(case.workload, num_layers=4))
        if peak(fewer.terms(best)[1])[1] <= case.budget.budget_bytes:
            found.append("--num-layers 4 with --budget auto: adapts less")
    return found or nothing


def _shortened(rows: Rows, length: int) -> Rows:
    train, validation = (
        tuple(part for row in split for part in _parts(row, length))
        for split in (rows.train, rows.validation)
    )
    return Rows(train, validation, rows.batch_size)


def _parts(row: Row, most: int) -> list[Row]:
    inputs, targets = row
    whole, rest = divmod(inputs, most)
    return [(n, min(n, targets)) for n in [most] * whole + ([rest] if rest else [])]
