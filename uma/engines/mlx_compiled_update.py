"""The update of ``mlx_lm.lora``, a part of its compiled step: mostly one kernel for an array."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from uma.engines.mlx_updates import UPDATES
from uma.memory.compile_fuse import FUSED, fused, simplified
from uma.memory.liveness import Operation
from uma.memory.mlx_program import Program, Value

# Gradients that are made in the same kernel, and zeros, which are the same for several parameters.
_SHARED = FUSED | {"Full"}


def updated(
    p: Program,
    optimizer: str,
    parameters: Sequence[Value],
    gradients: Sequence[Value],
    *,
    once: bool = False,
) -> list[Value]:
    """New parameters, the number of the step, then new states; ``once`` for arrays of a shape."""
    made: list[Value] = []
    states = [p.op("Add", [p.source(width=8), p.scalar(8)], ())]
    shared = {
        i for operation in p.operations if operation.name in _SHARED for i in operation.outputs
    }
    seen: set[object] = set()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        kernel = _kernel(optimizer, parameter.width, gradient.width)
        if gradient.number in shared:
            kernel = None
        alike = parameter.shape, parameter.width, kernel
        if once and alike in seen:
            continue
        seen.add(alike)
        if kernel is None:
            new, kept = UPDATES[optimizer](p, parameter, gradient)
        else:
            new, *kept = kernel.run(p, parameter, gradient)
        made.append(new)
        states += kept
    return [*made, *states]


def updated_at_once(optimizer: str, width: int) -> bool:
    """Whether the update of an array is one kernel, which takes its gradient as soon as it is."""
    return _kernel(optimizer, width, width) is not None


class _Kernel(NamedTuple):
    """An update as one compiled operation.

    Its ``inputs`` are those at places of parameter, gradient and ``others``, each a state or a
    number and so wide; its ``outputs`` are at places of the new parameter and states.
    """

    operation: Operation
    others: tuple[tuple[bool, int], ...]
    widths: tuple[int, ...]

    def run(self, p: Program, parameter: Value, gradient: Value) -> list[Value]:
        """The new parameter and states."""
        shape = parameter.shape
        given = [parameter, gradient]
        for state, width in self.others:
            given.append(p.source(*shape if state else (), width=width, held=not state))
        made = [p.value(shape, width) for width in self.widths]
        inputs = tuple([given[at].number for at in self.operation.inputs])
        outputs = tuple([made[at].number for at in self.operation.outputs])
        p.operations.append(self.operation._replace(inputs=inputs, outputs=outputs))
        return made


@lru_cache
def _kernel(optimizer: str, parameter_width: int, gradient_width: int) -> _Kernel | None:
    """The update of an array of any shape, if it is one kernel."""
    p, shape = Program(), (2, 3)
    parameter = p.source(*shape, width=parameter_width, held=False)
    new, states = UPDATES[optimizer](p, parameter, p.source(*shape, width=gradient_width))
    kept, roots = simplified(p.operations, p.arrays, [x.number for x in (new, *states)])
    (*_, made) = found = fused(kept, p.arrays, roots)
    if len(found) > 1:
        return None
    sources = [x.number for x in p.sources]
    inputs = tuple([sources.index(i) for i in made.inputs])
    outputs = tuple([roots.index(i) for i in made.outputs])
    others = tuple([(x.shape == shape, x.width) for x in p.sources[2:]])
    widths = tuple([x.width for x in (new, *states)])
    return _Kernel(made._replace(inputs=inputs, outputs=outputs), others, widths)
