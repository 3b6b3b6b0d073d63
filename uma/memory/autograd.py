"""What an eager program with reverse-mode differentiation holds: sizes instead of numbers.

The mirror of PyTorch's autograd (torch 2.4 to 2.13): a buffer lives as long as something refers to
it, which is a name of the running program, a graph node that saved it, or a gradient on its way. A
node gives up what it saved when its backward has run; a gradient that reaches a node by two ways is
summed in place (``csrc/autograd/input_buffer.cpp``, ``accumulate``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from sys import getrefcount

from uma.frozen import dataclass


class Memory:
    """Bytes alive, and the most that were at once since ``begin``."""

    __slots__ = ("live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def begin(self) -> None:
        """From here on the peak is another one, which begins with what is alive."""
        self.peak_bytes = self.live_bytes

    def buffer(self, size_bytes: int) -> "Buffer":
        """A new buffer, freed with the last reference to it."""
        return Buffer(self, size_bytes)

    def passing(self, size_bytes: int) -> None:
        """Bytes that are alive for one instant only."""
        self.buffer(size_bytes)


class Buffer:
    """One allocation."""

    __slots__ = ("memory", "size_bytes")

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        self.memory, self.size_bytes = memory, size_bytes
        memory.live_bytes = live = memory.live_bytes + size_bytes
        if live > memory.peak_bytes:
            memory.peak_bytes = live

    def __del__(self) -> None:
        self.memory.live_bytes -= self.size_bytes


Backward = Callable[[Buffer], Sequence[Buffer | None]]
"""Gradients of the inputs, in their order, from the gradient of the output."""


class Node:
    """One operation of the graph: whose gradient it passes on, and how."""

    __slots__ = ("backward", "grad", "inputs", "order")

    def __init__(
        self, inputs: tuple["Node | None", ...], backward: Backward | None, order: int
    ) -> None:
        self.inputs, self.backward, self.order = inputs, backward, order
        self.grad: Buffer | None = None


@dataclass(frozen=True, slots=True)
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
        nodes = tuple([value.node for value in inputs])
        if not self.enabled or not (starts or any(nodes)):
            return Tensor(buffer, elements, width)
        self.count += 1
        return Tensor(buffer, elements, width, Node(nodes, back, self.count))

    def leaf(self, value: Tensor) -> Tensor:
        """``value`` as the start of a graph: its gradient is kept in the node."""
        return Tensor(value.buffer, value.elements, value.width, Node((), None, 0))

    def backward(self, node: Node) -> None:
        """Run the operations behind ``node``, which has its gradient, the latest first."""
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
