"""What ``mx.compile`` makes of a graph: equal operations once, elementwise ones as one kernel.

The rules of mlx 0.32.4, ``mlx/compile.cpp`` (``compile_simplify``, ``compile_fuse``), on names and
shapes alone.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from uma.memory.liveness import Operation

Form = TypeVar("Form", bound=tuple[Hashable, int])
"""The shape of an array, or what stands for it, and the bytes of an element."""

MAX_DEPTH = 11  # compile.cpp, max_compile_depth
MAX_ARRAYS = 24  # max_compile_arrays
NO_OPERATION = ("Copy", "StopGradient")
# compile.cpp: is_unary, is_binary, is_ternary, is_broadcast
_FUSED = """
Abs AsType Ceil Cos Cosh Erf Exp Expm1 Floor Log Log1p LogicalNot Negative Round Sigmoid Sign Sin
Square Sqrt Tanh Add BitwiseBinary Divide Equal Greater GreaterEqual Less LessEqual LogicalAnd
LogicalOr LogAddExp Maximum Minimum Multiply NotEqual Power Subtract Select Broadcast
"""
FUSED = frozenset(_FUSED.split())
_HEADS = FUSED - {"Broadcast"}


def simplified(
    operations: Sequence[Operation], arrays: Sequence[Form], roots: Sequence[int]
) -> tuple[list[Operation], list[int]]:
    """Without operations that do nothing, and with equal ones merged; the roots' new numbers."""
    same: dict[int, int] = {}
    known: dict[object, Operation] = {}
    kept: list[Operation] = []
    outputs = set(roots)
    for operation in operations:
        name, inputs, made, arguments, *_ = operation
        if not same.keys().isdisjoint(inputs):
            inputs = tuple([same.get(i, i) for i in inputs])
            operation = Operation(name, inputs, *operation[2:])
        if name in NO_OPERATION:
            same[made[0]] = inputs[0]
            continue
        if inputs:  # equal ones are sought among users of an array
            before = known.setdefault((name, inputs, arguments, arrays[made[0]]), operation)
            if before is not operation:
                if outputs.isdisjoint(made):
                    same.update(zip(made, before.outputs, strict=True))
                    continue
                known[name, inputs, arguments, arrays[made[0]]] = operation
        kept.append(operation)
    return kept, [same.get(i, i) for i in roots]


def fused(
    operations: Sequence[Operation], arrays: list[Form], roots: Sequence[int]
) -> list[Operation]:
    """Elementwise operations joined; ``arrays`` grows by those that are made twice."""
    return _Fusion(operations, arrays, roots).run()


class _Kernel:
    """What is collected for one kernel: its operations by what they make, and what they read."""

    def __init__(self, shape: Hashable) -> None:
        self.shape = shape
        self.operations: dict[int, Operation] = {}
        self.inputs: set[int] = set()


class _Fusion(Generic[Form]):
    """Operations while kernels are made, each told by its last output."""

    def __init__(
        self, operations: Sequence[Operation], arrays: list[Form], roots: Sequence[int]
    ) -> None:
        self.arrays, self.roots = arrays, set(roots)
        self.tape: list[int] = []  # the last output of each, those that need others first
        self.maker: dict[int, Operation] = {}
        self.users: defaultdict[int, set[int]] = defaultdict(set)
        needed = set(roots)
        for operation in reversed(operations):  # each comes after those that it needs
            if needed.isdisjoint(operation.outputs):
                continue
            needed.update(operation.inputs)
            last = operation.outputs[-1]
            self.tape.append(last)
            for i in operation.outputs:
                self.maker[i] = operation
            for i in operation.inputs:
                self.users[i].add(last)

    def run(self) -> list[Operation]:
        made: list[Operation] = []
        gone: set[int] = set()
        for last in self.tape:
            if last in gone:
                continue
            if self.maker[last].name in _HEADS:
                kernel = _Kernel(self.arrays[last][0])
                self._collect(last, 0, kernel)
                if len(kernel.operations) > 1:
                    gone.update(kernel.operations)
                    self._join(last, kernel)
            made.append(self.maker[last])
        return made[::-1]

    def _collect(self, i: int, depth: int, kernel: _Kernel) -> None:
        """Add what makes array ``i`` to the kernel, and what that needs, as far as may be."""
        if i in kernel.operations:
            return
        made = self.maker.get(i)
        foreign = i in self.roots and self.arrays[i][0] != kernel.shape
        if depth >= MAX_DEPTH or made is None or made.name not in FUSED or foreign:
            kernel.inputs.add(i)
            return
        if depth and not self.users[i] <= kernel.operations.keys():
            if made.name != "Broadcast" or len(kernel.inputs) >= MAX_ARRAYS:
                kernel.inputs.add(i)
                return
            i = self._split(i, made, kernel)
        if i in self.roots:
            kernel.inputs.add(i)
        else:
            kernel.inputs.discard(i)
        if len(kernel.inputs) >= MAX_ARRAYS:
            return
        kernel.operations[i] = self.maker[i]
        for x in made.inputs:
            self._collect(x, depth + 1, kernel)

    def _split(self, i: int, broadcast: Operation, kernel: _Kernel) -> int:
        """A broadcast of its own for the kernel."""
        copy = len(self.arrays)
        self.arrays.append(self.arrays[i])
        self.maker[copy] = broadcast._replace(outputs=(copy,))
        self.users[copy] = self.users[i] & kernel.operations.keys()
        self.users[i] -= self.users[copy]
        for user in self.users[copy]:
            inputs = tuple([copy if x == i else x for x in self.maker[user].inputs])
            changed = self.maker[user]._replace(inputs=inputs)
            self.maker[user] = kernel.operations[user] = changed
        for x in broadcast.inputs:
            self.users[x].add(copy)
        return copy

    def _join(self, last: int, kernel: _Kernel) -> None:
        """The kernel as the maker of what others need of it."""
        order, inputs = _ordered(last, kernel)
        outputs = [i for i in order[:-1] if i in self.roots] + [last]
        donors = [at for at, i in enumerate(inputs) if self.arrays[i][0] == kernel.shape]
        joined = Operation("Compiled", tuple(inputs), tuple(outputs), (), True, tuple(donors))
        for i in (*order[:-1], *inputs):
            self.users[i].difference_update(kernel.operations)
        for i in inputs:
            self.users[i].add(last)
        for i in outputs:
            self.maker[i] = joined


def _ordered(last: int, kernel: _Kernel) -> tuple[list[int], list[int]]:
    """What the kernel's operations make in their order, and its inputs."""
    order: list[int] = []
    inputs: list[int] = []
    seen: set[int] = set()

    def visit(i: int) -> None:
        if i in seen:
            return
        seen.add(i)
        if i not in kernel.operations:
            inputs.append(i)
            return
        for x in kernel.operations[i].inputs:
            visit(x)
        order.append(i)

    visit(last)
    return order, inputs
