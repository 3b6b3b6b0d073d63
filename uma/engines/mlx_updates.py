"""The update of MLX's optimizers as operations (mlx 0.32.4, ``optimizers/optimizers.py``).

Not compiled, as ``uma lora train`` runs it: new states and parameters take the place of the old.
"""

from collections.abc import Callable, Sequence
from math import prod

from uma.memory.mlx_program import Program, Value

SLICE_ELEMENTS = 1 << 20  # uma/runtime/lora/adam8bit.py, SLICE
SLICE_BYTES = 81  # for each element of a slice, measured on the CPU backend: 20 arrays of float32
ARRAYS = 48  # laid out at most: more of them are not on their way at the same time


def update_program(
    optimizer: str, arrays: Sequence[tuple[tuple[int, ...], int]]
) -> tuple[Program, list[Value]]:
    """The update of ``arrays``, of a shape and the bytes of an element; what is evaluated."""
    p = Program()
    parameters: list[Value] = []
    states: list[Value] = []
    for shape, width in arrays[-ARRAYS:]:
        gradient = p.source(*shape, width=width)
        parameter = p.source(*shape, width=width, held=False)
        new, kept = UPDATES.get(optimizer, _adam)(p, parameter, gradient)
        parameters.append(new)
        states += kept
    return p, [*parameters, *states]


def update_8bit_bytes(arrays: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """``AdamW8bit`` (``uma/runtime/lora/adam8bit.py``): array by array, in slices.

    New parameters stay beside the old ones until all are made. The last, largest array has one
    slice under way, and the new states of the others.
    """
    largest = max(prod(shape) for shape, _ in arrays)
    under_way = min(largest, SLICE_ELEMENTS)
    states = 2 * (largest - under_way)
    return sum(prod(shape) * width for shape, width in arrays) + SLICE_BYTES * under_way + states


Update = Callable[[Program, Value, Value], tuple[Value, list[Value]]]


def _state(p: Program, like: Value) -> Value:
    return p.source(*like.shape, width=like.width, held=False)


def _moving(p: Program, x: Value) -> Value:
    """A moving average, its state the old one."""
    return p.add(p.scaled(_state(p, x)), p.scaled(x))


def _adam(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    first = _moving(p, gradient)
    second = _moving(p, p.unary("Square", gradient))
    root = p.add(p.unary("Sqrt", second), p.scalar(gradient.width))
    return p.subtract(parameter, p.divide(p.scaled(first), root)), [first, second]


def _adamw(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    return _adam(p, p.scaled(parameter), gradient)


def _sgd(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    return p.subtract(parameter, p.scaled(gradient)), []


def _lion(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    old = _state(p, gradient)
    direction = p.add(p.scaled(old), p.scaled(gradient))
    new = p.add(p.scaled(old), p.scaled(gradient))
    return p.subtract(parameter, p.scaled(p.unary("Sign", direction))), [new]


def _adafactor(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    square = p.add(p.unary("Square", gradient), p.scalar(gradient.width))
    last = len(square.shape) - 1
    if last < 1:
        average = _moving(p, square)
        update = p.multiply(p.unary("Sqrt", average), gradient)
        return p.subtract(parameter, p.scaled(update)), [average]
    rows, columns = _moving(p, p.sum(square, (last,))), _moving(p, p.sum(square, (last - 1,)))
    update = p.multiply(p.expand_dims(rows, last), p.expand_dims(columns, last - 1))
    update = p.multiply(update, gradient)
    root = p.sum(p.unary("Square", update), tuple(range(last + 1)))
    update = p.scaled(p.divide(update, root))
    return p.subtract(parameter, update), [rows, columns]


def _muon(p: Program, parameter: Value, gradient: Value) -> tuple[Value, list[Value]]:
    gradient = p.add(gradient, p.scaled(parameter))
    momentum = _moving(p, gradient)
    update = p.add(p.scaled(gradient), p.scaled(momentum))
    if len(update.shape) == 2:
        update = _orthogonal(p, update)
    return p.subtract(parameter, p.scaled(update)), [momentum]


def _orthogonal(p: Program, x: Value) -> Value:
    """Five steps of Newton-Schulz (``Muon._zeropower_via_newtonschulz5``)."""
    wide = x.shape[0] > x.shape[1]
    x = p.swapped(x) if wide else x
    x = p.divide(x, p.sum(p.unary("Square", x), (0, 1)))
    for _ in range(5):
        a = p.matmul(x, p.swapped(x))
        b = p.op("AddMM", [a, a, p.scaled(a)], a.shape)
        x = p.op("AddMM", [b, x, p.scaled(x)], x.shape)
    return p.swapped(x) if wide else x


UPDATES: dict[str, Update] = {
    "adam": _adam,
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}
