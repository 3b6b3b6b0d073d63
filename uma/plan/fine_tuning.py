"""A fine-tuning run before its first step: its worst batch, what that needs, and what to lower."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from uma.architecture.layers import Architecture, Recurrent
from uma.dataset.batches import padded_length
from uma.dataset.packing import packs
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
from uma.plan.forms import Form
from uma.units import MIB, format_gib
from uma.workload import TrainingWorkload

SMALLER_SLICES = ((16 * MIB, 8 * MIB), (4 * MIB, 2 * MIB))
"""Of loss and attention, tried after the smallest micro-batch: they take more time."""

ERROR = 0.08
"""A step may need so much more than is predicted (``tests/test_training_own.py``)."""

Row = tuple[int, int]
"""Inputs of a row of a batch, and how many of them have something to predict."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The data as batches see it; ``packed`` are the examples of each training row, if it is."""

    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    batch_size: int
    packed: tuple[tuple[Row, ...], ...] = ()

    def packings(self, shape: Shape) -> list[int | None]:
        """Inputs of the longest example that a row may share with others, ``None`` for no others.

        A pass in which each row holds one example is not told apart from one that is not packed.
        """
        rows, length = shape
        each = [padded_length(row[0][0]) for row in self.packed if len(row) == 1]
        alone = [one for one in each if one <= length]
        found: list[int | None] = []
        if not self.packed or (len(alone) >= rows and max(alone) == length):
            found.append(None)
        if len(each) < len(self.packed):
            every = (*chain.from_iterable(self.packed), *self.validation)
            found.append(max(inputs for inputs, _ in every))
        return found or [None]

    def repacked(self, row_tokens: int) -> "Rows":
        """Every packed row by itself, as one or several of at most ``row_tokens``."""
        rows = [
            tuple(examples[n] for n in row)
            for examples in self.packed
            for row in packs([inputs for inputs, _ in examples], row_tokens)
        ]
        return Rows(tuple(map(packed_row, rows)), self.validation, 1, tuple(rows))

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
    The examples of a packed row pass in rows of at most ``row_tokens``, one at a time.
    """

    micro_batch: int | None = None
    row_tokens: int | None = None
    loss_slice_bytes: int = LOSS_SLICE_BYTES
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What is to be trained on which data, and where. The workload's batch is replaced by ours.

    ``not_modelled`` says what of it no term counts: its memory is then unknown.
    """

    architecture: Architecture
    form: Form
    machine: Machine
    budget: Budget
    workload: TrainingWorkload
    rows: Rows
    not_modelled: str = ""

    @property
    def update_rows(self) -> int:
        """Rows of data, packed or not, that an update is made of."""
        batch = min(self.rows.batch_size, len(self.rows.train))
        return batch * self.workload.grad_accumulation_steps

    def passing(self, cut: Cut) -> Rows:
        """The rows as they go through the model."""
        return self.rows if cut.row_tokens is None else self.rows.repacked(cut.row_tokens)

    def pass_tokens(self, cut: Cut) -> int | None:
        """Positions of one pass: the micro-batch's rows of the longest length."""
        if cut.micro_batch is None:
            return None
        return cut.micro_batch * longest(self.passing(cut).shapes(None))

    def shapes(self, cut: Cut) -> Counter[Shape]:
        """Every shape of a training epoch, and how often it passes."""
        return self.passing(cut).shapes(self.pass_tokens(cut))

    def validation_shapes(self, cut: Cut) -> Counter[Shape]:
        return self.rows.validation_shapes(self.pass_tokens(cut))

    def terms(self, cut: Cut) -> tuple[Shape, tuple[MemoryTerm, ...]]:
        """The pass that needs most memory, and its terms."""
        shapes, passing, workload = self.shapes(cut), self.passing(cut), self.workload
        if shapes.total() > self.rows.shapes(None).total():  # gradients of passes are summed
            steps = 2 * workload.grad_accumulation_steps
            workload = replace(workload, grad_accumulation_steps=steps)
        case = replace(self, workload=workload)
        found = [
            (shape, case.terms_of(shape, cut, passing.most_targets(shape), packed))
            for shape in _largest([*shapes, *self.validation_shapes(cut)])
            for packed in passing.packings(shape)
        ]
        return max(found, key=lambda one: peak(one[1])[1])

    def terms_of(
        self, shape: Shape, cut: Cut, targets: int, packed_tokens: int | None = None
    ) -> tuple[MemoryTerm, ...]:
        """The terms of a pass with so many positions that have something to predict."""
        rows, length = shape
        # Others do not pass the head.
        logits = 4 * self.architecture.vocab_size * targets
        return own_training_terms(
            self.architecture,
            self.form.weights,
            # The last token of a row is only a target.
            replace(self.workload, batch_size=rows, max_seq_length=length + 1),
            backend=self.machine.backend,
            loss_slice_bytes=min(cut.loss_slice_bytes, logits),
            attention_slice_bytes=cut.attention_slice_bytes,
            packed_tokens=packed_tokens,
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

    A user's own budget is kept with an ``ERROR`` to spare, where any cut does that. One that does
    not fit is still returned: its verdict says so. It is unknown where the step of this model's
    layers is not modelled.
    """
    tried, budget = cut, case.budget
    most = budget.budget_bytes / (1 if budget.user_bytes is None else 1 + ERROR)
    if case.not_modelled:
        return _weights_alone(case, cut, case.not_modelled)
    try:
        for one in _cuts(cut, case.rows) if smaller else [cut]:
            tried = one
            worst, terms = case.terms(one)
            if peak(terms)[1] <= most:
                break
    except (UnsupportedModel, NotImplementedError) as error:
        return _weights_alone(case, cut, str(error))
    ledger = _ledger(case, terms, verdict(peak(terms)[1], budget))
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


def _cuts(asked: Cut, rows: Rows) -> Iterator[Cut]:
    """Smaller and smaller: half the micro-batch each time, shorter packed rows, smaller slices."""
    yield asked
    cut = asked
    while (at_once := cut.micro_batch or rows.batch_size) > 1:
        cut = replace(cut, micro_batch=-(-at_once // 2))
        yield cut
    for length in _row_lengths(cut.row_tokens, rows):
        cut = replace(cut, micro_batch=1, row_tokens=length)
        yield cut
    for loss, attention in SMALLER_SLICES:
        yield replace(cut, micro_batch=1, loss_slice_bytes=loss, attention_slice_bytes=attention)


def _row_lengths(row_tokens: int | None, rows: Rows) -> Iterator[int]:
    """Half the packed length each time, down to the longest example."""
    least = max((inputs for examples in rows.packed for inputs, _ in examples), default=0)
    length = row_tokens or max(inputs for inputs, _ in rows.train)
    while 0 < least < length:
        length = max(least, length // 2)
        yield length


def _notes(case: FineTuning, asked: Cut, taken: Cut) -> Iterator[str]:
    if taken == asked:
        return
    rows, batch = taken.micro_batch or case.rows.batch_size, case.rows.batch_size
    cuts = [f"{rows_text(rows)} of a batch of {batch} at once"] if rows < batch else []
    if taken.row_tokens != asked.row_tokens:
        cuts.append(f"the examples of a packed row in rows of at most {taken.row_tokens:,} tokens")
    if taken.loss_slice_bytes != asked.loss_slice_bytes:
        cuts.append(
            f"slices of {format_gib(taken.loss_slice_bytes)} of the loss and "
            f"{format_gib(taken.attention_slice_bytes)} of attention"
        )
    yield (
        f"to stay within {format_gib(case.budget.budget_bytes)} ({case.budget.winner}): "
        f"{', '.join(cuts)}; an update still sees {rows_text(case.update_rows)}"
    )


def rows_text(count: int) -> str:
    """
    >>> rows_text(1), rows_text(1024)
    ('1 row', '1,024 rows')
    """
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


def packed_row(examples: Sequence[Row]) -> Row:
    """The row that several examples fill together."""
    return sum(inputs for inputs, _ in examples), sum(targets for _, targets in examples)


def require_packable(architecture: Architecture) -> None:
    """Refuse what the loaded model would refuse (``uma.runtime.lora.batching``), as far as known.

    Raises:
        UnsupportedModel: If a layer runs on from one example into the next, or positions do.
    """
    recurrent = any(isinstance(m, Recurrent) for layer in architecture.layers for m in layer.mixers)
    most = architecture.max_position_embeddings
    learned = any(p.kind == "embedding" and p.shape[0] == most for p in architecture.parameters)
    if recurrent or (learned and most != architecture.vocab_size):
        what = "a recurrence runs" if recurrent else "learned positions run"
        raise UnsupportedModel(
            f"examples cannot be packed for this model: {what} on into the next one; leave out "
            "--packing"
        )
