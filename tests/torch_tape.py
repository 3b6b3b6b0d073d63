"""A step under PyTorch with all its layers on one tape, to compare the engine's with."""

from collections.abc import Sequence
from typing import Any

from uma.architecture.layers import Layer
from uma.engines.torch_asked import batch_of, layer_settings, step_settings
from uma.engines.torch_layers import decoder_layer
from uma.engines.torch_model import Model
from uma.engines.torch_step import Step
from uma.memory.autograd import Buffer, Tensor


class Tape(Step):
    """All layers, then head and loss; checkpoints run their layers again."""

    def __init__(self, model: Model) -> None:
        batch, layers = batch_of(model), layer_settings(model)
        super().__init__(model.architecture, batch, layers, step_settings(model))
        self.kept: list[Any] = []
        self.whole = 0  # gradients that are where they stay

    def peaks(self) -> tuple[int, int, int, int]:
        """Of both passes, and the gradients that are left, and are there at the second peak."""
        settings, memory = self.settings, self.memory
        x = self.run.graph.leaf(self._input(settings.stream_width))
        layers, every = self.architecture.layers, settings.checkpoint_every
        for index in range(0, len(layers), every or len(layers)):
            some = layers[index : index + (every or len(layers))]
            x = self._checkpointed(some, x) if every else self._layers(some, x)
        normed = self.run.norm(self._reduced(x), x.width)
        del x
        loss = self._loss(settings.copies)
        loss.forward(normed.size_bytes)
        forward, node, size = memory.peak_bytes, normed.node, normed.size_bytes
        del normed
        memory.begin()
        assert node is not None
        node.grad = loss.backward(size)
        self.run.graph.backward(node)
        self._reduce()
        return forward, memory.peak_bytes, self.run.gradient_bytes, self.run.graded_at_peak()

    def _layers(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        for layer in layers:
            x = decoder_layer(self.run, layer, x, self.architecture.hidden_size, self.batch)
            x = self._reduced(x)
        return x

    def _reduced(self, x: Tensor) -> Tensor:
        def back(grad: Buffer) -> Sequence[Buffer]:
            self._reduce()
            return [grad]

        return self.run.graph.apply([x], x.buffer, x.elements, x.width, back)

    def _reduce(self) -> None:
        self._shard(self.whole)
        self.whole = len(self.run.parameter_gradients)

    def _checkpointed(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        settings, graph, saved = self.settings, self.run.graph, x.buffer
        elements, width = x.elements, x.width

        def back(grad: Buffer) -> Sequence[Buffer | None]:
            leaf = graph.leaf(Tensor(saved, elements, width))
            out = self._layers(layers, leaf)
            node = out.node
            assert node is not None
            assert leaf.node is not None
            if not settings.reentrant:
                del out
            node.grad = grad
            graph.backward(node)
            self._reduce()
            if settings.keeps_inputs:
                self.kept += [leaf.buffer, leaf.node.grad]
            return [leaf.node.grad]

        with graph.no_grad():
            out = self._layers(layers, Tensor(x.buffer, elements, width))
        return graph.apply([x], out.buffer, out.elements, out.width, back)
