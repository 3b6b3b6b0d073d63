"""How programs are compiled, ordered and laid out: once for those that differ in sizes only."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from uma.memory.array_layout import Layout, rows
from uma.memory.compile_fuse import fused, simplified
from uma.memory.liveness import Evaluation, Graph, Operation, effect_of, evaluation_order
from uma.memory.timeline import Kind, Numbers, Timeline, buffer_bytes, kind_of
from uma.workload import Backend

Form = tuple[int, int]
"""The number of a shape, and the bytes of an element."""


class Structure(NamedTuple):
    """What of a program decides how it is compiled, ordered and laid out, but for sizes.

    Shapes, and arguments of operations, are told apart by numbers.
    """

    operations: tuple[Operation, ...]
    arrays: tuple[Form, ...]
    sources: Numbers
    held: frozenset[int]
    roots: Numbers
    marks: Numbers = ()


class Sizes(NamedTuple):
    """The shapes and arguments of a program by number, and where it is evaluated."""

    shapes: Sequence[tuple[int, ...]]
    arguments: Sequence[tuple[Any, ...]]
    backend: Backend

    def bytes_of(self, form: Form) -> int:
        return prod(self.shapes[form[0]]) * form[1]


class Plan:
    """The operations of a structure in the order of their evaluation."""

    def __init__(self, structure: Structure, *, compiled: bool) -> None:
        operations: Sequence[Operation]
        operations, arrays, sources, held, roots, self.marks = structure
        self.arrays = list(arrays)
        if compiled:
            operations, numbers = simplified(operations, self.arrays, roots)
            operations, roots = fused(operations, self.arrays, numbers), tuple(numbers)
        self.order = evaluation_order(Graph((), operations, sources, roots, held))
        if self.marks:
            made = {i for operation in self.order for i in operation.outputs}
            self.marks = self.marks if made.issuperset(self.marks) else ()  # one is in a kernel
        self.sources, self.kept = sources, {*held, *roots}
        self.source_forms = Counter([arrays[i] for i in sources])

    def source_bytes(self, sizes: Sizes) -> int:
        return sum([count * sizes.bytes_of(form) for form, count in self.source_forms.items()])


Laid = tuple[int, ...]
"""How an array is laid out: row by row, of a form, or as an output of a sort: three numbers."""


class Sort(NamedTuple):
    """Operations of one name on inputs that are laid out alike, which do the same to memory.

    ``laid`` is how their outputs are. That, whether they share buffers, with which inputs, and
    whether they are dispatched, are the same for all sizes of a course.
    """

    operation: Operation
    inputs: tuple[Laid, ...]
    outputs: tuple[Form, ...]
    laid: tuple[Laid, ...]
    does: tuple[bool, Numbers, bool]


class Course(NamedTuple):
    """Sorts of operations, their numbers, and the timelines of plans in these numbers."""

    sorts: list[Sort]
    numbers: dict[object, int]
    timelines: dict[Plan, Timeline]


class Levels(NamedTuple):
    """Bytes above the sources: the peaks until each stop and after, those needed at each."""

    peaks: Sequence[int]
    needed: Sequence[int]


def highest(found: Sequence[Levels]) -> int:
    """The peak of all runs."""
    return max(max(levels.peaks) for levels in found)


class Case:
    """What each sort of operations does with given sizes, in the first course that it follows."""

    def __init__(self, courses: list[Course], sizes: Sizes) -> None:
        self.courses, self.sizes = courses, sizes
        self._take(0)

    def _take(self, place: int) -> None:
        if place == len(self.courses):
            self.courses.append(Course([], {}, {}))
        self.place, self.course = place, self.courses[place]
        self.kinds: list[Kind] = []
        self.layouts = _Layouts(self.sizes.shapes)

    def _follows(self) -> bool:
        """Whether the sorts do with these sizes what they do with those that made the course."""
        return all(
            self._did(known.operation, known.inputs, known.outputs) == (known.laid, known.does)
            for known in self.course.sorts[len(self.kinds) :]
        )

    def evaluation(self, plan: Plan) -> Evaluation:
        while not self._follows():
            self._take(self.place + 1)
        timelines = self.course.timelines
        if plan not in timelines:
            order = self._order(plan)
            timelines[plan] = Timeline(order, self.kinds, plan.sources, plan.kept, plan.marks)
        timeline, backend = timelines[plan], self.sizes.backend
        sizes = [buffer_bytes(self.sizes.bytes_of(form), backend) for form in plan.source_forms]
        size = dict(zip(plan.source_forms, sizes, strict=True))
        sources = [size[plan.arrays[i]] for i in timeline.sources]
        return Evaluation(timeline, self.kinds, sources, backend)

    def levels(self, plan: Plan) -> list[Levels]:
        before = plan.source_bytes(self.sizes)
        return [
            Levels([peak - before for peak in run.peaks], [size - before for size in run.needed])
            for run in self.evaluation(plan).runs()
        ]

    def _order(self, plan: Plan) -> list[tuple[int, Numbers, Numbers]]:
        """The operations of a plan as sorts with inputs and outputs."""
        sorts, numbers, _ = self.course
        laid: list[Laid] = list(plan.arrays)
        laid_of, form_of = laid.__getitem__, plan.arrays.__getitem__
        order = []
        for operation in plan.order:
            name, inputs, outputs, arguments, opaque, donors = operation
            given, made = tuple(map(laid_of, inputs)), tuple(map(form_of, outputs))
            number = numbers.setdefault((name, given, made, arguments, opaque, donors), len(sorts))
            if number == len(sorts):
                sorts.append(Sort(operation, given, made, *self._did(operation, given, made)))
            for i, found in zip(outputs, sorts[number].laid, strict=True):
                laid[i] = found
            order.append((number, inputs, outputs))
        return order

    def _did(
        self, operation: Operation, given: tuple[Laid, ...], made: tuple[Form, ...]
    ) -> tuple[tuple[Laid, ...], tuple[bool, Numbers, bool]]:
        """Add the kind of a sort; how its outputs are laid out, and what it does."""
        number, layouts = len(self.kinds), self.layouts
        inputs = tuple([layouts[x] for x in given])
        outputs = tuple([layouts[x] for x in made])
        arguments = self.sizes.arguments[operation.arguments[0]] if operation.arguments else ()
        found = effect_of(operation, arguments, inputs, outputs)
        kind = kind_of(found, inputs, outputs, self.sizes.backend)
        self.kinds.append(kind)
        laid: list[Laid] = []
        for at, (layout, row) in enumerate(zip(found.outputs, outputs, strict=True)):
            if layout == row:
                laid.append(made[at])
            else:
                laid.append((number, at, 0))
                layouts[laid[-1]] = layout
        return tuple(laid), (kind.shares, kind.donors, kind.dispatches > 0)


class _Layouts(dict[Laid, Layout]):
    """How arrays are laid out; those of a form row by row."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __missing__(self, laid: Laid) -> Layout:
        number, width = laid
        found = self[laid] = rows(self.shapes[number], width)
        return found


class Family(NamedTuple):
    """Plans of one structure, and of others that are made of the same shapes and arguments."""

    plans: dict[Hashable, Plan]
    courses: list[Course]


@lru_cache(maxsize=32)
def family_of(structure: Structure) -> Family:
    return Family({}, [])
