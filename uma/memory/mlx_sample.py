"""Programs that are laid out once for many sizes."""

from collections.abc import Callable, Hashable, Sequence

from uma.memory.mlx_plan import Case, Levels, Plan, family_of, highest
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend

LayOut = Callable[[Program], Sequence[Value]]
"""Adds operations to a program; what is evaluated."""


class Sample:
    """A program with all shapes and arguments of others, whose sizes it tells.

    So the others are laid out, compiled and ordered once: for all sizes with which the structure of
    the sample is the same. That with one layer of each kind stands for those with many layers.
    ``key`` tells the sample itself from others, where it is evaluated too.
    """

    def __init__(self, lay_out: LayOut, backend: Backend, key: Hashable = None) -> None:
        self.program, self.backend = Program(), backend
        structure = self.program.structure(lay_out(self.program))
        self.family = family_of(structure)
        if key is not None and key not in self.family.plans:
            self.family.plans[key] = Plan(structure, compiled=False)
        self.case = Case(self.family.courses, self.program.sizes(backend))

    def above(self, key: Hashable, lay_out: LayOut, *, compiled: bool = False) -> int:
        """The peak of the program that ``key`` tells from others, above its sources."""
        return highest(self.levels(key, lay_out, compiled=compiled))

    def levels(self, key: Hashable, lay_out: LayOut, *, compiled: bool = False) -> list[Levels]:
        """Those of its runs."""
        if key not in self.family.plans:
            program = Program(self.program)
            roots = lay_out(program)
            ours = self.program.shapes, self.program.arguments
            if (program.shapes, program.arguments) != ours:  # it has sizes of its own
                return program.levels(roots, self.backend, compiled=compiled)
            self.family.plans[key] = Plan(program.structure(roots), compiled=compiled)
        return self.case.levels(self.family.plans[key])
