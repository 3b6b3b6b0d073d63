"""Programs that are laid out once for many sizes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from uma.memory.mlx_plan import Case, Family, Levels, Plan, Sizes, Structure, family_of, highest
from uma.memory.mlx_program import Program, Value
from uma.workload import Backend

Asked = TypeVar("Asked")
"""What gives a program its sizes: a workload."""

LayOut = Callable[[Program, Asked], Sequence[Value]]
"""Adds operations of such sizes to a program; what is evaluated."""

_arguments, _but_arguments = itemgetter(3), itemgetter(0, 1, 2, 4, 5)  # of an Operation
_shape, _width = itemgetter(0), itemgetter(1)  # of a Form


class _Laid(NamedTuple, Generic[Asked]):
    """A program with what was asked, and its structure."""

    program: Program
    asked: Asked
    structure: Structure


class Sample(Generic[Asked]):
    """A program with all shapes and arguments of others, whose sizes it tells.

    So the others are laid out, compiled and ordered once: for all sizes with which the same is done
    in the sample. That with one layer of each kind stands for those with many layers. Its numbers
    are those of sizes ``apart``, of which none are equal by chance, where some are: they may be if
    ``by_chance`` says so. ``key`` tells the sample itself from others, where it is evaluated too.
    """

    def __init__(
        self,
        lay_out: LayOut[Asked],
        asked: Asked,
        apart: Asked,
        backend: Backend,
        *,
        by_chance: bool,
        key: Hashable = None,
    ) -> None:
        self.backend, self._lay_out, self._sizes_apart = backend, lay_out, apart
        self._own = self._laid(asked)
        sizes, own = self._own.program.sizes(backend), self._own.structure
        known = _known(_skeleton(own))
        for self.structure, self.family in known:
            if found := _in_numbers_of(self.structure, own, sizes):
                break
        else:
            self.structure, found = own, sizes
            other = self._apart.structure if by_chance else own
            if _skeleton(other) == _skeleton(own) and (alike := _in_numbers_of(other, own, sizes)):
                self.structure, found = other, alike
            self.family = family_of(self.structure)
            known.append((self.structure, self.family))
        self.case = Case(self.family.courses, found)
        if key is not None and key not in self.family.plans:
            self.family.plans[key] = Plan(self.structure, compiled=False)

    def _laid(self, asked: Asked) -> _Laid[Asked]:
        program = Program()
        return _Laid(program, asked, program.structure(self._lay_out(program, asked)))

    @cached_property
    def _apart(self) -> _Laid[Asked]:
        return self._laid(self._sizes_apart)

    def above(self, key: Hashable, lay_out: LayOut[Asked], *, compiled: bool = False) -> int:
        """The peak of the program that ``key`` tells from others, above its sources."""
        return highest(self.levels(key, lay_out, compiled=compiled))

    def levels(
        self, key: Hashable, lay_out: LayOut[Asked], *, compiled: bool = False
    ) -> list[Levels]:
        """Those of its runs."""
        if key not in self.family.plans:
            laid = self._own if self._own.structure == self.structure else self._apart
            program, roots = _added(laid, lay_out)
            ours = laid.program.shapes, laid.program.arguments
            if laid.structure != self.structure or (program.shapes, program.arguments) != ours:
                program, roots = _added(self._own, lay_out)  # it has sizes of its own
                return program.levels(roots, self.backend, compiled=compiled)
            self.family.plans[key] = Plan(program.structure(roots), compiled=compiled)
        return self.case.levels(self.family.plans[key])


def _added(laid: _Laid[Asked], lay_out: LayOut[Asked]) -> tuple[Program, Sequence[Value]]:
    """Another program in its numbers, and what is evaluated of it."""
    program = Program(laid.program)
    return program, lay_out(program, laid.asked)


@lru_cache(maxsize=32)
def _known(skeleton: Hashable) -> list[tuple[Structure, Family]]:
    """Structures that have it, as they come."""
    return []


def _skeleton(structure: Structure) -> Hashable:
    """What of a structure does not name shapes and arguments."""
    operations, arrays, *rest = structure
    return tuple(map(_but_arguments, operations)), tuple(map(_width, arrays)), *rest


def _in_numbers_of(other: Structure, own: Structure, sizes: Sizes) -> Sizes | None:
    """The ``sizes`` of a structure in the numbers of one that has the same skeleton.

    ``None`` where several of its own have one number there, or where it has operations that are
    equal and there are not.
    """
    shapes = _renamed(map(_shape, other.arrays), map(_shape, own.arrays))
    arguments = _renamed(map(_arguments, other.operations), map(_arguments, own.operations))
    if shapes is None or arguments is None:
        return None
    fewer = len(sizes.shapes) < len(shapes) or len(set(arguments.values())) < len(arguments)
    if fewer and _distinct(own) < _distinct(other):
        return None
    arguments.pop((), None)
    return Sizes(
        [sizes.shapes[shapes[number]] for number in sorted(shapes)],
        [sizes.arguments[arguments[number][0]] for number in sorted(arguments)],
        sizes.backend,
    )


Name = TypeVar("Name", bound=Hashable)


def _renamed(names: Iterable[Name], others: Iterable[Name]) -> dict[Name, Name] | None:
    """The other of each name, if it has one."""
    pairs = set(zip(names, others, strict=True))
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def _distinct(structure: Structure) -> int:
    """Operations that are not equal to others."""
    arrays = structure.arrays
    return len(
        {(o.name, o.inputs, o.arguments, arrays[o.outputs[0]]) for o in structure.operations}
    )
