"""Memory of a training step from mlx-lm's and our own code, traced without weights.

By phases, as custom gradients and ``mx.checkpoint`` cannot be exported: the forward pass and the
gradient of each layer, one slice of the loss, the optimizer's update. What stands between a
function and a gradient of its own is put in by hand: the attention's slices and the loss's slope.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from uma.architecture import architecture_from_config
from uma.architecture.layers import Layer, Recurrent
from uma.engines.mlx_own_step import OwnStep, terms_of
from uma.engines.mlx_training import training_terms
from uma.errors import UnsupportedModel
from uma.memory.liveness import Graph, evaluation, evaluation_order
from uma.memory.term import Basis, MemoryTerm
from uma.runtime.load import weights_bytes
from uma.runtime.lora import attention
from uma.runtime.lora.calls import arrays, differentiable, intercepted, substituted
from uma.runtime.lora.loss import loss_and_slope
from uma.runtime.lora.optimizer import make_optimizer
from uma.runtime.trace_graph import Event, arrays_of, exported, put_arrays, unchanged
from uma.runtime.trace_lm_step import LmStep, compiled
from uma.runtime.trace_model import Format, lazy_model
from uma.runtime.trace_stand_ins import StandIns, replaced
from uma.workload import Backend, Trainer, TrainingWorkload


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer as the model calls it."""

    layer: nn.Module
    args: Any


@dataclass(frozen=True, slots=True)
class TracedStep(OwnStep):
    """The phases of our own step, from the graphs that MLX makes of mlx-lm's layers."""

    model: Any = None
    calls: tuple[_Call, ...] = ()
    known: dict[object, int] = field(default_factory=dict)

    def forward(self, layer: Layer) -> int:
        call = self._call(layer)
        names, parameters = _parameters(call.layer, trained=False)
        inputs = differentiable(call.args)

        def run(*given: mx.array) -> list[mx.array]:
            return [_called(call, names, given[: len(names)], inputs, given[len(names) :])]

        with attention.sliced_attention(self.attention_slice_bytes, attention.forward):
            return self.peak_of(run, [*parameters, *inputs])

    def backward(self, layer: Layer, *, first: bool = False) -> int:
        call = self._call(layer)
        names, parameters = _parameters(call.layer, trained=False)
        trained = {name for name, _ in tree_flatten(call.layer.trainable_parameters())}
        inputs = differentiable(call.args)
        count = len(names)

        def run(*given: mx.array) -> list[mx.array]:
            *values, cotangent = given
            chosen = [n for n, name in enumerate(names) if name in trained]
            chosen += [] if first else [count]
            primals = [values[n] for n in chosen]

            def layer(*primals: mx.array) -> mx.array:
                whole = list(values)
                for n, value in zip(chosen, primals, strict=True):
                    whole[n] = value
                return _called(call, names, whole[:count], inputs, whole[count:])

            return _gradients(layer, primals, cotangent, self.attention_slice_bytes)

        with patch.object(mx, "gather_mm", _gathered(mx.gather_mm)):
            return self.peak_of(run, [*parameters, *inputs, mx.zeros_like(inputs[0])])

    def _loss_slice(self, rows: int) -> int:
        names, parameters = _parameters(self.model, trained=False)
        last = self.calls[-1].args[0][0]
        hidden = last.reshape(-1, last.shape[-1])

        def run(*given: mx.array) -> list[mx.array]:
            *values, hidden, at, targets, weights = given
            self.model.update(tree_unflatten(list(zip(names, values, strict=True))))

            def logits(part: mx.array) -> mx.array:
                with intercepted(list(self.model.layers), lambda *_, **__: part[None]):
                    found: mx.array = self.model(at[None])
                return found.squeeze(0)

            loss, slope = loss_and_slope(logits(hidden[at]), targets, weights)
            by_hidden = mx.vjp(logits, [hidden[at]], [slope * mx.array(1.0)])[1]
            return [mx.array(0.0) + loss, *by_hidden]

        index = mx.zeros((rows,), mx.int32)
        given = [*parameters, hidden, index, index, mx.zeros((rows,))]
        return self.peak_of(run, given)

    def update(self) -> int:
        trained = self.model.trainable_parameters()
        optimizer = make_optimizer(self.workload.optimizer, 1e-5)
        optimizer.init(trained)
        state = list(arrays_of(optimizer.state))
        names = [name for name, _ in tree_flatten(trained)]
        values = [value for _, value in tree_flatten(trained)]
        count = len(names)

        def run(*given: mx.array) -> list[mx.array]:
            gradients, parameters = given[:count], given[count : 2 * count]
            put_arrays(optimizer.state, iter(given[2 * count :]))
            made = optimizer.apply_gradients(
                tree_unflatten(list(zip(names, gradients, strict=True))),
                tree_unflatten(list(zip(names, parameters, strict=True))),
            )
            return [*(value for _, value in tree_flatten(made)), *arrays_of(optimizer.state)]

        kept = state
        try:
            return self.peak_of(run, [*values, *values, *state], passing=count)
        finally:
            put_arrays(optimizer.state, iter(kept))

    def _call(self, layer: Layer) -> _Call:
        return self.calls[self.architecture.layers.index(layer)]

    def peak_of(
        self,
        run: Callable[..., list[mx.array]],
        inputs: Sequence[mx.array],
        *,
        passing: int | None = None,
        compile: bool = False,
        stand_ins: StandIns | None = None,
    ) -> int:
        """The peak above ``inputs``; those from ``passing`` on die with their last use."""
        stand_ins = stand_ins or StandIns()
        events: list[Event] = []
        # A stand-in has no gradient: norms, rotation and attention stay decomposed, as on the CPU.
        with unchanged(self.model), replaced(stand_ins, "cpu"):
            mx.export_function(events.append, run, *inputs)
        graph = _graph(events, stand_ins, passing)
        if compile:
            graph = compiled(graph)
        before = sum(graph.arrays[i].nbytes for i in set(graph.sources))
        return evaluation(graph, evaluation_order(graph), self.backend).peak_bytes() - before


def _graph(events: list[Event], stand_ins: StandIns, passing: int | None) -> Graph:
    """The exported graph; its outputs are evaluated."""
    layouts, inputs, fixed, outputs, made = exported(events, stand_ins)
    held = frozenset([*inputs[:passing], *fixed])
    return Graph(layouts, made, (*inputs, *fixed), tuple(outputs), held)


def _gathered(whole: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``mx.gather_mm`` whose matrices get a gradient of their shape that can be exported.

    MLX cannot export ``SegmentedMM``, the true one (mlx 0.32.4, ``mlx/export.cpp``).
    """

    def gather_mm(a: mx.array, b: mx.array, *args: Any, **options: Any) -> mx.array:
        return whole(a, mx.stop_gradient(b), *args, **options) + b[:1, :1, :1]

    return gather_mm


def _parameters(module: nn.Module, *, trained: bool) -> tuple[list[str], list[mx.array]]:
    found = tree_flatten(module.trainable_parameters() if trained else module.parameters())
    return [name for name, _ in found], [value for _, value in found]


def _called(
    call: _Call,
    names: Sequence[str],
    parameters: Sequence[mx.array],
    old: Sequence[mx.array],
    new: Sequence[mx.array],
) -> mx.array:
    """The layer's output with other parameters and inputs."""
    call.layer.update(tree_unflatten(list(zip(names, parameters, strict=True))))
    args, kwargs = substituted(call.args, old, new)
    return arrays(call.layer(*args, **kwargs))[0]


def _gradients(
    layer: Callable[..., mx.array],
    primals: Sequence[mx.array],
    cotangent: mx.array,
    slice_bytes: int,
) -> list[mx.array]:
    """``mx.vjp`` of a layer, its attention's own backward in its place.

    The layer runs with the attention's output as one more input and with queries, keys and values
    as more outputs; the graph of the parts that run twice is one.
    """
    sliced: list[Any] = []

    def opened(*given: mx.array, joined: mx.array | None = None) -> list[mx.array]:
        def join(part: Any, places: Any, inputs: Any) -> mx.array:
            sliced[:] = [part, places, inputs]
            return attention.forward(part, places, inputs) if joined is None else joined

        with attention.sliced_attention(slice_bytes, join):
            out = layer(*given)
        return [out, *(sliced[2] if sliced else ())]

    opened(*primals)
    if not sliced:
        return list(mx.vjp(lambda *x: opened(*x), list(primals), [cotangent])[1])
    part, places, inputs = sliced
    joined = attention.forward(part, places, inputs)
    (by_joined,) = mx.vjp(lambda x: opened(*primals, joined=x)[:1], [joined], [cotangent])[1]
    by_inputs = attention.backward(part, places, inputs, by_joined)
    outputs = [cotangent, *by_inputs]
    return list(mx.vjp(lambda *x: opened(*x, joined=joined), list(primals), outputs)[1])


def trace_training(
    config: Mapping[str, Any],
    quantization: Format,
    workload: TrainingWorkload,
    backend: Backend = "cpu",
    *,
    trainer: Trainer = "mlx_lm",
) -> tuple[MemoryTerm, ...]:
    """The terms of a step of ``mlx_lm.lora`` or of our own trainer, as the closed forms give them.

    Raises:
        UnsupportedModel: If the model recurs, or mlx-lm's code cannot be traced.
        CheckpointError: If mlx-lm cannot build the model from ``config``.
    """
    architecture = architecture_from_config(config)
    if any(isinstance(m, Recurrent) for layer in architecture.layers for m in layer.mixers):
        raise UnsupportedModel(
            f"a training step of model_type {config.get('model_type')!r} cannot be traced: its "
            "recurrences run token by token; leave out --exact"
        )
    model = lazy_model(config, quantization, workload.dtype)
    _train(model, workload)
    step = TracedStep(architecture, workload, backend)
    step = replace(step, model=model, calls=_calls(model, step))
    weights = MemoryTerm("weights", weights_bytes(model), "exact", "mlx-lm's own arrays")
    adapters = sum(value.nbytes for _, value in tree_flatten(model.trainable_parameters()))
    if workload.method != "full":
        weights = replace(weights, size_bytes=weights.size_bytes - adapters)
    try:
        if trainer == "mlx_lm":
            return _lm_terms(step, weights)
        return terms_of(step, weights)
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise UnsupportedModel(
            f"a training step of model_type {config.get('model_type')!r} cannot be traced: {error}"
        ) from error


def _lm_terms(step: TracedStep, weights: MemoryTerm) -> tuple[MemoryTerm, ...]:
    """The closed form's, the step of ``backward`` traced."""
    asked = replace(step.workload, loss="fused")  # as mlx-lm's loss is on a GPU
    closed = training_terms(step.architecture, weights, asked, backend=step.backend)
    calls, stand_ins = [_layer_of(call) for call in step.calls], StandIns()
    kernels = stand_ins if step.backend == "metal" else None
    traced = LmStep(step.model, calls, step.workload, kernels)
    run, inputs, held = traced.run, traced.inputs, traced.held
    with patch.object(mx, "gather_mm", _gathered(mx.gather_mm)):
        size = step.peak_of(run, inputs, passing=held, compile=True, stand_ins=stand_ins)
    basis: Basis = "exact" if step.backend == "cpu" else "bound"
    return tuple(
        replace(t, size_bytes=size, basis=basis) if t.phase == "backward" else t for t in closed
    )


def _layer_of(call: _Call) -> tuple[nn.Module, Callable[..., mx.array], list[mx.array]]:
    """A layer, its output for other inputs than those it is called with, and its masks."""
    first = differentiable(call.args)[0]
    masks = [a for a in arrays(call.args) if a is not first]

    def run(*given: mx.array) -> mx.array:
        args, kwargs = substituted(call.args, [first, *masks], given)
        return arrays(call.layer(*args, **kwargs))[0]

    return call.layer, run, masks


def _train(model: nn.Module, workload: TrainingWorkload) -> None:
    """Adapters or whole layers, as ``mlx_lm.lora`` makes them trainable."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    layers = list(model.layers)
    count = workload.num_layers or len(layers)
    model.freeze()
    if workload.method == "full":
        for layer in layers[-count:]:
            layer.unfreeze()
    else:
        settings: dict[str, Any] = {"rank": workload.rank, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, count, settings, workload.method == "dora")
    model.train()


def _calls(model: Any, step: OwnStep) -> tuple[_Call, ...]:
    """Every layer's call, none of which runs."""
    found: list[_Call] = []

    def hook(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(_Call(layer, (args, kwargs)))
        return mx.zeros_like(args[0])

    tokens = mx.zeros((step.workload.batch_size, step.length), mx.int32)
    with intercepted(list(model.layers), hook):
        model(tokens)
    mx.eval([a for call in found for a in arrays(call.args) if a.dtype == mx.bool_])
    return tuple(found)
