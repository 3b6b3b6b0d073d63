"""How MLX lays the outputs of an operation out: as a view, in a dying input's buffer, or anew.

The rules of MLX's primitives on shapes and strides alone (mlx 0.32.4, ``mlx/backend/common`` and
``mlx/backend/cpu``; the Metal backend shares the first and follows the second where it matters).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from uma.quantization import FLOAT32

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """An array as MLX stores it: its elements, and what of its buffer they span.

    ``spanned`` is MLX's ``data_size``: elements of the buffer between the first and the last.
    """

    shape: Shape
    itemsize: int
    strides: Shape
    spanned: int
    contiguous: bool = True
    row: bool = True
    col: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


class Effect(NamedTuple):
    """What an operation does to memory.

    ``shares`` says that the outputs are views of the first input. Else the output takes over the
    buffer of the first of ``donors`` (indexes of inputs) that nothing else needs, or is new.
    ``dispatches`` are the tasks that the operation hands to the device; with ``copies`` one less
    where the output takes over a buffer, as the operation begins with a copy of its input.
    """

    outputs: tuple[Layout, ...]
    shares: bool = False
    donors: tuple[int, ...] = ()
    exact: bool = False
    temporaries: tuple[int, ...] = ()
    dispatches: int = 1
    copies: bool = False


@lru_cache(maxsize=4096)
def rows(shape: Shape, itemsize: int) -> Layout:
    """A new array, row by row."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    size = prod(shape)
    col = size <= 1 or size == max(shape)
    return Layout(shape, itemsize, tuple(reversed(strides)), size, True, True, col)


def effect(
    name: str, arguments: tuple[Any, ...], inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]
) -> Effect:
    """The effect of the primitive ``name``; ``outputs`` are laid out row by row.

    A primitive without a rule of its own allocates its outputs.
    """
    if outputs and not outputs[0].size:
        return Effect(tuple(outputs), dispatches=0)
    rule = _RULES.get(name)
    return rule(arguments, inputs, outputs) if rule is not None else Effect(tuple(outputs))


Rule = Callable[[Sequence[Any], Sequence[Layout], Sequence[Layout]], Effect]


def _view(
    x: Layout,
    out: Layout,
    strides: Shape,
    *,
    spanned: int | None = None,
    contiguous: bool | None = None,
    row: bool | None = None,
    col: bool | None = None,
) -> Effect:
    """The shape of ``out`` over the buffer of ``x``, like it in what is not given."""
    new = Layout(
        out.shape,
        out.itemsize,
        strides,
        x.spanned if spanned is None else spanned,
        x.contiguous if contiguous is None else contiguous,
        x.row if row is None else row,
        x.col if col is None else col,
    )
    return Effect((new,), True, (), False, (), 0)


def _contiguity(shape: Shape, strides: Shape) -> tuple[int, bool, bool]:
    """``check_contiguity`` of ``backend/common/utils.h``: elements, rows in order, columns too."""
    size, forward, backward, row, col = 1, 1, 1, True, True
    for i in range(len(shape)):
        ri = len(shape) - 1 - i
        col = col and (strides[i] == forward or shape[i] == 1)
        row = row and (strides[ri] == backward or shape[ri] == 1)
        forward *= shape[i]
        backward *= shape[ri]
        size *= shape[i] if strides[i] > 0 else 1
    return size, row, col


def _same(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    layouts = tuple(x._replace(shape=o.shape) for x, o in zip(inputs, outputs, strict=False))
    return Effect(layouts, shares=True, dispatches=0)


def _transpose(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    x, out = inputs[0], outputs[0]
    strides = tuple(x.strides[axis] for axis in arguments[0])
    if not (x.contiguous and x.spanned == x.size):
        return _view(x, out, strides)
    _, row, col = _contiguity(out.shape, strides)
    return _view(x, out, strides, row=row, col=col)


def _broadcast(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    x, out = inputs[0], outputs[0]
    new = len(out.shape) - len(x.shape)
    strides = (0,) * new + tuple(
        0 if dim == 1 else stride for dim, stride in zip(x.shape, x.strides, strict=True)
    )
    if out.size > x.size:
        return _view(x, out, strides, row=False, col=False)
    return _view(x, out, strides)


def _expand(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    strides = list(inputs[0].strides)
    for axis in arguments[0]:
        strides.insert(axis, 1)
    return _view(inputs[0], outputs[0], tuple(strides))


def _squeeze(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    x, gone = inputs[0], set(arguments[0])
    return _view(x, outputs[0], tuple(s for i, s in enumerate(x.strides) if i not in gone))


def _slice(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    x, out = inputs[0], outputs[0]
    strides = tuple(s * step for s, step in zip(x.strides, arguments[2], strict=True))
    spanned = 1 + sum(abs(s) * (dim - 1) for s, dim in zip(strides, out.shape, strict=True))
    size, row, col = _contiguity(out.shape, strides)
    return _view(x, out, strides, spanned=spanned, contiguous=size == spanned, row=row, col=col)


def _split(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    x, parts = inputs[0], []
    for out in outputs:
        size, row, col = _contiguity(out.shape, x.strides)
        contiguous = size == 1 or (x.contiguous and (size == x.spanned or row or col))
        parts.append(Layout(out.shape, x.itemsize, x.strides, size, contiguous, row, col))
    return Effect(tuple(parts), shares=True, dispatches=0)


def _strided(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    shape, strides = outputs[0].shape, tuple(arguments[1])
    spanned = 1 + sum(abs(s) * (dim - 1) for s, dim in zip(strides, shape, strict=True))
    size, row, col = _contiguity(shape, strides)
    changes = {"spanned": spanned, "contiguous": size == spanned, "row": row, "col": col}
    return _view(inputs[0], outputs[0], strides, **changes)


def _reinterpret(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    x, out = inputs[0], outputs[0]
    if x.row or x.itemsize == out.itemsize:
        strides = tuple(s * x.itemsize // out.itemsize for s in x.strides[:-1]) + x.strides[-1:]
        return _view(x, out, strides, spanned=x.spanned * x.itemsize // out.itemsize)
    return Effect((out,))


def _reshape(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    x, out = inputs[0], outputs[0]
    if x.row:
        return _view(x, out, out.strides, col=out.col)
    if not x.shape:
        return _view(x, out, (0,) * len(out.shape))
    strides = _reshaped_strides(x, out.shape)
    return Effect((out,)) if strides is None else _view(x, out, strides)


def _reshaped_strides(x: Layout, shape: Shape) -> Shape | None:
    """``prepare_reshape`` of ``backend/common/common.cpp``; ``None`` where it copies."""
    dims, steps = _collapsed(x.shape, x.strides)
    strides: list[int] = []
    j = 0
    for dim in shape:
        if j < len(dims) and dims[j] % dim == 0:
            dims[j] //= dim
            strides.append(dims[j] * steps[j])
            j += dims[j] == 1
        elif dim == 1:
            strides.append(strides[-1])
        else:
            return None
    return tuple(strides)


def _collapsed(shape: Shape, strides: Shape) -> tuple[list[int], list[int]]:
    """Dimensions merged where one continues the other; those of size 1 left out."""
    dims: list[int] = []
    steps: list[int] = []
    for dim, stride in zip(shape, strides, strict=True):
        if dim == 1:
            continue
        if dims and steps[-1] == dim * stride:
            dims[-1] *= dim
            steps[-1] = stride
        else:
            dims.append(dim)
            steps.append(stride)
    return dims or [1], steps or [1]


def _unary(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    """``set_unary_output_data``, and ``copy`` where the input is contiguous (``AsType``)."""
    x, out = inputs[0], outputs[0]
    new = x._replace(itemsize=out.itemsize)
    return Effect((new,), donors=(0,)) if x.contiguous else Effect((out,))


def _binary(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """``set_binary_op_output_data`` of ``backend/common/binary.h``."""
    a, b = inputs[:2]
    out = outputs[0]
    if a.spanned == 1 and b.spanned == 1:
        return Effect((a._replace(shape=out.shape, itemsize=out.itemsize),))
    if a.spanned == 1 and b.contiguous:
        return Effect((b._replace(itemsize=out.itemsize),), donors=(1,))
    if b.spanned == 1 and a.contiguous:
        return Effect((a._replace(itemsize=out.itemsize),), donors=(0,))
    if (a.row and b.row) or (a.col and b.col):
        return Effect((a._replace(itemsize=out.itemsize),), donors=(0, 1))
    donors = tuple(i for i, x in enumerate((a, b)) if x.row and x.size == out.size)
    return Effect((out,), donors=donors)


def _select(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """``set_ternary_op_output_data`` of ``backend/common/ternary.h``."""
    out = outputs[0]
    if all(x.spanned == 1 for x in inputs):
        return Effect((inputs[1]._replace(shape=out.shape, itemsize=out.itemsize),))
    if all(x.row for x in inputs) or all(x.col for x in inputs):
        return Effect((inputs[1]._replace(itemsize=out.itemsize),), donors=(0, 1, 2))
    return Effect((out,), donors=tuple(i for i, x in enumerate(inputs) if x.row))


def _softmax(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """In place where the last dimension is contiguous, else in a contiguous copy."""
    x, out = inputs[0], outputs[0]
    if x.contiguous and x.strides and x.strides[-1] == 1:
        return Effect((x,), donors=(0,), exact=True)
    return Effect((out,), dispatches=2)


def _update(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """A copy of the first input that is written to: in place if the input is whole and dying."""
    x, out = inputs[0], outputs[0]
    if x.contiguous and x.spanned == x.size:
        new = x._replace(itemsize=out.itemsize)
        return Effect((new,), donors=(0,), dispatches=2, copies=True)
    return Effect((out,), dispatches=2)


def _contiguous(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """``Contiguous``: the input itself if it is row by row and fills its buffer, else a copy."""
    x, out = inputs[0], outputs[0]
    return _view(x, out, x.strides) if x.row and x.spanned == x.size else Effect((out,))


def _full(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    x, out = inputs[0], outputs[0]
    return Effect((out,)) if x.spanned == 1 or not x.contiguous else Effect((x,), donors=(0,))


def _matmul(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """Operands whose last two dimensions are neither row nor column by column are copied."""
    copies = tuple(x.nbytes for x in inputs[:2] if not _is_matrix(x))
    return Effect(tuple(outputs), temporaries=copies, dispatches=1 + len(copies))


def _is_matrix(x: Layout) -> bool:
    if len(x.shape) < 2:
        return True
    (height, width), (down, across) = x.shape[-2:], x.strides[-2:]
    return (down == width and across == 1) or (down == 1 and across == height)


def _quantized(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """Every operand is made row by row: quantized caches too, repeated for each query head."""
    copies = tuple(x.nbytes for x in inputs if not x.row)
    return Effect(tuple(outputs), temporaries=copies, dispatches=1 + len(copies))


def _gathered(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    copies = tuple(
        x.nbytes
        for x in inputs[:-2]
        if len(x.shape) > 1 and (x.strides[-2], x.strides[-1]) != (x.shape[-1], 1)
    )
    return Effect(tuple(outputs), temporaries=copies, dispatches=1 + len(copies))


def _scan(arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Effect:
    copies = () if inputs[0].row else (inputs[0].nbytes,)
    return Effect(tuple(outputs), temporaries=copies, dispatches=1 + len(copies))


def _convolution(
    arguments: Sequence[Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> Effect:
    """``explicit_gemm_conv_1D_cpu`` (``backend/cpu/conv.cpp``): float32 copies of all of it.

    The padded input and one patch for every output position; weights and output if they are not
    float32. Other dimensions are counted alike.
    """
    x, weight, out = inputs[0], inputs[1], outputs[0]
    channels, kernel = x.shape[-1], prod(weight.shape[1:-1])
    patches = prod(out.shape[:-1]) * kernel * channels * FLOAT32
    low, high = arguments[1], arguments[2]
    padded = [x.shape[0], *(a + b + c for a, b, c in zip(x.shape[1:-1], low, high, strict=True))]
    temporaries = [prod(padded) * channels * FLOAT32, patches]
    if weight.itemsize != FLOAT32 or not weight.row:
        temporaries.append(weight.size * FLOAT32)
    if out.itemsize != FLOAT32:
        temporaries.append(out.size * FLOAT32)
    return Effect(tuple(outputs), temporaries=tuple(temporaries), dispatches=6)


_UNARY = """
Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate Cos Cosh Erf
ErfInv Exp Expm1 Floor Log Log1p LogicalNot Negative Partition Round Sigmoid Sign Sin Sinh Sort
Sqrt Square Tan Tanh
"""
_BINARY = """
Add ArcTan2 BitwiseBinary Divide Equal Greater GreaterEqual Less LessEqual LogAddExp LogicalAnd
LogicalOr Maximum Minimum Multiply NotEqual Power Remainder Subtract
"""
_UPDATES = "DynamicSliceUpdate MaskedScatter Scatter ScatterAxis SliceUpdate"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY.split(), _unary),
    **dict.fromkeys(_BINARY.split(), _binary),
    **dict.fromkeys(_UPDATES.split(), _update),
    **dict.fromkeys(("Copy", "Depends", "StopGradient", "CustomTransforms"), _same),
    **dict.fromkeys(("Broadcast", "BroadcastAxes"), _broadcast),
    **dict.fromkeys(("Reshape", "Flatten", "Unflatten"), _reshape),
    **dict.fromkeys(("Matmul", "AddMM", "BlockMaskedMM", "GatherMM"), _matmul),
    "AsStrided": _strided,
    "Concatenate": lambda _, inputs, outputs: Effect(tuple(outputs), dispatches=len(inputs)),
    "Contiguous": _contiguous,
    "Convolution": _convolution,
    "ExpandDims": _expand,
    "Full": _full,
    "GatherQMM": _gathered,
    "QuantizedMatmul": _quantized,
    "Scan": _scan,
    "Select": _select,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "View": _reinterpret,
}
