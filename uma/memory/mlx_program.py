"""MLX's array operations and their gradients, in shapes instead of numbers.

Each function adds the primitives that the operation of the same name makes (mlx 0.32.4,
``mlx/ops.cpp``), broadcasts and casts included; gradients are those of ``mlx/primitives.cpp``.
The graph is evaluated on paper by ``uma.memory.liveness``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from uma.memory.liveness import MAX_ACTIVE_TASKS, Operation
from uma.memory.metal_activations import MAX_OPERATIONS
from uma.memory.mlx_gradients import GRADIENTS, tape
from uma.memory.mlx_plan import Case, Levels, Plan, Sizes, Structure, family_of, highest
from uma.memory.timeline import DISPATCHES_PER_TASK
from uma.workload import Backend

Shape = tuple[int, ...]
WAITING = max(MAX_OPERATIONS + 1, MAX_ACTIVE_TASKS * DISPATCHES_PER_TASK // 2)


class Value(NamedTuple):
    """An array: its number in the program, its shape, and the bytes of an element."""

    number: int
    shape: Shape
    width: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.width


class Step(NamedTuple):
    """An operation that is differentiated, by ``backward`` where it has a gradient of its own."""

    name: str
    inputs: tuple[Value, ...]
    output: Value
    arguments: tuple[Any, ...]
    backward: "Backward | None" = None
    parts: tuple[Value, ...] = ()


# What makes one in half the time of its class, which is called for all of a step.
_value, _operation = partial(tuple.__new__, Value), partial(tuple.__new__, Operation)

Backward = Callable[[Value], Sequence[Value]]
"""Gradients of all inputs from that of the output."""


class Program:
    """Operations in the order in which they were asked for.

    Their ``arguments`` are numbered, as the ``shapes`` of arrays are: one has one number, or none.
    ``marks`` are arrays at whose making an evaluation stops to be looked at.
    """

    def __init__(self, numbered: "Program | None" = None) -> None:
        """With the numbers of another one's shapes and arguments."""
        self.shapes: dict[Shape, int] = {}
        self.arguments: dict[tuple[Any, ...], int] = {}
        if numbered is not None:
            self.shapes |= numbered.shapes
            self.arguments |= numbered.arguments
        self.arrays: list[tuple[int, int]] = []
        self.operations: list[Operation] = []
        self.steps: list[Step] = []
        self.sources: list[Value] = []
        self.passing: set[int] = set()
        self.differentiated: set[int] = set()
        self.primals: set[int] = set()
        self.numbers: dict[object, Value] = {}
        self.marks: list[int] = []

    def value(self, shape: Sequence[int], width: int) -> Value:
        shape = tuple(shape)
        number, known = len(self.arrays), self.shapes
        self.arrays.append((known.setdefault(shape, len(known)), width))
        return _value((number, shape, width))

    def source(self, *shape: int, width: int, held: bool = True) -> Value:
        """An array that exists before; without ``held`` it dies with its last use."""
        made = self.value(shape, width)
        self.sources.append(made)
        if not held:
            self.passing.add(made.number)
        return made

    def primal(self, source: Value) -> Value:
        """A tracer of ``source``, differentiated (``transforms.cpp``, ``make_tracer``)."""
        made = self.op("Copy", [source], source.shape)
        self.differentiated.add(made.number)
        self.primals.add(made.number)
        return made

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        width: int | None = None,
        arguments: tuple[Any, ...] = (),
        opaque: bool = False,
        donors: tuple[int, ...] = (),
        backward: "Backward | None" = None,
    ) -> Value:
        """One primitive with one output, as wide as its first input unless ``width`` is given.

        The arguments of an ``opaque`` one are the bytes of its workspace. A ``backward`` is what
        its gradients are where it stands for more, or for less, than its shapes say.
        """
        made = self.value(shape, inputs[0].width if width is None else width)
        numbers = tuple([x.number for x in inputs])
        known = self._numbered(arguments) if arguments else ()
        self.operations.append(_operation((name, numbers, (made.number,), known, opaque, donors)))
        if name != "StopGradient" and not self.differentiated.isdisjoint(numbers):
            self.differentiated.add(made.number)
            self.steps.append(Step(name, tuple(inputs), made, arguments, backward))
        return made

    def _numbered(self, arguments: tuple[Any, ...]) -> tuple[int]:
        return (self.arguments.setdefault(arguments, len(self.arguments)),)

    # Elementwise.

    def scalar(self, width: int, name: str = "") -> Value:
        """A number; those of one ``name`` are equal."""
        if not name:
            return self.source(width=width)
        key = name, width
        if key not in self.numbers:
            self.numbers[key] = self.source(width=width)
        return self.numbers[key]

    def astype(self, x: Value, width: int) -> Value:
        return x if x.width == width else self.op("AsType", [x], x.shape, width)

    def unary(self, name: str, x: Value) -> Value:
        return self.op(name, [x], x.shape)

    def binary(self, name: str, x: Value, y: Value) -> Value:
        if x.width != y.width:
            width = max(x.width, y.width)
            x, y = self.astype(x, width), self.astype(y, width)
        if x.shape != y.shape:
            shape = broadcast(x.shape, y.shape)
            x, y = self.broadcast_to(x, shape), self.broadcast_to(y, shape)
        return self.op(name, [x, y], x.shape)

    def add(self, x: Value, y: Value) -> Value:
        return self.binary("Add", x, y)

    def subtract(self, x: Value, y: Value) -> Value:
        return self.binary("Subtract", x, y)

    def multiply(self, x: Value, y: Value) -> Value:
        return self.binary("Multiply", x, y)

    def divide(self, x: Value, y: Value) -> Value:
        return self.binary("Divide", x, y)

    def compared(self, name: str, x: Value, y: Value) -> Value:
        shape = broadcast(x.shape, y.shape)
        sides = [self.broadcast_to(side, shape) for side in (x, y)]
        return self.op(name, sides, shape, 1)

    def scaled(self, x: Value, name: str = "") -> Value:
        """``x`` times a number."""
        return self.multiply(self.scalar(x.width, name), x)

    def where(self, mask: Value, x: Value) -> Value:
        """``x`` where ``mask`` is set, else a number."""
        other = self.broadcast_to(self.scalar(x.width, "least"), x.shape)
        return self.op("Select", [self.broadcast_to(mask, x.shape), x, other], x.shape, x.width)

    def stop_gradient(self, x: Value) -> Value:
        return self.op("StopGradient", [x], x.shape)

    def compiled(self, *inputs: Value) -> Value:
        """One kernel of elementwise operations, as a compiled function runs outside gradients."""
        donors = tuple(range(len(inputs)))
        return self.op("Compiled", inputs, inputs[0].shape, opaque=True, donors=donors)

    # Shapes.

    def broadcast_to(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == shape else self.op("Broadcast", [x], shape, None, (shape,))

    def reshape(self, x: Value, *shape: int) -> Value:
        return x if x.shape == shape else self.op("Reshape", [x], shape)

    def flatten(self, x: Value, first: int, last: int) -> Value:
        if first == last:
            return x
        shape = (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
        return self.op("Flatten", [x], shape)

    def unflatten(self, x: Value, axis: int, parts: Shape) -> Value:
        return self.op("Unflatten", [x], (*x.shape[:axis], *parts, *x.shape[axis + 1 :]))

    def transpose(self, x: Value, *axes: int) -> Value:
        return self.op("Transpose", [x], [x.shape[a] for a in axes], None, (axes,))

    def swapped(self, x: Value) -> Value:
        """The last two axes exchanged."""
        n = len(x.shape)
        return self.transpose(x, *range(n - 2), n - 1, n - 2)

    def expand_dims(self, x: Value, axis: int) -> Value:
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        return self.op("ExpandDims", [x], shape, None, ((axis,),))

    def squeeze(self, x: Value, axes: Shape) -> Value:
        if not axes:
            return x
        shape = [dim for i, dim in enumerate(x.shape) if i not in axes]
        return self.op("Squeeze", [x], shape, None, (axes,))

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """``x[start:stop]`` along ``axis``."""
        if (start, stop) == (0, x.shape[axis]):
            return x
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        first = (*(0 for _ in x.shape[:axis]), start, *(0 for _ in x.shape[axis + 1 :]))
        end = tuple(a + b for a, b in zip(first, shape, strict=True))
        return self.op("Slice", [x], shape, None, (first, end, (1,) * len(shape)))

    def every_other(self, x: Value, first: int) -> Value:
        """``x[..., first::2]``."""
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        start = (*(0 for _ in x.shape[:-1]), first)
        steps = (*(1 for _ in x.shape[:-1]), 2)
        return self.op("Slice", [x], shape, None, (start, x.shape, steps))

    def split(self, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
        """Views of ``sizes`` along ``axis``; their gradients are joined."""
        shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
        made = tuple(self.value(shape, x.width) for shape in shapes)
        numbers = tuple(part.number for part in made)
        known = self._numbered((axis,))
        self.operations.append(Operation("Split", (x.number,), numbers, known))
        if x.number in self.differentiated:
            self.differentiated.update(numbers)
            self.steps.append(Step("Split", (x,), made[0], (axis,), parts=made))
        return list(made)

    def concatenate(self, parts: Sequence[Value], axis: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return self.op("Concatenate", parts, shape, None, (axis,))

    def padded(self, x: Value, axis: int, count: int) -> Value:
        """``count`` zeros before ``x`` along ``axis``."""
        shape = (*x.shape[:axis], x.shape[axis] + count, *x.shape[axis + 1 :])
        return self.op("Pad", [x, self.scalar(x.width, "zero")], shape, None, (axis, count))

    def depends(self, x: Value, *done: Value) -> Value:
        return self.op("Depends", [x, *done], x.shape) if done else x

    def awaited(self, x: Value) -> Value:
        """``x`` after as many small operations as may wait on the device."""
        last = self.depends(self.scalar(x.width), x)
        for _ in range(WAITING):
            last = self.unary("Negative", last)
        return self.depends(x, last)

    def all_depend(self, values: Sequence[Value], done: Value) -> list[Value]:
        """``values``, none of which can be read before ``done``: one operation for all."""
        made = [self.value(x.shape, x.width) for x in values]
        numbers = tuple(x.number for x in (*values, done))
        self.operations.append(Operation("Depends", numbers, tuple(x.number for x in made)))
        return made

    def zeros(self, shape: Shape, width: int) -> Value:
        return self.op("Full", [self.broadcast_to(self.scalar(width, "zero"), shape)], shape)

    def arange(self, length: int) -> Value:
        return self.op("Arange", [], (length,), 4, (length,))

    # Reductions, products, rows by index.

    def sum(self, x: Value, axes: Shape, *, keepdims: bool = False) -> Value:
        shape = [1 if i in axes else dim for i, dim in enumerate(x.shape)]
        total = self.op("Reduce", [x], shape)
        return total if keepdims else self.squeeze(total, axes)

    def softmax(self, x: Value) -> Value:
        return self.unary("Softmax", x)

    def matmul(self, x: Value, y: Value) -> Value:
        width = max(x.width, y.width)
        x, y = self.astype(x, width), self.astype(y, width)
        if len(x.shape) > 2 and len(y.shape) == 2:
            flat = self.flatten(x, 0, len(x.shape) - 2)
            out = self.op("Matmul", [flat, y], (flat.shape[0], y.shape[1]))
            return self.unflatten(out, 0, x.shape[:-1])
        lead = broadcast(x.shape[:-2], y.shape[:-2])
        x = self.broadcast_to(x, (*lead, *x.shape[-2:]))
        y = self.broadcast_to(y, (*lead, *y.shape[-2:]))
        return self.op("Matmul", [x, y], (*lead, x.shape[-2], y.shape[-1]))

    def quantized_matmul(self, x: Value, weight: Value, columns: int) -> Value:
        """A product with packed weights; ``weight`` stands for them, their scales and biases."""
        return self.op("QuantizedMatmul", [x, weight], (*x.shape[:-1], columns))

    def take(self, x: Value, index: Value) -> Value:
        """Rows of ``x`` by ``index``, along its first axis."""
        shape = (*index.shape, *x.shape[1:])
        found = self.op("Gather", [x, index], (*index.shape, 1, *x.shape[1:]))
        return self.op("Squeeze", [found], shape, None, ((len(index.shape),),))

    def take_along_axis(self, x: Value, index: Value) -> Value:
        """By ``index`` along the last axis."""
        return self.op("GatherAxis", [x, index], index.shape)

    def gather_mm(self, x: Value, matrices: Value, index: Value) -> Value:
        """``(rows, 1, columns)`` times the matrix that ``index`` names, in sorted order."""
        shape = (*index.shape, x.shape[-2], matrices.shape[-1])
        width = max(x.width, matrices.width)
        x, matrices = self.astype(x, width), self.astype(matrices, width)
        left = self.op("Arange", [], index.shape, 4, (index.shape,))
        return self.op("GatherMM", [x, matrices, left, index], shape)

    # Differentiation and evaluation.

    def vjp(
        self,
        pairs: Sequence[tuple[Value, Value]],
        wanted: Sequence[Value],
        *,
        in_order: bool = True,
    ) -> list[Value]:
        """Gradients of ``wanted`` from those of outputs, ``pairs`` of an output and its own.

        Unless ``in_order`` they are not asked for in the order of MLX's tape: where sizes count.
        """
        found = {output.number: gradient for output, gradient in pairs}
        taken, self.steps = self.steps, []
        differentiated, self.differentiated = self.differentiated, set()
        if in_order:
            taken = tape([output.number for output, _ in pairs], taken, self.operations)
        for step in reversed(taken):
            gradient = self._given(step, found)
            if gradient is None:
                continue
            own = None if step.backward is None else step.backward(gradient)
            for place, x in enumerate(step.inputs):
                if x.number not in differentiated:
                    continue
                new = own[place] if own else GRADIENTS[step.name](self, step, gradient, place)
                before = found.get(x.number)
                found[x.number] = new if before is None else self.add(before, new)
        return [found.get(x.number) or self.zeros(x.shape, x.width) for x in wanted]

    def _given(self, step: Step, found: dict[int, Value]) -> Value | None:
        """The gradient of a step's output; of the parts of a ``Split`` joined, zeros for others."""
        if not step.parts or found.keys().isdisjoint(part.number for part in step.parts):
            own = found.pop(step.output.number, None)
            if own is None or own.shape == step.output.shape:
                return own
            return own._replace(shape=step.output.shape)  # it is of what is read as other rows
        given = [found.pop(part.number, None) for part in step.parts]
        whole = [
            self.zeros(part.shape, part.width) if g is None else g
            for part, g in zip(step.parts, given, strict=True)
        ]
        return self.concatenate(whole, step.arguments[0])

    def custom(
        self, run: Callable[[], Value], backward: Backward, inputs: Sequence[Value]
    ) -> Value:
        """A function of ``inputs``, known when it has run, with a gradient of its own.

        ``mx.custom_function``, ``mx.checkpoint``.
        """
        steps, differentiated = self.steps, self.differentiated
        self.steps, self.differentiated = [], set()
        out = run()
        self.steps, self.differentiated = steps, differentiated | self.primals
        made = self.op("CustomTransforms", [out, *inputs], out.shape)
        if made.number in self.differentiated:
            self.steps.pop()
            self.steps.append(Step("CustomTransforms", tuple(inputs), made, (), backward))
        return made

    def structure(self, roots: Sequence[Value]) -> Structure:
        sources = tuple([x.number for x in self.sources])
        return Structure(
            tuple(self.operations),
            tuple(self.arrays),
            sources,
            frozenset(sources) - self.passing,
            tuple([x.number for x in roots]),
            tuple(self.marks),
        )

    def sizes(self, backend: Backend) -> Sizes:
        return Sizes(list(self.shapes), list(self.arguments), backend)

    def above(self, roots: Sequence[Value], backend: Backend, *, compiled: bool = False) -> int:
        """The peak of evaluating ``roots``, or what ``mx.compile`` makes of it, above sources."""
        return highest(self.levels(roots, backend, compiled=compiled))

    def levels(
        self, roots: Sequence[Value], backend: Backend, *, compiled: bool = False
    ) -> list[Levels]:
        """Those of its runs."""
        structure = self.structure(roots)
        family, key = family_of(structure), ("itself", compiled)
        if key not in family.plans:
            family.plans[key] = Plan(structure, compiled=compiled)
        return Case(family.courses, self.sizes(backend)).levels(family.plans[key])


def broadcast(x: Shape, y: Shape) -> Shape:
    """The shape that both are stretched to.

    >>> broadcast((4, 1, 3), (2, 1))
    (4, 2, 3)
    """
    if not x or not y:
        return x or y
    length = max(len(x), len(y))
    x, y = (1,) * (length - len(x)) + x, (1,) * (length - len(y)) + y
    return tuple(b if a == 1 else a for a, b in zip(x, y, strict=True))
