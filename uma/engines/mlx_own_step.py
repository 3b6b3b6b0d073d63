"""The memory of ``uma lora train``: a step in evaluated phases (``uma/runtime/lora/step.py``).

Each phase is a graph of its own, laid out one primitive at a time and evaluated on paper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture, Attention, LatentAttention, Layer
from uma.dataset.batches import padded_length
from uma.engines.mlx_attention import FLOAT32, rms_norm
from uma.engines.mlx_layers import LayerProgram
from uma.engines.mlx_training import optimizer_bytes, trained_arrays
from uma.engines.mlx_updates import update_program
from uma.memory.adapters import trained_layers
from uma.memory.mlx_program import Program, Value
from uma.memory.term import MemoryTerm, Phase, TermName
from uma.workload import Backend, TrainingWorkload

LOSS_SLICE_BYTES = 64 << 20  # uma/runtime/lora/loss.py, SLICE_BYTES
ATTENTION_SLICE_BYTES = 32 << 20  # uma/runtime/lora/attention.py, SLICE_BYTES
LEAST_ROWS = 16  # loss.py, slice_rows
SOURCE = "arrays of one evaluated phase in MLX's order"


@dataclass(frozen=True, slots=True)
class OwnStep:
    """The phases of a step of our own trainer; each peak is above what exists before the phase."""

    architecture: Architecture
    workload: TrainingWorkload
    backend: Backend = "metal"
    loss_slice_bytes: int = LOSS_SLICE_BYTES
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES

    @property
    def length(self) -> int:
        """Positions of a row: the last token is only a target, and rows are padded."""
        return padded_length(max(1, self.workload.max_seq_length - 1))

    @property
    def positions(self) -> int:
        return self.workload.batch_size * self.length

    @property
    def hidden_bytes(self) -> int:
        """Hidden vectors between two layers."""
        return self.positions * self.architecture.hidden_size * self.workload.dtype_bytes

    @property
    def mask_bytes(self) -> int:
        """Masks that the model makes for its layers: windows, and all pairs for latents."""
        mixers = [m for layer in self.architecture.layers for m in layer.mixers]
        windows = {m.sliding_window for m in mixers if isinstance(m, Attention)} - {None}
        count = sum(window is not None and window < self.length for window in windows)
        count += any(isinstance(m, LatentAttention) for m in mixers)
        return count * self.length**2

    def forward(self, layer: Layer) -> int:
        """A layer's run, what it gives included."""
        run = self._layer(layer, differentiated=False)
        return self._above(run.program, [run.forward(self._hidden(run.program))])

    def backward(self, layer: Layer) -> int:
        """A layer's run again and its gradients, those of its parameters and input included."""
        run = self._layer(layer, differentiated=True)
        p = run.program
        x = p.primal(self._hidden(p))
        out = run.forward(x)
        return self._above(p, p.vjp([(out, self._hidden(p))], [*run.trained, x]))

    def loss(self) -> int:
        """One slice of the loss with its gradient, and the gradients of those before."""
        rows = LEAST_ROWS
        rows = max(rows, self.loss_slice_bytes // (FLOAT32 * self.architecture.vocab_size))
        rows = min(rows, self.positions)
        before = self.hidden_bytes * (self.positions // rows - 1) * rows // self.positions
        return before + self._loss_slice(rows)

    def update(self) -> int:
        arrays = trained_arrays(self.architecture, self.workload)
        shapes = [(a.shape, a.width) for a in arrays]
        p, roots = update_program(self.workload.optimizer, shapes)
        return self._above(p, roots)

    def _layer(self, layer: Layer, *, differentiated: bool) -> LayerProgram:
        return LayerProgram(
            Program(),
            self.architecture,
            self.workload,
            layer,
            self.length,
            self.backend,
            differentiated,
            self.attention_slice_bytes,
        )

    def _hidden(self, p: Program) -> Value:
        shape = self.workload.batch_size, self.length, self.architecture.hidden_size
        return p.source(*shape, width=self.workload.dtype_bytes)

    def _above(self, p: Program, roots: Sequence[Value]) -> int:
        return p.most(roots, self.backend) - sum(x.nbytes for x in p.sources)

    def _loss_slice(self, rows: int) -> int:
        p, width, size = Program(), self.workload.dtype_bytes, self.architecture.hidden_size
        hidden = p.source(self.positions, size, width=width)
        hidden = p.primal(p.take(hidden, p.source(rows, width=FLOAT32)))
        normed = rms_norm(p, p.expand_dims(hidden, 0), p.source(size, width=width))
        head = p.source(self.architecture.vocab_size, size, width=width)
        if self.workload.quantized:
            logits = p.quantized_matmul(normed, head, head.shape[0])
        else:
            logits = p.matmul(normed, p.swapped(head))
        loss = cross_entropy(p, p.squeeze(logits, (0,)), p.source(rows, width=FLOAT32))
        found = p.vjp([(loss, p.scalar(FLOAT32))], [hidden])
        return self._above(p, [p.add(p.scalar(FLOAT32), loss), *found])


def cross_entropy(p: Program, logits: Value, targets: Value) -> Value:
    """``uma/runtime/lora/loss.py``, ``loss_and_slope``: the loss and its slope."""
    slopes: list[Value] = []

    def forward() -> Value:
        scores, labels = p.astype(logits, FLOAT32), p.expand_dims(targets, 1)
        rows = logits.shape[0]
        highest = p.op("Reduce", [scores], (rows, 1))
        picked = p.take_along_axis(scores, labels)
        powers = p.unary("Exp", p.subtract(scores, highest))
        total = p.sum(powers, (1,), keepdims=True)
        weights = p.source(rows, 1, width=FLOAT32)
        each = p.subtract(p.add(highest, p.unary("Log", total)), picked)
        at_target = p.subtract(p.take_along_axis(powers, labels), total)
        slope = p.op("ScatterAxis", [powers, labels, at_target], powers.shape)
        slope = p.multiply(slope, p.divide(weights, total))
        slopes.append(p.astype(slope, logits.width))
        return p.sum(p.multiply(weights, each), (0, 1))

    def backward(g: Value) -> list[Value]:
        return [p.multiply(slopes[0], g), targets]

    return p.custom(forward, backward, (logits, targets))


def own_training_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: TrainingWorkload,
    *,
    backend: Backend = "metal",
    loss_slice_bytes: int = LOSS_SLICE_BYTES,
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES,
) -> tuple[MemoryTerm, ...]:
    """Every term of a step of our own trainer, by phase; the largest sum is the predicted peak.

    ``max_seq_length`` tokens a row, the last of which is only a target; rows are padded as
    ``uma lora train`` pads them. The loss is a part of ``forward``.
    """
    step = OwnStep(architecture, workload, backend, loss_slice_bytes, attention_slice_bytes)
    return terms_of(step, weights)


def terms_of(step: OwnStep, weights: MemoryTerm) -> tuple[MemoryTerm, ...]:
    """The terms of a step, whose phases are laid out or traced."""
    workload = step.workload
    arrays = trained_arrays(step.architecture, workload)
    size = sum(a.size_bytes for a in arrays)
    terms = [weights]
    if workload.method != "full":
        terms.append(MemoryTerm("adapters", size, "exact", "tuner/lora.py, by shape"))
    states = optimizer_bytes(workload, arrays)
    terms.append(MemoryTerm("optimizer_states", states, "exact", f"{workload.optimizer}, by shape"))
    if workload.grad_accumulation_steps > 1:
        terms.append(MemoryTerm("gradients", size, "exact", "kept between batches"))
    return (*terms, *_phases(step, size))


def _phases(step: OwnStep, gradient_bytes: int) -> Iterator[MemoryTerm]:
    """What each phase holds: the inputs of layers, then one layer or one slice of the loss."""
    layers = trained_layers(step.architecture, step.workload)
    each, masks = step.hidden_bytes, step.mask_bytes
    kinds = _kinds(layers)
    forward = {kind: step.forward(layer) for kind, layer in kinds.items()}
    run = len(layers) * each + max(forward.values())
    kept, loss = (len(layers) + 1) * each, step.loss()
    if run > kept + loss:
        yield _bound("activations", run + masks, "forward")
    else:
        yield _bound("activations", kept + masks, "forward")
        yield _bound("logits", loss, "forward")
    activations, gradients = _backward(step, layers)
    yield _bound("activations", activations + masks, "backward")
    yield MemoryTerm("gradients", gradients, "exact", "one a trained array", "backward")
    held = gradient_bytes
    if step.workload.grad_accumulation_steps > 1:
        held *= 2  # the sum is made beside both
    yield MemoryTerm("gradients", held, "exact", "one a trained array", "optimizer")
    yield _bound("other", step.update(), "optimizer")
    yield _bound("activations", each + masks + max(*forward.values(), loss), "validation")
    yield MemoryTerm("other", 0, "exact", "adapters are written in place", "save")


def _bound(name: TermName, size: int, phase: Phase) -> MemoryTerm:
    return MemoryTerm(name, size, "bound", SOURCE, phase)


def _backward(step: OwnStep, layers: Sequence[Layer]) -> tuple[int, int]:
    """Activations and gradients where the way back through the layers needs most.

    Before a layer there are the inputs of all up to it, what it gave, the gradient of that, and
    the gradients of later layers. Its own are made meanwhile.
    """
    kinds = _kinds(layers)
    peaks = {kind: step.backward(layer) for kind, layer in kinds.items()}
    most, gradients = (0, 0), 0
    for count in range(len(layers), 0, -1):
        layer = layers[count - 1]
        activations = (count + 2) * step.hidden_bytes + peaks[_kind(layer)]
        if activations + gradients > sum(most):
            most = activations, gradients
        gradients += layer_gradient_bytes(step, layer)
    return most


def layer_gradient_bytes(step: OwnStep, layer: Layer) -> int:
    """Of one layer's trained arrays."""
    one = replace(step.architecture, layers=(layer,))
    arrays = trained_arrays(one, replace(step.workload, num_layers=None))
    return sum(a.size_bytes for a in arrays)


def _kinds(layers: Sequence[Layer]) -> dict[object, Layer]:
    """One layer of each kind."""
    return {_kind(layer): layer for layer in layers}


def _kind(layer: Layer) -> object:
    return layer.mixers, layer.feed_forward
