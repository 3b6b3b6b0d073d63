"""The graph of one call of a model, exported by MLX with everything that exists as an input."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.memory.array_layout import Layout, rows
from uma.memory.liveness import Graph, Operation
from uma.runtime.trace_stand_ins import StandIns

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One evaluation of mlx-lm's generation: ``tokens`` new ones, with or without logits."""

    tokens: int
    logits: bool


def call_graph(
    model: nn.Module,
    caches: list[Any],
    call: Call,
    stand_ins: StandIns,
    *,
    quantize: Callable[[], None],
    batch_size: int = 1,
    buffers: Sequence[int] = (),
) -> tuple[Graph, tuple[int, ...]]:
    """The graph of one call and the numbers of the caches' arrays after it; ``caches`` advance.

    ``quantize`` quantizes those caches that are to be; ``buffers`` are the bytes behind each of
    the caches' arrays before it.
    """
    parameters = tree_flatten(model.parameters())
    before = [array for cache in caches for array in arrays_of(cache)]
    count = {"parameters": len(parameters), "caches": len(before), "roots": 0}

    def traced(*inputs: mx.array) -> list[mx.array]:
        names = [name for name, _ in parameters]
        given = inputs[: len(names)]
        model.update(tree_unflatten(list(zip(names, given, strict=True))))
        put_arrays(caches, iter(inputs[len(names) + 1 :]))
        logits = model(inputs[len(names)], cache=caches)
        quantize()
        roots = _evaluated(logits, caches, call)
        count["roots"] = len(roots)
        return [*roots, *(array for cache in caches for array in arrays_of(cache))]

    events: list[Event] = []
    tokens = mx.zeros((batch_size, call.tokens), mx.int32)
    with unchanged(model):
        mx.export_function(events.append, traced, *(p for _, p in parameters), tokens, *before)
    return _graph(events, stand_ins, count, buffers)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what calls of the model set in its modules: parameters, and arrays made from them."""
    before = [(module, dict(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, arrays, others in before:
            dict.clear(module)
            dict.update(module, arrays)
            vars(module).clear()
            vars(module).update(others)


def _evaluated(logits: mx.array, caches: list[Any], call: Call) -> list[mx.array]:
    """What mlx-lm 0.32.2 evaluates (``generate.py``, ``generate_step``).

    The caches' states after a chunk of the prompt, the token and its probabilities after one
    token.
    """
    if not call.logits:
        states = tree_flatten([cache.state for cache in caches])
        return [array for _, array in states if isinstance(array, mx.array)]
    last = logits[:, -1, :]
    probabilities = last - mx.logsumexp(last, axis=-1, keepdims=True)
    return [mx.argmax(probabilities, axis=-1), probabilities]


def arrays_of(cache: Any) -> Iterator[mx.array]:
    """The arrays that a cache object holds, those of caches in it included."""
    if isinstance(cache, mx.array):
        yield cache
    elif isinstance(cache, (list, tuple)):
        for part in cache:
            yield from arrays_of(part)
    elif isinstance(cache, dict):
        yield from arrays_of(list(cache.values()))
    elif hasattr(cache, "__dict__"):
        yield from arrays_of(list(vars(cache).values()))


def put_arrays(cache: Any, arrays: Iterator[mx.array]) -> Any:
    """Replace the arrays of a cache object in the order of ``arrays_of``."""
    if isinstance(cache, mx.array):
        return next(arrays)
    if isinstance(cache, list):
        cache[:] = [put_arrays(part, arrays) for part in cache]
    elif isinstance(cache, tuple):
        return tuple(put_arrays(part, arrays) for part in cache)
    elif isinstance(cache, dict):
        for key, part in cache.items():
            cache[key] = put_arrays(part, arrays)
    elif hasattr(cache, "__dict__"):
        for key, part in list(vars(cache).items()):
            setattr(cache, key, put_arrays(part, arrays))
    return cache


def _graph(
    events: list[Event], stand_ins: StandIns, count: dict[str, int], buffers: Sequence[int]
) -> tuple[Graph, tuple[int, ...]]:
    layouts, inputs, fixed, outputs, made = exported(events, stand_ins)
    kept, caches = inputs[: count["parameters"] + 1], inputs[count["parameters"] + 1 :]
    roots, states = outputs[: count["roots"]], outputs[count["roots"] :]
    graph = Graph(
        layouts,
        made,
        (*inputs, *fixed),
        tuple(roots),
        frozenset((*kept, *fixed, *roots, *states)),
        dict(zip(caches, buffers, strict=True)) if buffers else {},
    )
    return graph, tuple(states)


def exported(
    events: list[Event], stand_ins: StandIns
) -> tuple[list[Layout], list[int], list[int], list[int], tuple[Operation, ...]]:
    """The arrays of an exported function, and what it does with them.

    By their numbers: inputs, constants, outputs; then the operations, stand-ins as what they stand
    for.
    """
    by_type: dict[str, Event] = {e["type"]: e for e in events if e["type"] != "primitive"}
    numbers: dict[str, int] = {}
    layouts: list[Layout] = []

    def number(entry: tuple[str, tuple[int, ...], mx.Dtype]) -> int:
        name, shape, dtype = entry
        if name not in numbers:
            numbers[name] = len(layouts)
            layouts.append(rows(tuple(shape), dtype.size))
        return numbers[name]

    inputs = [number(entry) for entry in by_type["inputs"]["inputs"]]
    constants = by_type["constants"]["constants"]
    fixed = {number((name, array.shape, array.dtype)): array for name, array in constants}
    outputs = [number(entry) for entry in by_type["outputs"]["outputs"]]
    operations = [
        Operation(
            event["name"],
            tuple(map(number, event["inputs"])),
            tuple(map(number, event["outputs"])),
            hashable(event["arguments"]),
        )
        for event in events
        if event["type"] == "primitive"
    ]
    return layouts, inputs, list(fixed), outputs, tuple(stood_in(operations, fixed, stand_ins))


def hashable(arguments: Any) -> Any:
    return tuple(map(hashable, arguments)) if isinstance(arguments, list) else arguments


def stood_in(
    operations: list[Operation], fixed: dict[int, mx.array], stand_ins: StandIns
) -> Iterator[Operation]:
    """The operations, those that carry the mark of a stand-in as what it stands for."""
    made = {i: operation for operation in operations for i in operation.outputs}
    for operation in operations:
        source = operation.inputs[0] if operation.name == "Depends" else -1
        while source in made and made[source].name in ("AsType", "Broadcast"):
            source = made[source].inputs[0]
        constant = fixed.get(source)
        stand_in = None if constant is None else stand_ins.marked(constant)
        if stand_in is None:
            yield operation
            continue
        inputs = operation.inputs[len(operation.outputs) :]
        if stand_in.name == "contiguous":
            yield Operation("Contiguous", inputs, operation.outputs)
            continue
        workspace = (stand_in.workspace_bytes,)
        yield Operation(
            stand_in.name, inputs, operation.outputs, workspace, opaque=True, donors=stand_in.donors
        )
