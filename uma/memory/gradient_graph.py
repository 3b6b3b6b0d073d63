"""A graph of operations with their gradients, as MLX's ``value_and_grad`` builds it, in sizes.

Operations that ``mx.compile`` would run as one kernel are one operation here. The graph is
evaluated on paper by ``uma.memory.liveness``, in MLX's own order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from uma.memory.array_layout import Layout, rows
from uma.memory.liveness import Graph, Operation

Vjp = Callable[[int], Sequence[int | None]]
"""Gradients of an operation's inputs from that of its output."""


@dataclass(frozen=True, slots=True)
class Record:
    """An operation that was differentiated."""

    inputs: tuple[int, ...]
    output: int
    vjp: Vjp


@dataclass(slots=True)
class Builder:
    """Arrays by number, the operations that make them, and what is to be differentiated.

    ``recording`` is off inside a checkpointed function's first run.
    """

    arrays: list[Layout] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    differentiated: set[int] = field(default_factory=set)
    recording: bool = True

    def array(self, elements: int, width: int) -> int:
        self.arrays.append(rows((elements,), width))
        return len(self.arrays) - 1

    def source(self, elements: int, width: int, *, trained: bool = False) -> int:
        """An array that exists before the step."""
        found = self.array(elements, width)
        self.sources.append(found)
        if trained:
            self.differentiated.add(found)
        return found

    def size(self, array: int) -> int:
        return self.arrays[array].size

    def width(self, array: int) -> int:
        return self.arrays[array].itemsize

    def run(
        self,
        name: str,
        inputs: Sequence[int],
        elements: int,
        width: int,
        *,
        donors: Sequence[int] = (),
        outputs: int = 1,
    ) -> int:
        """The first of ``outputs`` equal arrays that the operation makes."""
        made = [self.array(elements, width) for _ in range(outputs)]
        self.operations.append(
            Operation(name, tuple(inputs), tuple(made), opaque=True, donors=tuple(donors))
        )
        return made[0]

    def after(self, array: int, gradient: int) -> int:
        """The array itself, not before ``gradient`` (``Depends``, ``mx.checkpoint``)."""
        found = self.array(self.size(array), self.width(array))
        self.operations.append(Operation("Depends", (array, gradient), (found,)))
        return found

    def record(self, inputs: Sequence[int], output: int, vjp: Vjp) -> int:
        """``output`` with its gradient, if any of ``inputs`` is differentiated."""
        if any(i in self.differentiated for i in inputs):
            self.differentiated.add(output)
            if self.recording:
                self.records.append(Record(tuple(inputs), output, vjp))
        return output

    def gradients(
        self, output: int, gradient: int, wanted: Sequence[int], start: int = 0
    ) -> list[int | None]:
        """Gradients of ``wanted``, through the records from ``start`` on, which are used up."""
        found = {output: gradient}
        while len(self.records) > start:
            record = self.records.pop()
            given = found.pop(record.output, None)
            if given is None:
                continue
            for i, value in zip(record.inputs, record.vjp(given), strict=True):
                if value is None or i not in self.differentiated:
                    continue
                before = found.get(i)
                found[i] = value if before is None else self.sum(before, value)
        return [found.get(i) for i in wanted]

    def sum(self, x: int, y: int) -> int:
        return self.run("Add", (x, y), self.size(x), self.width(x), donors=(0, 1))

    def graph(self, roots: Sequence[int]) -> Graph:
        """What one evaluation of ``roots`` runs; sources live on."""
        return Graph(
            self.arrays,
            tuple(self.operations),
            tuple(self.sources),
            tuple(roots),
            frozenset(self.sources),
        )
