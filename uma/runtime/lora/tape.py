"""A forward pass of a model recorded layer by layer, and the way back through it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from uma.errors import UnsupportedModel
from uma.runtime.lora.blocks import Blocks
from uma.runtime.lora.calls import arrays, differentiable, intercepted, own_call, substituted
from uma.runtime.lora.loss import slice_rows, sliced_loss, sliced_loss_alone
from uma.runtime.lora.random_state import at_random_state, random_state

Gradients = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a layer: its arguments, the random state before it, what it gave."""

    layer: nn.Module
    args: Any
    random_state: int
    output: Any


class _Reached(Exception):
    """The call whose arguments were asked for."""


class Tape:
    """The calls of a model's layers, and the cotangents of their outputs.

    A layer's input that is not the very output of another one was made between them; the way back
    through that is found by running the model with every layer replaced by what it gave.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: np.ndarray,
        segments: np.ndarray | None = None,
        *,
        record: bool = True,
    ) -> None:
        self.model, self.tokens, self.record = model, mx.array(tokens), record
        self.blocks = None if segments is None else Blocks(segments)
        self.layers = list(model.layers)
        self.names = {id(module): name for name, module in model.named_modules()}
        inside = tuple(self.names[id(layer)] + "." for layer in self.layers)
        trained = tree_flatten(model.trainable_parameters())
        outside = [(name, value) for name, value in trained if not name.startswith(inside)]
        self.outside_names = [name for name, _ in outside]
        self.outside = [value for _, value in outside]
        self.gradients: Gradients = {}
        self.calls: list[Any] = []  # a _Call, or None where nothing is kept
        self.cotangents: dict[int, mx.array] = {}
        self._forward()

    def _forward(self) -> None:
        """Run layer after layer; those below the first trained one leave nothing behind."""
        trains = {id(x) for x in self.layers if tree_flatten(x.trainable_parameters())}
        known: set[int] = set()
        glued = False
        begun = bool(self.outside)

        def hook(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal begun, glued
            state = random_state()
            if self.blocks is not None:
                args, kwargs = self.blocks.masked((args, kwargs))
            output = own_call(layer, *args, **kwargs)
            mx.eval(output)
            given = {id(x) for x in differentiable((args, kwargs))}
            glued = glued or bool(self.calls and given - known)
            known.update(given, (id(x) for x in arrays(output)))
            begun = begun or id(layer) in trains
            self.calls.append(_Call(layer, (args, kwargs), state, output))
            if not self.record or not (begun or glued):
                self.calls[:-1] = [None] * (len(self.calls) - 1)
            return output

        with intercepted(self.layers, hook):
            self.model(self.tokens)  # its logits are never evaluated
        self.first = next(
            (
                n
                for n, call in enumerate(self.calls)
                if call is not None and (self.outside or id(call.layer) in trains)
            ),
            len(self.calls),
        )

    @property
    def last(self) -> mx.array:
        """The first array that the last layer gave: its hidden vectors."""
        return arrays(self.calls[-1].output)[0]

    def tail(self, targets: np.ndarray, weights: np.ndarray, rows: int | None) -> mx.array:
        """The loss: what follows the last layer (norm, head), ``rows`` positions at a time."""
        output, last = self.calls[-1].output, self.last
        if last.shape[:2] != self.tokens.shape:
            raise UnsupportedModel(
                f"the last layer gives {last.shape} for tokens of {self.tokens.shape}; "
                "a step by layers needs (rows, length, width)"
            )
        tokens = self.tokens.reshape(-1)

        def logits(hidden: mx.array, at: mx.array, *own: mx.array) -> mx.array:
            stand_in = substituted(output, [last], [hidden[None]])
            with intercepted(self.layers, lambda *_, **__: stand_in):
                found: mx.array = self._with_outside(own, lambda: self.model(tokens[at][None]))
            return found.squeeze(0)  # found[0] has a gradient that is padded with zeros

        hidden = last.reshape(-1, last.shape[-1])
        if rows is None:
            rows = slice_rows(logits(hidden[:1], mx.array([0]), *self.outside).shape[-1])
        if not self.record:
            return sliced_loss_alone(logits, hidden, self.outside, targets, weights, rows)
        loss, by_hidden, by_own = sliced_loss(logits, hidden, self.outside, targets, weights, rows)
        self._add(last, by_hidden.reshape(last.shape))
        self.gradients.update(zip(self.outside_names, by_own, strict=True))
        return loss

    def backward(self) -> None:
        """From the last layer to the first that has something to train."""
        while len(self.calls) > self.first:
            call = self.calls[-1]
            inputs = differentiable(call.args)
            if len(self.calls) == self.first + 1 and not self.outside:
                inputs = []
            by_input = self._through(call, inputs)
            glue = self._sort(inputs, by_input)
            self.calls.pop()
            if glue:
                self._through_glue(*zip(*glue, strict=True))

    def _through(self, call: _Call, inputs: list[mx.array]) -> list[mx.array]:
        """Differentiate one call, run again with the random numbers it had."""
        layer, prefix = call.layer, self.names[id(call.layer)]
        trained = tree_flatten(layer.trainable_parameters())
        names = [name for name, _ in trained]
        places = [n for n, a in enumerate(arrays(call.output)) if id(a) in self.cotangents]
        if not places:
            return [mx.zeros_like(x) for x in inputs]

        def run(*primals: mx.array) -> list[mx.array]:
            layer.update(tree_unflatten(list(zip(names, primals, strict=False))))
            args, kwargs = substituted(call.args, inputs, primals[len(names) :])
            found = arrays(layer(*args, **kwargs))
            return [found[place] for place in places]

        cotangents = [self.cotangents.pop(id(arrays(call.output)[place])) for place in places]
        with at_random_state(call.random_state):
            primals = [*(value for _, value in trained), *inputs]
            # What the layer gives is dropped: as long as it has a name, so has what it is made of.
            found = mx.vjp(run, primals, cotangents)[1]
            layer.update(tree_unflatten(trained))
            mx.eval(found)
        for name, gradient in zip(names, found, strict=False):
            self._add_gradient(f"{prefix}.{name}", gradient)
        return found[len(names) :]

    def _sort(self, inputs: list[mx.array], by_input: list[mx.array]) -> list[tuple[int, mx.array]]:
        """Add the cotangents of earlier outputs; return the others with their place."""
        outputs = {id(a) for call in self.calls[:-1] if call for a in arrays(call.output)}
        glue = []
        for n, (value, cotangent) in enumerate(zip(inputs, by_input, strict=True)):
            if id(value) in outputs:
                self._add(value, cotangent)
            else:
                glue.append((n, cotangent))
        return glue

    def _through_glue(self, places: Sequence[int], cotangents: Sequence[mx.array]) -> None:
        """From inputs of the call after the last one left, to earlier outputs and the outside."""
        leaves = differentiable([call.output for call in self.calls[self.first :]])
        if not leaves and not self.outside:
            return
        outputs = [call and call.output for call in self.calls]

        def run(*primals: mx.array) -> list[mx.array]:
            own, given = primals[: len(self.outside)], primals[len(self.outside) :]
            stand_ins = iter(substituted(outputs, leaves, given))
            reached: Any = None

            def hook(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
                nonlocal reached
                for stand_in in stand_ins:
                    return stand_in
                reached = args, kwargs
                raise _Reached

            def until() -> None:
                with intercepted(self.layers, hook):
                    self.model(self.tokens)

            with suppress(_Reached):
                self._with_outside(own, until)
            found = differentiable(reached)
            return [found[place] for place in places]

        found = mx.vjp(run, [*self.outside, *leaves], list(cotangents))[1]
        mx.eval(found)
        for name, gradient in zip(self.outside_names, found, strict=False):
            self._add_gradient(name, gradient)
        for leaf, cotangent in zip(leaves, found[len(self.outside) :], strict=True):
            self._add(leaf, cotangent)

    def _with_outside(self, values: Sequence[mx.array], run: Callable[[], Any]) -> Any:
        """``run()`` with other values of the trained parameters outside the layers."""
        if not self.outside:
            return run()
        self.model.update(tree_unflatten(list(zip(self.outside_names, values, strict=True))))
        try:
            return run()
        finally:
            own = list(zip(self.outside_names, self.outside, strict=True))
            self.model.update(tree_unflatten(own))

    def _add(self, output: mx.array, cotangent: mx.array) -> None:
        former = self.cotangents.get(id(output))
        self.cotangents[id(output)] = cotangent if former is None else former + cotangent

    def _add_gradient(self, name: str, gradient: mx.array) -> None:
        former = self.gradients.get(name)
        self.gradients[name] = gradient if former is None else former + gradient
        mx.eval(self.gradients[name])
