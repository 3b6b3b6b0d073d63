"""Gradients of MLX's primitives, in shapes (mlx 0.32.4, ``mlx/primitives.cpp``, ``vjp``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uma.memory.liveness import Operation
    from uma.memory.mlx_program import Program, Step, Value

    Gradient = Callable[[Program, Step, Value, int], Value]
    """Of the input at a place, from that of the output."""


def tape(
    outputs: Sequence[int], steps: Sequence[Step], operations: Sequence[Operation]
) -> list[Step]:
    """Each step after those that it needs, depth-first (``mlx/transforms.cpp``, ``vjp``)."""
    if not steps:
        return []
    made: dict[int, Step] = {}
    for step in steps:
        for x in step.parts or (step.output,):
            made[x.number] = step
    inputs: dict[int, tuple[int, ...]] = {}
    for operation in reversed(operations):
        if operation.outputs[-1] < steps[0].output.number:
            break
        for i in operation.outputs:
            inputs[i] = operation.inputs
    found: dict[int, Step] = {}
    seen: set[int] = set()
    waiting = [*reversed(outputs)]
    while waiting:
        i = waiting.pop()
        if i < 0:  # what it needs is there
            found[id(made[~i])] = made[~i]
        elif i not in seen and i in inputs:
            seen.add(i)
            if i in made:
                waiting.append(~i)
            waiting += reversed(inputs[i])
    return list(found.values())


def _broadcast(p: Program, step: Step, g: Value, _: int) -> Value:
    shape = step.inputs[0].shape
    new = len(g.shape) - len(shape)
    axes = tuple(i for i, dim in enumerate(g.shape) if i < new or dim != shape[i - new])
    return p.squeeze(p.sum(g, axes, keepdims=True) if axes else g, tuple(range(new)))


def _multiply(p: Program, step: Step, g: Value, place: int) -> Value:
    return p.multiply(step.inputs[1 - place], g)


def _log_sum_exp(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.multiply(g, p.softmax(step.inputs[0]))


def _divide(p: Program, step: Step, g: Value, place: int) -> Value:
    x, y = step.inputs
    if place == 0:
        return p.divide(g, y)
    return p.unary("Negative", p.divide(p.multiply(g, x), p.unary("Square", y)))


def _power(p: Program, step: Step, g: Value, _: int) -> Value:
    x, exponent = step.inputs
    lower = p.binary("Power", x, p.subtract(exponent, p.scalar(x.width)))
    return p.multiply(g, p.multiply(lower, exponent))


def _log_add_exp(p: Program, step: Step, g: Value, _: int) -> Value:
    """Of the first input."""
    return p.multiply(g, p.unary("Sigmoid", p.subtract(*step.inputs)))


def _extremum(p: Program, step: Step, g: Value, _: int) -> Value:
    """Of the first input."""
    name = "Greater" if step.name == "Maximum" else "Less"
    return p.multiply(g, p.astype(p.op(name, step.inputs, g.shape, 1), g.width))


def _matmul(p: Program, step: Step, g: Value, place: int) -> Value:
    if place == 0:
        return p.matmul(g, p.swapped(step.inputs[1]))
    return p.matmul(p.swapped(step.inputs[0]), g)


def _sigmoid(p: Program, step: Step, g: Value, _: int) -> Value:
    slope = p.multiply(step.output, p.subtract(p.scalar(g.width, "one"), step.output))
    return p.multiply(g, slope)


def _tanh(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.divide(g, p.unary("Square", p.unary("Cosh", step.inputs[0])))


def _softmax(p: Program, step: Step, g: Value, _: int) -> Value:
    product = p.multiply(step.output, g)
    total = p.sum(product, (len(g.shape) - 1,), keepdims=True)
    return p.subtract(product, p.multiply(step.output, total))


def _rsqrt(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.multiply(p.scaled(g), p.divide(step.output, step.inputs[0]))


def _slice(p: Program, step: Step, g: Value, _: int) -> Value:
    x = step.inputs[0]
    return p.op("SliceUpdate", [p.zeros(x.shape, x.width), g], x.shape)


def _concatenate(p: Program, step: Step, g: Value, place: int) -> Value:
    axis = step.arguments[0]
    start = sum(x.shape[axis] for x in step.inputs[:place])
    return p.slice(g, axis, start, start + step.inputs[place].shape[axis])


def _transposed(p: Program, step: Step, g: Value, _: int) -> Value:
    axes = step.arguments[0]
    return p.transpose(g, *(axes.index(i) for i in range(len(axes))))


def _scattered(p: Program, step: Step, g: Value, _: int) -> Value:
    x, index = step.inputs
    name = "ScatterAxis" if step.name == "GatherAxis" else "Scatter"
    return p.op(name, [p.zeros(x.shape, x.width), index, g], x.shape)


def _gather_mm(p: Program, step: Step, g: Value, place: int) -> Value:
    x, matrices, _, index = step.inputs
    if place == 0:
        return p.gather_mm(g, p.swapped(matrices), index)
    count = matrices.shape[0]
    ones = p.broadcast_to(p.scalar(4, "one"), index.shape)
    ends = p.op("ScatterAxis", [p.zeros((count,), 4), index, ones], (count,))
    ends = p.op("Scan", [ends], (count,))
    ends = p.concatenate([p.source(1, width=4), ends], 0)
    ends = p.op("AsStrided", [ends], (count, 2), None, (ends.shape, (1, 1), 0))
    by_rows = p.transpose(p.flatten(g, 0, len(g.shape) - 2), 1, 0)
    given = [by_rows, p.flatten(x, 0, len(x.shape) - 2), ends]
    made = p.op("SegmentedMM", given, (count, matrices.shape[2], matrices.shape[1]))
    return p.swapped(made)


def _reversed_scan(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.op("Scan", [g], g.shape)


def _unpadded(p: Program, step: Step, g: Value, _: int) -> Value:
    axis, count = step.arguments
    return p.slice(g, axis, count, g.shape[axis])


def _convolution(p: Program, step: Step, g: Value, place: int) -> Value:
    """Of one group for each channel."""
    x, weight = step.inputs
    rows, length, channels = x.shape
    if place == 0:
        turned = p.reshape(weight, channels, 1, weight.shape[1], 1)
        turned = p.flatten(p.transpose(turned, 0, 3, 2, 1), 0, 1)
        # It takes the slow way, which makes nothing (backend/cpu/conv.cpp, conv_1D_cpu).
        return p.op("Convolution", [g, turned], x.shape, opaque=True)
    x = p.transpose(p.reshape(x, rows, length, channels, 1), 3, 1, 2, 0)
    given = [p.flatten(x, 2, 3), p.transpose(g, 2, 1, 0)]
    shape = 1, weight.shape[1], channels
    return p.transpose(p.op("Convolution", given, shape, None, step.arguments), 2, 1, 0)


def _cross_entropy(p: Program, step: Step, g: Value, _: int) -> Value:
    """A kernel on the GPU, over its logits where nothing else needs them."""
    logits = step.inputs[0]
    given = [*step.inputs, step.output, g]
    return p.op("CrossEntropyVJP", given, logits.shape, logits.width, opaque=True, donors=(0,))


def _norm(p: Program, step: Step, g: Value, place: int) -> Value:
    """Metal's kernel for both gradients (``mlx/backend/metal/normalization.cpp``)."""
    x = step.inputs[0]
    donors = (0, len(step.inputs))
    by_x = p.op("RMSNormVJP", [*step.inputs, g], x.shape, opaque=True, donors=donors)
    return by_x if place == 0 else p.sum(by_x, tuple(range(len(x.shape) - 1)))


def _turned_back(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.op("RoPE", [g], g.shape, opaque=True, donors=(0,))


def _quantized(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.quantized_matmul(g, step.inputs[1], step.inputs[0].shape[-1])


def _selected(p: Program, step: Step, g: Value, _: int) -> Value:
    return p.multiply(p.astype(step.inputs[0], g.width), g)


GRADIENTS: dict[str, Gradient] = {
    **dict.fromkeys(("Add", "Copy", "Depends", "Contiguous", "Split"), lambda p, step, g, place: g),
    "AsType": lambda p, step, g, place: p.astype(g, step.inputs[0].width),
    "Broadcast": _broadcast,
    "Concatenate": _concatenate,
    "Convolution": _convolution,
    "CrossEntropy": _cross_entropy,
    "Divide": _divide,
    "Exp": lambda p, step, g, place: p.multiply(g, step.output),
    "ExpandDims": lambda p, step, g, place: p.squeeze(g, step.arguments[0]),
    "Gather": _scattered,
    "GatherAxis": _scattered,
    "GatherMM": _gather_mm,
    "LogAddExp": _log_add_exp,
    "LogSumExp": _log_sum_exp,
    "Matmul": _matmul,
    **dict.fromkeys(("Maximum", "Minimum"), _extremum),
    "Multiply": _multiply,
    "Negative": lambda p, step, g, place: p.unary("Negative", g),
    "Pad": _unpadded,
    "Power": _power,
    "QuantizedMatmul": _quantized,
    "RMSNorm": _norm,
    "RoPE": _turned_back,
    "Reduce": lambda p, step, g, place: p.broadcast_to(g, step.inputs[0].shape),
    "Scan": _reversed_scan,
    "Select": _selected,
    "Sigmoid": _sigmoid,
    "Slice": _slice,
    "Softmax": _softmax,
    "Sqrt": _rsqrt,
    "Square": lambda p, step, g, place: p.multiply(step.inputs[0], p.scaled(g)),
    "Squeeze": lambda p, step, g, place: p.op(
        "ExpandDims", [g], step.inputs[0].shape, None, step.arguments
    ),
    "Subtract": lambda p, step, g, place: p.unary("Negative", g) if place else g,
    "Tanh": _tanh,
    "Transpose": _transposed,
    **dict.fromkeys(
        ("Flatten", "Reshape", "Unflatten"),
        lambda p, step, g, place: p.reshape(g, *step.inputs[0].shape),
    ),
}
