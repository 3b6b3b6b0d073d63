"""What ``mx.compile`` makes of a graph: equal operations once, elementwise ones as one kernel.

The rules of mlx 0.32.4, ``mlx/compile.cpp`` (``compile_simplify``, ``compile_fuse``), on names and
shapes alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from uma.memory.array_layout import Layout
from uma.memory.liveness import Operation

MAX_DEPTH = 11  # compile.cpp, max_compile_depth
MAX_ARRAYS = 24  # max_compile_arrays
NO_OPERATION = ("Copy", "StopGradient")
# compile.cpp: is_unary, is_binary, is_ternary, is_broadcast
_FUSED = """
Abs AsType Ceil Cos Cosh Erf Exp Expm1 Floor Log Log1p LogicalNot Negative Round Sigmoid Sign Sin
Square Sqrt Tanh Add Divide Equal Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr LogAddExp
Maximum Minimum Multiply NotEqual Power Subtract Select Broadcast
"""
FUSED = frozenset(_FUSED.split())


def simplified(
    operations: Sequence[Operation], layouts: Sequence[Layout], roots: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """Without operations that do nothing, and with equal ones merged; the roots' new numbers."""
    same: dict[int, int] = {}
    known: dict[object, Operation] = {}
    kept: list[Operation] = []
    outputs = set(roots)
    for operation in operations:
        inputs = tuple(same.get(i, i) for i in operation.inputs)
        if operation.name in NO_OPERATION:
            same[operation.outputs[0]] = inputs[0]
            continue
        out = layouts[operation.outputs[0]]
        key = operation.name, inputs, operation.arguments, out.shape, out.itemsize
        before = known.get(key) if inputs else None  # equal ones are sought among users of an array
        if before is not None and outputs.isdisjoint(operation.outputs):
            same.update(zip(operation.outputs, before.outputs, strict=True))
            continue
        new = _with_inputs(operation, inputs)
        known[key] = new
        kept.append(new)
    return kept, [same.get(i, i) for i in roots]


def _with_inputs(operation: Operation, inputs: tuple[int, ...]) -> Operation:
    return Operation(
        operation.name,
        inputs,
        operation.outputs,
        operation.arguments,
        operation.opaque,
        operation.workspace_bytes,
        operation.donors,
    )


@dataclass(slots=True, eq=False)
class _Node:
    """One operation while kernels are being made."""

    operation: Operation
    inputs: list[int]

    @property
    def output(self) -> int:
        return self.operation.outputs[-1]

    @property
    def fusable(self) -> bool:
        return self.operation.name in FUSED


def fused(
    operations: Sequence[Operation], layouts: list[Layout], roots: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """Elementwise operations joined, and the arrays made twice, which ``layouts`` grows by."""
    fusion = _Fusion(operations, layouts, roots)
    return fusion.run(), fusion.copies


@dataclass(slots=True)
class _Kernel:
    """What is collected for one kernel."""

    shape: tuple[int, ...]
    nodes: dict[int, _Node] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)


class _Fusion:
    def __init__(
        self, operations: Sequence[Operation], layouts: list[Layout], roots: Sequence[int]
    ) -> None:
        self.layouts, self.roots = layouts, set(roots)
        self.copies: list[int] = []
        nodes = [_Node(operation, list(operation.inputs)) for operation in operations]
        self.maker = {i: node for node in nodes for i in node.operation.outputs}
        self.tape = list(self._depth_first(roots))
        self.parents: dict[int, list[_Node]] = {}
        for node in self.tape:
            for i in node.inputs:
                self.parents.setdefault(i, []).append(node)

    def _depth_first(self, roots: Sequence[int]) -> Iterator[_Node]:
        """Each operation after those that it needs (``compile_dfs``)."""
        seen: set[int] = set()
        for root in roots:
            stack = [(root, False)]
            while stack:
                i, done = stack.pop()
                node = self.maker.get(i)
                if node is None:
                    continue
                if done:
                    yield node
                    continue
                if id(node) in seen:
                    continue
                seen.add(id(node))
                stack.append((i, True))
                stack += [(x, False) for x in reversed(node.inputs)]

    def run(self) -> list[Operation]:
        made: list[Operation] = []
        gone: set[int] = set()
        for node in reversed(self.tape):
            if id(node) in gone:
                continue
            kernel = _Kernel(self.layouts[node.output].shape)
            if node.operation.name != "Broadcast":
                self._collect(node.output, 0, kernel)
            if len(kernel.nodes) <= 1:
                made.append(_with_inputs(node.operation, tuple(node.inputs)))
                continue
            gone |= {id(inner) for inner in kernel.nodes.values()}
            made.append(self._joined(node, kernel))
        return made[::-1]

    def _collect(self, i: int, depth: int, kernel: _Kernel) -> None:
        """Add what makes array ``i`` to the kernel, and what that needs, as far as may be."""
        if i in kernel.nodes:
            return
        node = self.maker.get(i)
        foreign = i in self.roots and self.layouts[i].shape != kernel.shape
        if depth >= MAX_DEPTH or node is None or not node.fusable or foreign:
            kernel.inputs.add(i)
            return
        if depth and any(p.output not in kernel.nodes for p in self.parents[i]):
            if node.operation.name != "Broadcast" or len(kernel.inputs) >= MAX_ARRAYS:
                kernel.inputs.add(i)
                return
            i, node = self._split(i, node, kernel)
        if i in self.roots:
            kernel.inputs.add(i)
        else:
            kernel.inputs.discard(i)
        if len(kernel.inputs) >= MAX_ARRAYS:
            return
        kernel.nodes[i] = node
        for x in list(node.inputs):
            self._collect(x, depth + 1, kernel)

    def _split(self, i: int, node: _Node, kernel: _Kernel) -> tuple[int, _Node]:
        """A broadcast of its own for the kernel."""
        self.layouts.append(self.layouts[i])
        self.copies.append(i)
        copy = len(self.layouts) - 1
        operation = Operation("Broadcast", node.operation.inputs, (copy,), node.operation.arguments)
        new = _Node(operation, list(node.inputs))
        self.maker[copy] = new
        mine = [p for p in self.parents[i] if p.output in kernel.nodes]
        self.parents[i] = [p for p in self.parents[i] if p.output not in kernel.nodes]
        self.parents[copy] = mine
        for parent in mine:
            parent.inputs = [copy if x == i else x for x in parent.inputs]
        for x in new.inputs:
            self.parents[x].append(new)
        return copy, new

    def _joined(self, last: _Node, kernel: _Kernel) -> Operation:
        order, inputs = self._ordered(last, kernel)
        outputs = [n.output for n in order[:-1] if n.output in self.roots] + [last.output]
        new = _Node(Operation("Compiled", tuple(inputs), tuple(outputs)), inputs)
        for node in order[:-1]:
            inside = self.parents.get(node.output, [])
            self.parents[node.output] = [p for p in inside if p.output not in kernel.nodes]
        for i in inputs:
            outside = [p for p in self.parents[i] if p.output not in kernel.nodes]
            self.parents[i] = [*outside, new]
        for i in outputs:
            self.maker[i] = new
        shape = self.layouts[last.output].shape
        donors = tuple(n for n, i in enumerate(inputs) if self.layouts[i].shape == shape)
        return Operation("Compiled", tuple(inputs), tuple(outputs), opaque=True, donors=donors)

    def _ordered(self, last: _Node, kernel: _Kernel) -> tuple[list[_Node], list[int]]:
        """The kernel's operations in order, and its inputs."""
        order: list[_Node] = []
        inputs: list[int] = []
        seen: set[int] = set()

        def visit(i: int) -> None:
            if i in seen:
                return
            seen.add(i)
            node = kernel.nodes.get(i)
            if node is None:
                inputs.append(i)
                return
            for x in node.inputs:
                visit(x)
            order.append(node)

        visit(last.output)
        return order, inputs
