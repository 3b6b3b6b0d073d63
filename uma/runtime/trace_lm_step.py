"""One step of ``mlx_lm.lora`` from its own code: exported whole, then compiled on paper.

``mx.checkpoint`` cannot be exported. Where it is asked for, the way back through the layers is put
in by hand: each runs again on its inputs, which wait for its output (``mlx/transforms.cpp``,
``checkpoint``), and is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.memory.array_layout import rows
from uma.memory.compile_fuse import fused, simplified
from uma.memory.liveness import Graph
from uma.runtime.lora.calls import intercepted
from uma.runtime.lora.optimizer import make_optimizer
from uma.runtime.trace_graph import arrays_of, put_arrays
from uma.workload import TrainingWorkload

Calls = Sequence[tuple[nn.Module, Callable[..., mx.array], list[mx.array]]]
"""Each layer of the model, its output for an input and masks, and the masks."""


class LmStep:
    """The inputs of a step and the function that makes its graph."""

    def __init__(self, model: Any, calls: Calls, workload: TrainingWorkload) -> None:
        self.model, self.calls = model, calls
        self.checkpoint = bool(workload.grad_checkpoint)
        trained = model.trainable_parameters()
        self.optimizer = make_optimizer(workload.optimizer, 1e-5)
        self.optimizer.init(trained)
        self.names = [name for name, _ in tree_flatten(trained)]
        parameters = dict(tree_flatten(model.parameters()))
        self.frozen = [name for name in parameters if name not in set(self.names)]
        rows = workload.batch_size, max(2, workload.max_seq_length)
        held = [*(parameters[name] for name in self.frozen), mx.zeros(rows, mx.int32)]
        lengths = mx.zeros((rows[0], 2), mx.int32)
        states = list(arrays_of(self.optimizer.state))
        self.held = len(held) + 1
        self.inputs = [*held, lengths, *(parameters[name] for name in self.names), *states]

    def run(self, *given: mx.array) -> list[mx.array]:
        """Parameters, the optimizer's arrays and the loss, as ``train`` evaluates them."""
        held, trained = given[: self.held], given[self.held : self.held + len(self.names)]
        put_arrays(self.optimizer.state, iter(given[self.held + len(self.names) :]))
        values = zip([*self.frozen, *self.names], [*held[:-2], *trained], strict=True)
        self.model.update(tree_unflatten(list(values)))
        loss, gradients = self._gradients(held[-2], held[-1])
        self.optimizer.update(self.model, gradients)
        new = [value for _, value in tree_flatten(self.model.trainable_parameters())]
        return [*new, *arrays_of(self.optimizer.state), loss]

    def _gradients(self, batch: mx.array, lengths: mx.array) -> tuple[mx.array, Any]:
        from mlx_lm.tuner.trainer import default_loss

        if not self.checkpoint:
            (loss, _), gradients = nn.value_and_grad(self.model, default_loss)(
                self.model, batch, lengths
            )
            return loss, gradients
        return self._checkpointed(default_loss, batch, lengths)

    def _checkpointed(
        self, loss: Callable[..., Any], batch: mx.array, lengths: mx.array
    ) -> tuple[mx.array, Any]:
        """The same through the layers one by one, the last one first."""
        layers = [layer for layer, _, _ in self.calls]
        hidden = [self._embedded(layers, batch[:, :-1])]
        for _, call, masks in self.calls:
            hidden.append(call(hidden[-1], *masks))

        def tail(last: mx.array) -> mx.array:
            with intercepted(layers, lambda *_, **__: last):
                value: mx.array = loss(self.model, batch, lengths)[0]
            return value

        (value,), (gradient,) = mx.vjp(tail, [hidden[-1]], [mx.array(1.0)])
        found: list[tuple[str, mx.array]] = []
        paths = {id(module): name for name, module in self.model.named_modules()}
        for n, (layer, call, masks) in reversed(list(enumerate(self.calls))):
            given = [hidden[n], *masks]
            *own, gradient = _again(layer, call, given, hidden[n + 1], gradient)
            names = [name for name, _ in tree_flatten(layer.trainable_parameters())]
            found += [(f"{paths[id(layer)]}.{k}", v) for k, v in zip(names, own, strict=True)]
        order = {name: n for n, name in enumerate(self.names)}
        return value, tree_unflatten(sorted(found, key=lambda item: order[item[0]]))

    def _embedded(self, layers: Sequence[nn.Module], tokens: mx.array) -> mx.array:
        """What the first layer is given."""
        first: list[mx.array] = []

        def hook(_: nn.Module, x: mx.array, *__: Any, **___: Any) -> mx.array:
            first.append(x)
            return x

        with intercepted(layers, hook):
            self.model(tokens)
        return first[0]


def _again(
    layer: nn.Module,
    call: Callable[..., mx.array],
    given: list[mx.array],
    output: mx.array,
    gradient: mx.array,
) -> list[mx.array]:
    """Gradients of a layer's trained parameters and its input, all waiting for its output.

    The layer keeps the parameters that wait, which the optimizer then finds there.
    """
    trained = tree_flatten(layer.trainable_parameters())
    names, count = [name for name, _ in trained], len(trained)
    inputs = mx.depends([*(value for _, value in trained), *given], [output])
    masks = inputs[count + 1 :]

    def run(*primals: mx.array) -> mx.array:
        layer.update(tree_unflatten(list(zip(names, primals[:count], strict=True))))
        return call(primals[count], *masks)

    found = mx.vjp(run, inputs[: count + 1], [gradient])[1]
    layer.update(tree_unflatten(list(zip(names, inputs[:count], strict=True))))
    return list(found)


def compiled(graph: Graph) -> Graph:
    """What ``mx.compile`` makes of it."""
    arrays = [(x.shape, x.itemsize) for x in graph.arrays]
    operations, roots = simplified(graph.operations, arrays, graph.roots)
    made = fused(operations, arrays, roots)
    layouts = [rows(shape, width) for shape, width in arrays]
    return Graph(layouts, tuple(made), graph.sources, tuple(roots), graph.held)
