"""How a program is compiled, ordered and evaluated on paper; kept for programs of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from uma.memory.compile_fuse import fused, simplified
from uma.memory.liveness import (
    DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    Graph,
    Operation,
    evaluation_order,
    peak,
)
from uma.workload import Backend

if TYPE_CHECKING:
    from uma.memory.mlx_program import Program

STARTS_APART = 2  # of the dispatches that a first task may hold already, those that are tried


@dataclass(frozen=True, slots=True)
class Structure:
    """What of a program decides how it is compiled and in which order it runs, but for sizes.

    Equal shapes and arguments have equal numbers.
    """

    operations: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]
    arrays: tuple[tuple[int, int], ...]
    roots: tuple[int, ...]
    program: Program = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Compiled operations in their order, the arrays that are made twice, the roots."""

    order: list[Operation]
    copies: tuple[int, ...]
    roots: tuple[int, ...]


def structure_of(program: Program, roots: tuple[int, ...]) -> Structure:
    shapes: dict[object, int] = {}
    arguments: dict[object, int] = {}
    arrays = tuple(
        (shapes.setdefault(layout.shape, len(shapes)), layout.itemsize)
        for layout in program.layouts
    )
    operations = tuple(
        (o.name, o.inputs, o.outputs, arguments.setdefault(o.arguments, len(arguments)))
        for o in program.operations
    )
    return Structure(operations, arrays, roots, program)


@lru_cache(maxsize=16)
def compiled_plan(structure: Structure) -> Plan:
    """The plan of one structure, the same for all lengths, batches and ranks."""
    program = structure.program
    layouts = list(program.layouts)
    operations, roots = simplified(program.operations, layouts, structure.roots)
    made, copies = fused(operations, layouts, roots)
    sources = tuple(x.number for x in program.sources)
    graph = Graph(layouts, tuple(made), sources, tuple(roots), frozenset())
    return Plan(evaluation_order(graph), tuple(copies), tuple(roots))


def peak_anywhere(graph: Graph, order: Sequence[Operation], backend: Backend) -> int:
    """The peak of evaluating ``graph`` in ``order``, wherever the first task begins.

    On the CPU up to ten tasks of ten dispatches wait, and the first is begun already.
    """
    if backend == "metal":
        return peak(graph, order, backend).size_bytes
    return max(
        peak(graph, order, tasks_ahead=MAX_ACTIVE_TASKS, dispatched=start).size_bytes
        for start in range(0, DISPATCHES_PER_TASK, STARTS_APART)
    )
