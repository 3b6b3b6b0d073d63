"""ggml's graph allocator on sizes alone: how large a buffer a graph needs.

It gives every result the smallest free gap that holds it, writes element-wise results over a
dying operand, and grows the buffer where no gap is left (llama.cpp b11434,
``ggml/src/ggml-alloc.c``). Inputs of the graph are placed first.
"""

from dataclasses import dataclass, field

ALIGNMENT = 32  # ggml-backend.cpp, of the CPU; a device's 128 moves a few kB


@dataclass(slots=True)
class Node:
    """A result in the graph: its bytes, its operands, and those that it may overwrite."""

    size: int
    sources: tuple[int, ...]
    reuses: tuple[int, ...] = ()
    is_input: bool = False


@dataclass(slots=True)
class Graph:
    """Operations in the order that llama.cpp adds them."""

    nodes: list[Node] = field(default_factory=list)

    def input(self, size: int) -> int:
        return self._add(Node(size, (), is_input=True))

    def op(self, size: int, *sources: int, reuses: tuple[int, ...] = ()) -> int:
        return self._add(Node(size, sources, reuses))

    def inplace(self, operand: int, *others: int) -> int:
        """An element-wise operation, over its first operand if nothing else needs it."""
        return self.op(self.nodes[operand].size, operand, *others, reuses=(operand, *others))

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


@dataclass(slots=True)
class Allocator:
    """ggml's free list: (offset, size) by offset, the last one without end."""

    free: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1 << 62)])
    peak: int = 0

    def take(self, size: int) -> int:
        gaps = [(gap, -index) for index, (_, gap) in enumerate(self.free[:-1]) if gap >= size]
        index = -min(gaps)[1] if gaps else len(self.free) - 1
        offset, gap = self.free[index]
        self.free[index : index + 1] = [(offset + size, gap - size)] if gap > size else []
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        blocks = sorted([*self.free, (offset, size)])
        merged = [blocks[0]]
        for start, length in blocks[1:]:
            last, held = merged[-1]
            if last + held == start:
                merged[-1] = (last, held + length)
            else:
                merged.append((start, length))
        self.free = merged


def buffer_bytes(graph: Graph) -> int:
    """The size that ggml's allocator arrives at for ``graph``."""
    allocator, places = Allocator(), dict[int, tuple[int, int]]()
    children = [0] * len(graph.nodes)
    for node in graph.nodes:
        for source in node.sources:
            children[source] += 1
    for index, node in enumerate(graph.nodes):
        if node.is_input:
            places[index] = (allocator.take(_aligned(node.size)), _aligned(node.size))
    for index, node in enumerate(graph.nodes):
        if node.is_input:
            continue
        size = _aligned(node.size)
        reused = next((s for s in node.reuses if s in places and children[s] == 1), None)
        if reused is not None and places[reused][1] >= size:
            offset, held = places.pop(reused)
            if held > size:
                allocator.give(offset + size, held - size)
            places[index] = (offset, size)
        elif size:
            places[index] = (allocator.take(size), size)
        for source in node.sources:
            children[source] -= 1
            if children[source] == 0 and source in places:
                allocator.give(*places.pop(source))
    return allocator.peak


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
