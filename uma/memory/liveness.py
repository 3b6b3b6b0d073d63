"""The peak of memory while MLX evaluates a graph, found on the graph alone.

The order is that of MLX's tape, views share buffers, an operation writes into the buffer of an
input that nothing else needs, and buffers are freed when the task that used them has run: tasks
are counted in the device's own units (mlx 0.32.4, ``mlx/transforms.cpp``, ``eval_impl``;
``mlx/backend/cpu/eval.cpp``; ``mlx/backend/metal/eval.cpp``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from uma.frozen import dataclass
from uma.memory.array_layout import Effect, Layout, effect
from uma.memory.timeline import (
    DISPATCHES_PER_TASK,
    Kind,
    Run,
    Timeline,
    buffer_bytes,
    kind_of,
)
from uma.workload import Backend

MAX_WIDTH = 20  # mlx/utils.h, bfs_max_width
MAX_ACTIVE_TASKS = 10  # mlx/transforms.cpp
STARTS_APART = 2  # of the dispatches that a first task may hold already, those that are tried


class Operation(NamedTuple):
    """A primitive with the numbers of its arrays.

    ``opaque`` stands for a kernel of which only the outputs are known and, as its arguments, the
    bytes of its workspace; the output may take over an input of ``donors``.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    opaque: bool = False
    donors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """What one evaluation computes: ``roots``, from arrays that exist already.

    ``arrays`` are laid out row by row, by number; ``sources`` those that no operation makes.
    ``held`` are named by the caller, so that they live on; other sources die with their last use.
    ``buffers`` are the bytes behind those sources that are views of larger arrays.
    """

    arrays: Sequence[Layout]
    operations: Sequence[Operation]
    sources: tuple[int, ...]
    roots: tuple[int, ...]
    held: frozenset[int]
    buffers: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at once, the largest buffer made, and the buffers behind ``held``.

    ``pending_bytes`` are those that tasks still waiting at the end keep from being free, and
    ``root_bytes`` those of the arrays asked for.
    """

    size_bytes: int
    pending_bytes: int
    root_bytes: int
    largest_buffer_bytes: int
    buffers: Mapping[int, int]
    num_operations: int


class Evaluation(NamedTuple):
    """A timeline with the sizes of one case; ``sources`` are the bytes of those in use."""

    timeline: Timeline
    kinds: Sequence[Kind]
    sources: Sequence[int]
    backend: Backend

    def run(self, tasks_ahead: int = 0, dispatched: int = 0) -> Run:
        return self.timeline.run(self.kinds, self.sources, self.backend, tasks_ahead, dispatched)

    def peak(self, graph: Graph, tasks_ahead: int = 0, dispatched: int = 0) -> Peak:
        """That of ``graph``, which this is the evaluation of.

        ``tasks_ahead`` is the number of tasks that may be waiting on the device: 0 under a memory
        limit that is always exceeded, ``MAX_ACTIVE_TASKS`` where evaluation runs freely.
        ``dispatched`` is what the CPU's encoder has counted of its first task already.
        """
        run, slots = self.run(tasks_ahead, dispatched), self.timeline.slots
        buffers = {i: run.slots[slots[i]] for i in graph.held if i in slots}
        roots = sum(graph.arrays[i].nbytes for i in set(graph.roots))
        count = len(self.kinds)
        return Peak(run.peak, run.pending, roots, run.largest, buffers, count)

    def peak_bytes(self) -> int:
        """The peak, wherever the first task begins."""
        return max(run.peak for run in self.runs())

    def runs(self) -> list[Run]:
        """One for each place where the first task may begin.

        On the CPU up to ten tasks of ten dispatches wait, and the first is begun already.
        """
        if self.backend == "metal":
            return [self.run()]
        starts = range(0, DISPATCHES_PER_TASK, STARTS_APART)
        return [self.run(MAX_ACTIVE_TASKS, start) for start in starts]


def evaluation(graph: Graph, order: Sequence[Operation], backend: Backend) -> Evaluation:
    """``graph`` in the ``order`` that ``evaluation_order`` found."""
    layouts = {i: graph.arrays[i] for i in graph.sources}
    kinds = []
    for operation in order:
        inputs = tuple([layouts[i] for i in operation.inputs])
        outputs = tuple([graph.arrays[i] for i in operation.outputs])
        found = effect_of(operation, operation.arguments, inputs, outputs)
        layouts.update(zip(operation.outputs, found.outputs, strict=True))
        kinds.append(kind_of(found, inputs, outputs, backend))
    steps = [(n, o.inputs, o.outputs) for n, o in enumerate(order)]
    timeline = Timeline(steps, kinds, graph.sources, {*graph.held, *graph.roots})
    sizes = [graph.buffers.get(i, graph.arrays[i].nbytes) for i in timeline.sources]
    return Evaluation(timeline, kinds, [buffer_bytes(n, backend) for n in sizes], backend)


def effect_of(
    operation: Operation,
    arguments: tuple[Any, ...],
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
) -> Effect:
    if operation.opaque:
        whole = [x.row and x.spanned == x.size for x in inputs]
        donors = tuple([place for place in operation.donors if whole[place]])
        return Effect(outputs, donors=donors, temporaries=arguments)
    return effect(operation.name, arguments, inputs, outputs)


def evaluation_order(graph: Graph) -> list[Operation]:
    """Operations in MLX's order: breadth-first from the roots, reversed, as late as possible.

    An operation joins the tape when all that use it have; where more than ``MAX_WIDTH`` wait, the
    walk goes down one level first.
    """
    operations = graph.operations
    maker = {i: n for n, operation in enumerate(operations) for i in operation.outputs}
    uses = _uses(graph, maker)
    tape: list[int] = []
    aside: list[tuple[Sequence[int], int]] = []
    inputs: Sequence[int] = graph.roots
    i = j = 0
    while True:
        for k in range(j, len(inputs)):
            made = maker.get(inputs[k])
            if made is None:
                continue
            if len(tape) - i >= MAX_WIDTH:
                aside.append((inputs, k))
                break
            uses[made] -= 1
            if not uses[made]:
                tape.append(made)
        if i < len(tape):
            inputs, j = operations[tape[i]].inputs, 0
            i += 1
        elif aside:
            inputs, j = aside.pop()
        else:
            return [operations[n] for n in reversed(tape)]


def _uses(graph: Graph, maker: Mapping[int, int]) -> Counter[int | None]:
    """How often what each operation makes is used, by those that the roots need."""
    used, needed = [*graph.roots], set(graph.roots)
    for operation in reversed(graph.operations):  # each comes after those that it needs
        if not needed.isdisjoint(operation.outputs):
            needed.update(operation.inputs)
            used += operation.inputs
    return Counter(map(maker.get, used))
