"""What an eager program with reverse-mode differentiation holds: sizes instead of numbers.

The mirror of PyTorch's autograd (torch 2.4 to 2.13): a buffer lives as long as something refers to
it, which is a name of the running program, a graph node that saved it, or a gradient on its way. A
node gives up what it saved when its backward has run; a gradient that reaches a node by two ways is
summed in place (``csrc/autograd/input_buffer.cpp``, ``accumulate``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sys import getrefcount


class Memory:
    """Bytes alive and the most that were, with the name of the moment."""

    __slots__ = ("live_bytes", "moment", "peak_bytes", "peak_moment", "peaks")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.moment = ""
        self.peak_moment = ""
        self.peaks: dict[str, int] = {}

    def buffer(self, size_bytes: int) -> "Buffer":
        """A new buffer, freed with the last reference to it."""
        return Buffer(self, size_bytes)

    def passing(self, size_bytes: int) -> None:
        """Bytes that are alive for one instant only."""
        self.buffer(size_bytes)

    def begin(self, moment: str) -> None:
        """From here on peaks are those of ``moment``, which begins with what is alive."""
        self.moment = moment
        self.grow(0)

    def grow(self, size_bytes: int) -> None:
        self.live_bytes += size_bytes
        if self.live_bytes > self.peaks.get(self.moment, 0):
            self.peaks[self.moment] = self.live_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_moment = self.live_bytes, self.moment


class Buffer:
    """One allocation."""

    __slots__ = ("memory", "size_bytes")

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        self.memory, self.size_bytes = memory, size_bytes
        memory.grow(size_bytes)

    def __del__(self) -> None:
        self.memory.live_bytes -= self.size_bytes


Backward = Callable[[Buffer], Sequence[Buffer | None]]
"""Gradients of the inputs, in their order, from the gradient of the output."""


@dataclass(slots=True, eq=False)
class Node:
    """One operation of the graph: whose gradient it passes on, and how."""

    inputs: tuple["Node | None", ...]
    backward: Backward | None
    order: int
    grad: Buffer | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A value: its buffer, its width in bytes an element, and the operation that made it."""

    buffer: Buffer
    elements: int
    width: int
    node: Node | None = None

    @property
    def size_bytes(self) -> int:
        return self.elements * self.width


class Graph:
    """Operations in the order in which the program runs them."""

    __slots__ = ("count", "enabled", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.count = 0
        self.enabled = True

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Operations inside make no graph."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def tensor(self, elements: int, width: int) -> Tensor:
        """A value that needs no gradient."""
        return Tensor(self.memory.buffer(elements * width), elements, width)

    def apply(
        self,
        inputs: Iterable[Tensor],
        buffer: Buffer,
        elements: int,
        width: int,
        back: Backward,
        *,
        starts: bool = False,
    ) -> Tensor:
        """The output of an operation; ``back`` keeps alive what it refers to, which is saved.

        An operation with a trained parameter ``starts`` a graph where its inputs need no gradient.
        """
        nodes = tuple(value.node for value in inputs)
        if not self.enabled or not (starts or any(nodes)):
            return Tensor(buffer, elements, width)
        self.count += 1
        return Tensor(buffer, elements, width, Node(nodes, back, self.count))

    def leaf(self, value: Tensor) -> Tensor:
        """``value`` as the start of a graph: its gradient is kept in the node."""
        return Tensor(value.buffer, value.elements, value.width, Node((), None, 0))

    def backward(self, node: Node, grad: Buffer) -> None:
        """Run the operations behind ``node``, the latest first."""
        node.grad = grad
        del grad
        waiting = {node.order: node}
        del node
        while waiting:
            latest = waiting.pop(max(waiting))
            _run(latest, waiting)


def _references(buffer: Buffer) -> int:
    return getrefcount(buffer)


def _own_references() -> int:
    """References that a buffer has inside a call when its caller alone holds it."""
    buffer = Memory().buffer(0)
    return _references(buffer)


OWN_REFERENCES = _own_references()  # 3 in Python 3.11; later versions may borrow some


def _sum(first: Buffer, second: Buffer) -> Buffer:
    """Two gradients of one value: summed into whichever nothing else refers to."""
    if getrefcount(first) <= OWN_REFERENCES:
        return first
    if getrefcount(second) <= OWN_REFERENCES:
        return second
    return first.memory.buffer(first.size_bytes)


def _run(node: Node, waiting: dict[int, Node]) -> None:
    grad, node.grad = node.grad, None
    back, node.backward = node.backward, None
    if back is None or grad is None:
        node.grad = grad
        return
    found = list(back(grad))
    del back, grad
    inputs, node.inputs = node.inputs, ()
    for target in reversed(inputs):
        value = found.pop()
        if target is None or value is None:
            continue
        target.grad = value if target.grad is None else _sum(target.grad, value)
        if target.backward is not None:
            waiting[target.order] = target
