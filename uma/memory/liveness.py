"""The peak of memory while MLX evaluates a graph, found on the graph alone.

The order is that of MLX's tape, views share buffers, an operation writes into the buffer of an
input that nothing else needs, and buffers are freed when the task that used them has run: tasks
are counted in the device's own units (mlx 0.32.4, ``mlx/transforms.cpp``, ``eval_impl``;
``mlx/backend/cpu/eval.cpp``; ``mlx/backend/metal/eval.cpp``).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from uma.memory.array_layout import Effect, Layout, effect
from uma.memory.metal_activations import MAX_ELEMENTS, MAX_OPERATIONS
from uma.workload import Backend

MAX_WIDTH = 20  # mlx/utils.h, bfs_max_width
MAX_ACTIVE_TASKS = 10  # mlx/transforms.cpp
DISPATCHES_PER_TASK = 10  # mlx/backend/cpu/encoder.h
DONATION_EXTRA = 16384  # mlx/backend/common/utils.h, is_donatable
METAL_PAGE = 16384  # mlx/backend/metal/allocator.cpp rounds larger buffers up to it


@dataclass(frozen=True, slots=True)
class Operation:
    """A primitive with the numbers of its arrays.

    ``opaque`` stands for a kernel of which only the outputs and ``workspace_bytes`` are known;
    the output may take over an input of ``donors``.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    opaque: bool = False
    workspace_bytes: int = 0
    donors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """What one evaluation computes: ``roots``, from arrays that exist already.

    ``arrays`` are laid out row by row, by number; ``sources`` those that no operation makes.
    ``held`` are named by the caller, so that they live on; other sources die with their last use.
    ``buffers`` are the bytes behind those sources that are views of larger arrays.
    """

    arrays: Sequence[Layout]
    operations: tuple[Operation, ...]
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


def peak(
    graph: Graph,
    order: Sequence[Operation],
    backend: Backend = "cpu",
    *,
    tasks_ahead: int = 0,
    dispatched: int = 0,
) -> Peak:
    """Evaluate ``graph`` on paper, in the ``order`` that ``evaluation_order`` found.

    ``tasks_ahead`` is the number of tasks that may be waiting on the device: 0 under a memory
    limit that is always exceeded, ``MAX_ACTIVE_TASKS`` where evaluation runs freely.
    ``dispatched`` is what the CPU's encoder has counted of its first task already.
    """
    tasks = _MetalTasks() if backend == "metal" else _CpuTasks(dispatched)
    memory = _Memory(graph, order, backend, tasks)
    for operation in order:
        memory.run(operation)
        memory.finish(tasks.done - tasks_ahead)
    buffers = {i: memory.sizes[memory.buffer[i]] for i in graph.held if i in memory.buffer}
    roots = sum(graph.arrays[i].nbytes for i in set(graph.roots))
    return Peak(memory.peak, memory.pending_bytes(), roots, memory.largest, buffers, len(order))


def evaluation_order(graph: Graph) -> list[Operation]:
    """Operations in MLX's order: breadth-first from the roots, reversed, as late as possible.

    An operation joins the tape when all that use it have; where more than ``MAX_WIDTH`` wait, the
    walk goes down one level first.
    """
    maker = {i: operation for operation in graph.operations for i in operation.outputs}
    uses = _uses(graph, maker)
    tape: list[Operation | None] = [None]
    aside: list[tuple[Operation | None, int]] = []
    i = 0
    while i < len(tape) or aside:
        if i < len(tape):
            current, j = tape[i], 0
            i += 1
        else:
            current, j = aside.pop()
        inputs = graph.roots if current is None else current.inputs
        for k in range(j, len(inputs)):
            made = maker.get(inputs[k])
            if made is None:
                continue
            if len(tape) - i >= MAX_WIDTH:
                aside.append((current, k))
                break
            uses[id(made)] -= 1
            if not uses[id(made)]:
                tape.append(made)
    return [operation for operation in reversed(tape) if operation is not None]


def _uses(graph: Graph, maker: Mapping[int, Operation]) -> dict[int, int]:
    """How often what each operation makes is used, by those that the roots need."""
    uses: dict[int, int] = {}
    waiting: list[Sequence[int]] = [graph.roots]
    while waiting:
        for i in waiting.pop():
            made = maker.get(i)
            if made is None:
                continue
            if id(made) not in uses:
                waiting.append(made.inputs)
            uses[id(made)] = uses.get(id(made), 0) + 1
    return uses


class _Memory:
    """Buffers, who needs them, and the tasks that have not run yet."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Operation],
        backend: Backend,
        tasks: "_CpuTasks | _MetalTasks",
    ) -> None:
        self.layouts: dict[int, Layout] = {}
        self.buffer: dict[int, int] = {}
        self.sizes: list[int] = []
        self.references: list[int] = []
        self.rows = graph.arrays
        self.uses = dict.fromkeys(graph.held, 1)
        for i in (*graph.roots, *(i for operation in order for i in operation.inputs)):
            self.uses[i] = self.uses.get(i, 0) + 1
        self.live = self.peak = self.largest = 0
        self.metal = backend == "metal"
        self.tasks = tasks
        self.pending: deque[tuple[int, set[int]]] = deque()
        for i in graph.sources:
            if i in self.uses:
                self.layouts[i] = graph.arrays[i]
                self._allocate(i, graph.buffers.get(i, graph.arrays[i].nbytes))
        self.largest = 0

    def run(self, operation: Operation) -> None:
        found = self._effect(operation)
        before = {self.buffer[i] for i in operation.inputs}
        donated = self._place(operation, found)
        temporaries = [self._new(size) for size in found.temporaries]
        made = {self.buffer[i] for i in operation.outputs}
        used = (before | made | set(temporaries)) - {self.buffer[operation.outputs[-1]]}
        for buffer in used:
            self.references[buffer] += 1
        touched = {}
        if self.metal:
            arrays = (*operation.inputs, *operation.outputs)
            touched = {self.buffer[i]: self.layouts[i].spanned for i in arrays}
        dispatches = found.dispatches - (donated and found.copies)
        self.pending.append((self.tasks.add(dispatches, touched), used))
        for buffer in temporaries:
            self._release(buffer)
        for i in operation.inputs:
            self._drop(i)
        for i in operation.outputs:
            if not self.uses.get(i):
                self.uses[i] = 1
                self._drop(i)

    def _effect(self, operation: Operation) -> Effect:
        outputs = tuple(self.rows[i] for i in operation.outputs)
        if operation.opaque:
            workspace = (operation.workspace_bytes,) if operation.workspace_bytes else ()
            return Effect(outputs, donors=operation.donors, temporaries=workspace)
        inputs = tuple(self.layouts[i] for i in operation.inputs)
        return effect(operation.name, operation.arguments, inputs, outputs)

    def _place(self, operation: Operation, found: Effect) -> bool:
        """Give every output its layout and a buffer: a shared one, a donated one, a new one."""
        donor = None
        for position, (i, layout) in enumerate(zip(operation.outputs, found.outputs, strict=True)):
            self.layouts[i] = layout
            if found.shares:
                source = operation.inputs[min(position, len(operation.inputs) - 1)]
                self._share(i, operation.inputs[0] if operation.name == "Split" else source)
                continue
            donor = self._donor(operation, found, i) if position == 0 else None
            if donor is not None:
                self._share(i, donor)
            else:
                self._allocate(i, layout.spanned * layout.itemsize)
        return donor is not None

    def _donor(self, operation: Operation, found: Effect, output: int) -> int | None:
        out = self.layouts[output]
        for index in found.donors:
            i = operation.inputs[index]
            buffer, layout = self.buffer[i], self.layouts[i]
            if self.uses[i] != 1 or self.references[buffer] != 1:
                continue
            room = self.rows[output].nbytes + DONATION_EXTRA
            if layout.itemsize == out.itemsize and (found.exact or self.sizes[buffer] <= room):
                return i
        return None

    def _new(self, size: int) -> int:
        if self.metal and size > METAL_PAGE:
            size = -(-size // METAL_PAGE) * METAL_PAGE
        self.sizes.append(size)
        self.references.append(1)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        return len(self.sizes) - 1

    def _allocate(self, i: int, size: int) -> None:
        self.buffer[i] = self._new(size)

    def _share(self, i: int, source: int) -> None:
        self.buffer[i] = self.buffer[source]
        self.references[self.buffer[i]] += 1

    def _drop(self, i: int) -> None:
        self.uses[i] -= 1
        if not self.uses[i]:
            self._release(self.buffer[i])

    def _release(self, buffer: int) -> None:
        self.references[buffer] -= 1
        if not self.references[buffer]:
            self.live -= self.sizes[buffer]

    def pending_bytes(self) -> int:
        """Bytes that are free as soon as all tasks have run, which they then have."""
        live = self.live
        while self.pending:
            self.finish(self.pending[-1][0])
        return live - self.live

    def finish(self, task: int) -> None:
        """Free what the tasks up to ``task`` used."""
        while self.pending and self.pending[0][0] <= task:
            for buffer in self.pending.popleft()[1]:
                self._release(buffer)


class _CpuTasks:
    """``CommandEncoder::dispatch`` of the CPU: one task for every ten dispatches."""

    def __init__(self, dispatched: int) -> None:
        self.dispatches = dispatched

    @property
    def done(self) -> int:
        """Tasks that are whole."""
        return self.dispatches // DISPATCHES_PER_TASK

    def add(self, dispatches: int, touched: Mapping[int, int]) -> int:
        """Count an operation's dispatches and the one that frees; the task of the latter."""
        self.dispatches += dispatches + 1
        return -(-self.dispatches // DISPATCHES_PER_TASK)


class _MetalTasks:
    """Command buffers of Metal, closed by operations or by elements of the arrays in them."""

    def __init__(self) -> None:
        self.done = 0
        self.operations = 0
        self.elements = 0
        self.touched: set[int] = set()

    def add(self, dispatches: int, touched: Mapping[int, int]) -> int:
        """Count an operation; the number of its command buffer."""
        task = self.done + 1
        self.operations += dispatches
        if dispatches:
            self.elements += sum(n for buffer, n in touched.items() if buffer not in self.touched)
            self.touched |= touched.keys()
        if self.operations > MAX_OPERATIONS or self.elements >> 20 > MAX_ELEMENTS >> 20:
            self.done, self.operations, self.elements, self.touched = task, 0, 0, set()
        return task
