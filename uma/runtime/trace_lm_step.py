"""One step of ``mlx_lm.lora`` from its own code: exported whole, then compiled on paper.

``mx.checkpoint`` cannot be exported. Where it is asked for, the way back through the layers is put
in by hand: each runs again on its inputs, which wait for its output (``mlx/transforms.cpp``,
``checkpoint``), and is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.memory.array_layout import rows
from uma.memory.compile_fuse import fused, simplified
from uma.memory.liveness import Graph
from uma.runtime.lora.calls import intercepted
from uma.runtime.lora.optimizer import make_optimizer
from uma.runtime.trace_graph import arrays_of, put_arrays
from uma.runtime.trace_stand_ins import StandIns
from uma.workload import TrainingWorkload

Calls = Sequence[tuple[nn.Module, Callable[..., mx.array], list[mx.array]]]
"""Each layer of the model, its output for an input and masks, and the masks."""


class LmStep:
    """The inputs of a step and the function that makes its graph.

    ``stand_ins`` has the loss's kernel, where there is one: on a GPU.
    """

    def __init__(
        self, model: Any, calls: Calls, workload: TrainingWorkload, stand_ins: StandIns | None
    ) -> None:
        self.model, self.calls, self.stand_ins = model, calls, stand_ins
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

        if self.checkpoint:
            return self._checkpointed(default_loss, batch, lengths)
        own = [value for _, value in tree_flatten(self.model.trainable_parameters())]

        def loss(*values: mx.array) -> mx.array:
            self.model.update(self._named(values))
            found: mx.array = default_loss(self.model, batch, lengths)[0]
            return found

        value, gradients = self._differentiated(loss, own)
        self.model.update(self._named(own))
        return value, self._named(gradients)

    def _named(self, values: Sequence[mx.array]) -> Any:
        return tree_unflatten(list(zip(self.names, values, strict=True)))

    def _differentiated(
        self, loss: Callable[..., mx.array], primals: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """``mx.vjp`` of ``loss``, whose cross-entropy is one kernel each way on a GPU.

        mlx 0.32.4, ``nn/losses.py``: that is asked of the device. What stands in for the kernel has
        no gradient of its own, so that the graph is made in two parts, which share the logits.
        """
        if self.stand_ins is None:
            (value,), gradients = mx.vjp(loss, primals, [mx.array(1.0)])
            return value, gradients
        seen: list[mx.array] = []

        def logits(*given: mx.array) -> mx.array:
            def see(*inputs: mx.array) -> mx.array:
                seen[:] = inputs
                return mx.zeros(inputs[1].shape, inputs[0].dtype)

            with patch.object(nn.losses, "cross_entropy", see):
                loss(*given)
            return seen[0]

        logits(*primals)
        found, targets = seen
        losses = self.stand_ins.cross_entropy(found, targets)

        def rest(each: mx.array) -> mx.array:
            with patch.object(nn.losses, "cross_entropy", lambda *_: each.astype(found.dtype)):
                return loss(*primals)

        (value,), (by_each,) = mx.vjp(rest, [losses], [mx.array(1.0)])
        slope = self.stand_ins.slope(found, targets, losses, by_each)
        return value, mx.vjp(logits, primals, [slope])[1]

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

        value, (gradient,) = self._differentiated(tail, [hidden[-1]])
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
