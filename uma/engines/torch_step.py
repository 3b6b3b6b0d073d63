"""One training step under PyTorch, in sizes: forward, loss, backward, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from uma.architecture.layers import Architecture, Attention, Layer, Mixer
from uma.engines.torch_layers import Batch, decoder_layer
from uma.engines.torch_ops import LayerSettings, Program
from uma.errors import UsageError
from uma.memory.autograd import Buffer, Graph, Memory, Tensor
from uma.memory.loss import TRANSFORMERS, Copies, LossRun

SIMULATED = 4  # layers that are laid out of many equal ones
MOST_FIRST = 5  # layers, one more than may come before equal ones


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
    copies: Copies = TRANSFORMERS


@dataclass(frozen=True, slots=True)
class StepPeaks:
    """Bytes above what is always there, by moment, and the gradients that are left at the end.

    Moments are the forward pass, the loss going backward, and the backward pass of each layer.
    ``logits_bytes`` are those of the loss at the end of the forward pass.
    """

    moments: dict[str, int]
    gradient_bytes: int
    logits_bytes: int = 0

    @property
    def forward_bytes(self) -> int:
        return self.moments.get("forward", 0)

    @property
    def backward_bytes(self) -> int:
        return max(size for moment, size in self.moments.items() if moment != "forward")


class Step:
    """The values of one step."""

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
        self.kept: list[Buffer | None] = []
        self.sharded = 0  # gradients that are where they stay

    def peaks(self) -> StepPeaks:
        self.memory.begin("forward")
        x = self._forward()
        settings, tokens = self.settings, self.batch.tokens
        last = sum(b.size_bytes for b in self.run.kept) if settings.holds_last_graph else 0
        hidden = self.architecture.hidden_size
        normed = self.run.norm(x, x.width)
        del x
        vocabulary = self.architecture.vocab_size
        loss = LossRun(self.memory, tokens, vocabulary, settings.head_width, settings.copies)
        before, layers = self.memory.live_bytes, self.memory.peaks["forward"]
        loss.forward(normed.size_bytes)
        ended = self.memory.peaks["forward"]
        logits = ended - before if ended > layers else self.memory.live_bytes - before
        node, size = normed.node, normed.size_bytes
        saved = normed.buffer if settings.head_trained else None
        del normed
        self.memory.begin("backward")
        grad = loss.backward(size)
        del saved
        if settings.head_trained:
            self.run.gradient(hidden * self.architecture.vocab_size)
            # FSDP's root has embeddings and head, and is whole until its last gradient.
            self.sharded = 1
        if node is None:
            raise UsageError("none of the targets is a matrix whose adapter we know how to train")
        self.run.graph.backward(node, grad)
        self._shard()
        del grad, node
        if settings.embedding_trained:
            self.run.gradient(hidden * self.architecture.vocab_size)
        gradients = sum(b.size_bytes for b in self.run.parameter_gradients)
        moments = {moment: size + last for moment, size in self.memory.peaks.items()}
        return StepPeaks(moments, gradients, logits)

    def without_gradients(self) -> int:
        """The most that is alive in one batch of validation: a layer forward, or the loss."""
        with self.run.graph.no_grad():
            x = self._forward()
            normed = self.run.norm(x, x.width)
        del x
        copies = replace(self.settings.copies, keeps_outputs=False)
        tokens, vocabulary = self.batch.tokens, self.architecture.vocab_size
        loss = LossRun(self.memory, tokens, vocabulary, self.settings.head_width, copies)
        loss.forward(normed.size_bytes)
        return self.memory.peak_bytes

    def _forward(self) -> Tensor:
        settings = self.settings
        hidden = self.architecture.hidden_size
        x = self.run.graph.tensor(self.batch.tokens * hidden, settings.stream_width)
        if settings.inputs_need_gradients or settings.embedding_trained:
            x = self.run.graph.leaf(x)
        layers = self.architecture.layers
        every = settings.checkpoint_every
        index = 0
        while index < len(layers):
            count = every if every else 1
            group = layers[index : index + count]
            x = self._checkpointed(group, x, index) if every else self._layers(group, x, index)
            index += count
        return x

    def _layers(self, layers: Sequence[Layer], x: Tensor, index: int) -> Tensor:
        for i, layer in enumerate(layers, index):
            x = decoder_layer(self.run, layer, x, self.architecture.hidden_size, self.batch)
            x = self._marked(x, i)
        return x

    def _marked(self, x: Tensor, index: int) -> Tensor:
        """``x``; the backward pass is in layer ``index`` once it comes here."""

        def back(grad: Buffer) -> Sequence[Buffer]:
            self._shard()
            self.memory.begin(f"layer {index}")
            return [grad]

        return self.run.graph.apply([x], x.buffer, x.elements, x.width, back)

    def _checkpointed(self, layers: Sequence[Layer], x: Tensor, index: int) -> Tensor:
        """``torch.utils.checkpoint``: the input is saved, the layers run again for the backward.

        The reentrant variant holds the gradient of the output, and the output that it has made
        again, while it goes backward (torch 2.4, ``CheckpointFunction.backward``).
        """
        kept = self.memory.buffer(0) if self.settings.offloads_inputs else x.buffer
        saved, elements, width = Tensor(x.buffer, x.elements, x.width), x.elements, x.width
        products = self._selected(layers) if self.settings.selective else None

        def back(grad: Buffer) -> Sequence[Buffer | None]:
            again = kept if kept.size_bytes else self.memory.buffer(elements * width)
            leaf = self.run.graph.leaf(Tensor(again, elements, width))
            del again
            out = self._layers(layers, leaf, index)
            assert out.node is not None
            assert leaf.node is not None
            node = out.node
            if not self.settings.reentrant:
                del out
            self.run.graph.backward(node, grad)
            self.run.kept.clear()
            self._shard()
            found = leaf.node.grad if products is None or products else None
            if self.settings.keeps_inputs:
                self.kept += [leaf.buffer, found]
            return [found]

        with self.run.graph.no_grad():
            out = self._layers(layers, saved, index)
        del saved
        return self.run.graph.apply(
            [x], out.buffer, out.elements, out.width, back, starts=not self.settings.reentrant
        )

    def _selected(self, layers: Sequence[Layer]) -> Buffer:
        """Half of the products' outputs, and the outputs of attention."""
        rows = sum(p.shape[-2] for layer in layers for p in layer.parameters if p.kind == "matrix")
        mixed = len(layers) * self.architecture.hidden_size
        width = self.run.settings.compute_width
        return self.memory.buffer(self.batch.tokens * (rows // 2 + mixed) * width)

    def _shard(self) -> None:
        """Gradients of a layer that every device keeps a part of once they are reduced."""
        gradients, shards = self.run.parameter_gradients, self.settings.gradient_shards
        if self.settings.drops_gradients:
            gradients.clear()
        elif shards > 1:
            whole = sum(b.size_bytes for b in gradients[self.sharded :])
            gradients[self.sharded :] = [self.memory.buffer(whole // shards)]
            self.sharded = len(gradients)


def validation_bytes(
    architecture: Architecture, batch: Batch, layers: LayerSettings, settings: StepSettings
) -> int:
    """Bytes of one batch without gradients; one layer stands for all."""
    one = replace(architecture, layers=architecture.layers[-1:])
    return Step(one, batch, layers, settings).without_gradients()


def step_peaks(
    architecture: Architecture, batch: Batch, layers: LayerSettings, settings: StepSettings
) -> StepPeaks:
    """The moments of a step.

    Of many equal layers, or of a pattern of layers that returns, ``SIMULATED`` and one more are
    laid out: each moment grows with their number in a straight line, counted from the last layer
    or from the first.
    """
    count, every = len(architecture.layers), max(1, settings.checkpoint_every)
    first, pattern = _pattern(architecture.layers)
    unit = lcm(pattern, every)
    fewer = first + unit * (SIMULATED if pattern == 1 else SIMULATED // 2)
    if 2 * fewer + unit >= count or (count - first) % unit or first % every:
        return Step(architecture, batch, layers, settings).peaks()
    few, more = (
        Step(replace(architecture, layers=architecture.layers[:n]), batch, layers, settings).peaks()
        for n in (fewer, fewer + unit)
    )
    steps, half = (count - fewer) // unit, (first + fewer) // 2
    moments = {}
    for index in range(fewer):
        at = index if index < half else index + unit
        moments[f"layer {index}"] = _line(
            few.moments[f"layer {index}"], more.moments[f"layer {at}"], steps
        )
    for name in ("forward", "backward"):
        moments[name] = _line(few.moments[name], more.moments[name], steps)
    gradients = _line(few.gradient_bytes, more.gradient_bytes, steps)
    return StepPeaks(moments, gradients, more.logits_bytes)


def _line(few: int, more: int, steps: int) -> int:
    return few + (more - few) * steps


def _pattern(layers: Sequence[Layer]) -> tuple[int, int]:
    """How many layers come first, and after how many of the others the same ones return.

    The same is what has the same sizes in a step.
    """
    numbers: dict[object, int] = {}
    kinds = [
        numbers.setdefault(
            (tuple(map(_sizes, one.mixers)), one.feed_forward, *(p.shape for p in one.parameters)),
            len(numbers),
        )
        for one in layers
    ]
    found = ((first, _period(kinds[first:])) for first in range(min(MOST_FIRST, len(kinds))))
    return min(found, key=sum)


def _period(kinds: Sequence[int]) -> int:
    return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])


def _sizes(mixer: Mixer) -> Mixer:
    """A window changes none: all pairs of tokens are laid out, or none by a fused kernel."""
    return replace(mixer, sliding_window=None) if isinstance(mixer, Attention) else mixer
