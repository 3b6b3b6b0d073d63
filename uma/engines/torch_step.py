"""One training step under PyTorch, in sizes: forward, loss, backward, layer by layer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from uma.architecture.layers import Architecture, Layer
from uma.architecture.remembered import remembered
from uma.engines.torch_layers import Batch, decoder_layer
from uma.engines.torch_ops import LayerSettings, Program
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.memory.autograd import Graph, Memory, Tensor
from uma.memory.loss import TRANSFORMERS, Copies, LossRun


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What decides the sizes of a step beside those of a layer.

    ``keeps_inputs`` is FSDP 1 with frozen parameters: its hooks on the inputs of a layer hold them
    and their gradients until the backward pass ends (torch 2.4,
    ``distributed/fsdp/_runtime_utils.py``, ``_register_post_backward_reshard_only_hook``).
    ``inputs_need_gradients`` is ``enable_input_require_grads``.
    ``gradient_shards`` are the devices over which gradients are spread once a layer is done;
    ``drops_gradients`` is an optimizer that runs in the backward pass. ``offloads_inputs`` is
    Unsloth's checkpointing, which moves saved inputs to the host. ``selective`` checkpointing also
    saves every second product and attention's output (torchtitan 0.1,
    ``parallelize_llama.py``, ``_save_list``). ``holds_last_graph`` is a program whose names hold
    the graph of a batch until the next one has run forward, and with it what nodes keep.
    ``frozen_layers`` come before those that are trained. ``first_gradient_bytes`` are made with the
    first gradient after the loss, see ``torch_deepspeed``.
    """

    stream_width: int = 2
    head_width: int = 2
    checkpoint_every: int = 0
    reentrant: bool = True
    inputs_need_gradients: bool = True
    keeps_inputs: bool = False
    head_trained: bool = False
    embedding_trained: bool = False
    gradient_shards: int = 1
    drops_gradients: bool = False
    selective: bool = False
    offloads_inputs: bool = False
    holds_last_graph: bool = False
    frozen_layers: int = 0
    first_gradient_bytes: int = 0
    copies: Copies = TRANSFORMERS


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Bytes above what is always there, and the gradients that are left at the end.

    ``graded_bytes`` are the gradients that are there when the backward pass needs most.
    ``logits_bytes`` are those of the loss at the end of the forward pass. ``loss_binds`` says that
    the backward pass needs most where it begins.
    """

    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    graded_bytes: int
    logits_bytes: int
    loss_binds: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer, or those that are checkpointed together, by itself: what each of its passes does.

    ``forward_bytes`` and ``backward_bytes`` are the peaks above what is alive before the pass,
    ``forward_left`` and ``backward_left`` what is alive after it, less what was before.
    ``gradient_bytes`` are those that it leaves, ``graded_bytes`` those at the peak of its backward
    pass. ``kept_bytes`` are inputs that nodes keep; ``width`` and ``has_graph`` are of its output.
    """

    forward_bytes: int
    forward_left: int
    backward_bytes: int
    backward_left: int
    gradient_bytes: int
    graded_bytes: int
    kept_bytes: int
    width: int
    has_graph: bool


class Step:
    """The values of a part of a step, above nothing."""

    def __init__(
        self,
        architecture: Architecture,
        batch: Batch,
        layers: LayerSettings,
        settings: StepSettings,
    ) -> None:
        self.architecture, self.batch, self.settings = architecture, batch, settings
        self.memory = Memory()
        self.run = Program(Graph(self.memory), layers)

    def layer(
        self, layer: Layer, width: int, has_graph: bool, *, holds_input: bool, keeps_gradient: bool
    ) -> Unit:
        """Both passes of ``layer``, whose input has ``width``, and a graph or none.

        What surrounds it may hold its input, and the gradient of its output.
        """
        memory = self.memory
        x = self._input(width, has_graph)
        held = x.buffer if holds_input else None
        given = memory.live_bytes
        memory.begin()
        out = self._through(layer, x)
        del x
        forward, left = memory.peak_bytes, memory.live_bytes
        kept = sum(b.size_bytes for b in self.run.kept)
        node, size, width = out.node, out.size_bytes, out.width
        del out
        before = memory.live_bytes + size  # with the gradient of the output
        memory.begin()
        gradient = None
        if node is not None:
            node.grad = memory.buffer(size)
            gradient = node.grad if keeps_gradient else None
            self.run.graph.backward(node)
            self._shard(0)
        after = memory.live_bytes
        del held, gradient
        return Unit(
            forward - given,
            left - given,
            memory.peak_bytes - before,
            after - before,
            self.run.gradient_bytes,
            self.run.graded_at_peak(),
            kept,
            width,
            node is not None,
        )

    def without_graph(self, layer: Layer, width: int) -> tuple[int, int]:
        """The peak of a forward pass above its input, and the width of its output."""
        with self.run.graph.no_grad():
            x = self._input(width)
            given = self.memory.live_bytes
            out = self._through(layer, x)
        return self.memory.peak_bytes - given, out.width

    def _through(self, layer: Layer, x: Tensor) -> Tensor:
        return decoder_layer(self.run, layer, x, self.architecture.hidden_size, self.batch)

    def ends(self, forward: int, live: int, width: int, has_graph: bool) -> tuple[StepPeaks, int]:
        """The end of the forward pass, above ``live`` bytes, and the backward pass of the loss.

        ``forward`` is the peak before it. Beside the peaks, what is alive afterwards.

        Raises:
            UsageError: If nothing is trained.
        """
        memory, settings = self.memory, self.settings
        x = self._input(width, has_graph)
        memory.live_bytes, memory.peak_bytes = live, forward
        normed = self.run.norm(x, x.width)
        del x
        loss = self._loss(settings.copies)
        before, layers = memory.live_bytes, memory.peak_bytes
        loss.forward(normed.size_bytes)
        ended = memory.peak_bytes
        logits = ended - before if ended > layers else memory.live_bytes - before
        node, size = normed.node, normed.size_bytes
        saved = normed.buffer if settings.head_trained else None
        del normed
        if node is None:
            raise UsageError("none of the targets is a matrix whose adapter we know how to train")
        memory.begin()
        node.grad = loss.backward(size)
        del saved
        if settings.head_trained:
            self.end_gradient()
        self.run.graph.backward(node)
        # FSDP's root has embeddings and head, and is whole until its last gradient.
        self._shard(1)
        gradients = self.run.gradient_bytes, self.run.graded_at_peak()
        return StepPeaks(ended, memory.peak_bytes, *gradients, logits), memory.live_bytes

    def loss_bytes(self, width: int) -> int:
        """The most that is alive from the last layer to the loss, without gradients."""
        with self.run.graph.no_grad():
            x = self._input(width)
            normed = self.run.norm(x, x.width)
        del x
        self._loss(replace(self.settings.copies, keeps_outputs=False)).forward(normed.size_bytes)
        return self.memory.peak_bytes

    def end_gradient(self) -> None:
        """That of embeddings or head, which are split too (Megatron, arXiv:1909.08053, 3)."""
        size = self.architecture.hidden_size * self.architecture.vocab_size
        self.run.gradient(size // self.run.settings.tensor)

    def _loss(self, copies: Copies) -> LossRun:
        tokens, vocabulary = self.batch.tokens, self.architecture.vocab_size
        return LossRun(self.memory, tokens, vocabulary, self.settings.head_width, copies)

    def _input(self, width: int, has_graph: bool = False) -> Tensor:
        x = self.run.graph.tensor(self.batch.tokens * self.architecture.hidden_size, width)
        if not has_graph:
            return x
        x = self.run.graph.leaf(x)
        self.leaf = x.node  # has the gradient in the end
        return x

    def _shard(self, whole: int) -> None:
        """Gradients, but for the first ``whole``, once they are reduced: each device has a part."""
        gradients, shards = self.run.parameter_gradients, self.settings.gradient_shards
        self.run.graded_at_peak()
        if self.settings.drops_gradients:
            gradients.clear()
        elif shards > 1:
            size = sum(b.size_bytes for b in gradients[whole:])
            gradients.append(self.memory.buffer(size // shards))
            self.run.graded_at_peak()  # with the part of each device
            del gradients[whole:-1]


class Units:
    """The layers of steps that run as ``how`` says, those of a kind laid out once."""

    def __init__(
        self,
        architecture: Architecture,
        batch: Batch,
        how: LayerSettings,
        settings: StepSettings,
    ) -> None:
        self.architecture, self.batch, self.how, self.settings = architecture, batch, how, settings
        self.elements = batch.tokens * architecture.hidden_size
        reduced = settings.gradient_shards, settings.drops_gradients
        self.known = _laid_out(architecture, batch, how, *reduced)

    def alone(
        self, layer: Layer, width: int, has_graph: bool, *, holds: bool = False, keeps: bool = False
    ) -> Unit:
        """``Step.layer`` of a kind."""
        key = (id(layer), width, has_graph, holds, keeps)
        if key not in self.known:
            step = Step(self.architecture, self.batch, self.how, self.settings)
            self.known[key] = step.layer(
                layer, width, has_graph, holds_input=holds, keeps_gradient=keeps
            )
        unit: Unit = self.known[key]
        return unit

    def checkpointed(
        self, layers: Sequence[Layer], width: int, has_graph: bool, keeps: bool
    ) -> Unit:
        """``torch.utils.checkpoint``: the input is saved, the layers run again for the backward.

        The reentrant variant holds the gradient of the output, and the output that it has made
        again, while it goes backward (torch 2.4, ``CheckpointFunction.backward``). ``keeps`` says
        whether that gradient stays afterwards.
        """
        settings, x = self.settings, self.elements * width
        forward, out_width = self.without_graph(layers, width)
        out = self.elements * out_width
        if not has_graph and (settings.reentrant or not self.how.linear.trains):
            return Unit(forward, out - x, 0, 0, 0, 0, 0, out_width, has_graph=False)
        selected = self._selected_bytes(layers) if settings.selective else 0
        saved = 0 if settings.offloads_inputs else x
        peak = live = x - saved
        gradients = graded = 0
        units: list[Unit] = []
        for layer in layers:
            last = len(units) == len(layers) - 1
            given = units[-1].width if units else width
            unit = self.alone(layer, given, True, holds=not units, keeps=last)
            peak = max(peak, live + unit.forward_bytes)
            live += unit.forward_left
            units.append(unit)
        made_again = out if settings.reentrant else 0
        live += made_again - out
        for unit in reversed(units):
            if live + unit.backward_bytes > peak:
                peak, graded = live + unit.backward_bytes, gradients + unit.graded_bytes
            live += unit.backward_left - unit.kept_bytes
            gradients += unit.gradient_bytes
        live -= made_again + selected + (0 if settings.keeps_inputs else x) + (0 if keeps else out)
        left, backward = selected + out + saved - x, (peak, live, gradients, graded)
        return Unit(selected + forward, left, *backward, 0, out_width, has_graph=True)

    def without_graph(self, layers: Sequence[Layer], width: int) -> tuple[int, int]:
        """The peak above the first one's input, which is saved, and the width of the output."""
        peak = beside = 0
        for layer in layers:
            key = (id(layer), width)
            if key not in self.known:
                step = Step(self.architecture, self.batch, self.how, self.settings)
                self.known[key] = step.without_graph(layer, width)
            above, width = self.known[key]
            peak = max(peak, beside + above)
            beside = self.elements * width
        return peak, width

    def _selected_bytes(self, layers: Sequence[Layer]) -> int:
        """Half of the products' outputs, and the outputs of attention."""
        rows = sum(p.shape[-2] for layer in layers for p in layer.parameters if p.kind == "matrix")
        mixed = len(layers) * self.architecture.hidden_size
        return self.batch.tokens * (rows // 2 + mixed) * self.how.compute_width


@remembered
def _laid_out(
    architecture: Architecture,
    batch: Batch,
    how: LayerSettings,
    gradient_shards: int,
    drops_gradients: bool,
) -> dict[object, Any]:
    """What is known of the layers of all steps that differ in nothing of this."""
    return {}


@remembered
def validation_bytes(
    architecture: Architecture, batch: Batch, layers: LayerSettings, settings: StepSettings
) -> int:
    """The most that is alive in one batch without gradients: a layer forward, or the loss."""
    units = Units(architecture, batch, layers, settings)
    above, width = units.without_graph(architecture.kinds[-1:], settings.stream_width)
    ended = Step(architecture, batch, layers, settings).loss_bytes(width)
    return max(units.elements * settings.stream_width + above, ended)


@remembered
def step_peaks(
    architecture: Architecture,
    batch: Batch,
    layers: LayerSettings,
    settings: StepSettings,
    alive: int,
) -> StepPeaks:
    """The peaks of a step of the last ``alive`` layers.

    Layers of one kind do the same to what is alive before them, and are laid out once.

    Raises:
        UsageError: If nothing is trained.
    """
    part = partial(Step, architecture, batch, layers, settings)
    units = list(_units(architecture, batch, layers, settings, alive))
    forward = live = batch.tokens * architecture.hidden_size * settings.stream_width
    for unit in units:
        forward = max(forward, live + unit.forward_bytes)
        live += unit.forward_left
    found, live = part().ends(forward, live, unit.width, unit.has_graph)
    backward, graded = found.backward_bytes, found.graded_bytes
    gradients = found.gradient_bytes
    live += settings.first_gradient_bytes
    for unit in reversed(units):
        if live + unit.backward_bytes > backward:
            backward, graded = live + unit.backward_bytes, gradients + unit.graded_bytes
        live += unit.backward_left
        gradients += unit.gradient_bytes
    if settings.embedding_trained:
        embedding = part()
        embedding.end_gradient()
        made, peak = embedding.run.gradient_bytes, live + embedding.memory.peak_bytes
        if peak > backward:
            backward, graded = peak, gradients + made
        gradients += 0 if settings.drops_gradients else made
    last = sum(unit.kept_bytes for unit in units) if settings.holds_last_graph else 0
    peaks = found.forward_bytes + last, backward + last
    binds = backward == found.backward_bytes
    return StepPeaks(*peaks, gradients, graded, found.logits_bytes, binds)


def _units(
    architecture: Architecture,
    batch: Batch,
    layers: LayerSettings,
    settings: StepSettings,
    alive: int,
) -> Iterator[Unit]:
    """Layers one by one, or those that are checkpointed together."""
    both = layers, layers.frozen
    trained, frozen = (Units(architecture, batch, how, settings) for how in both)
    width = settings.stream_width
    has_graph = settings.inputs_need_gradients or settings.embedding_trained
    every, kinds = max(1, settings.checkpoint_every), architecture.kinds[-alive:]
    known: dict[object, Unit] = {}
    for index in range(0, len(kinds), every):
        some = kinds[index : index + every]
        kind = frozen if index + len(some) <= settings.frozen_layers else trained
        if settings.checkpoint_every:
            keeps = settings.keeps_inputs and index + every < len(kinds)
            key = (kind, *map(id, some), width, has_graph, keeps)
            if key not in known:
                known[key] = kind.checkpointed(some, width, has_graph, keeps)
            unit = known[key]
        else:
            unit = kind.alone(some[0], width, has_graph)
        width, has_graph = unit.width, unit.has_graph
        yield unit
