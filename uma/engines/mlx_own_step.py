"""The memory of ``uma lora train``: a step in evaluated phases (``uma/runtime/lora/step.py``).

Each phase is a graph of its own, laid out one primitive at a time and evaluated on paper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from uma.architecture.layers import Architecture, Attention, LatentAttention, Layer, Recurrent
from uma.dataset.batches import padded_length
from uma.engines.mlx_attention import rms_norm
from uma.engines.mlx_layers import LayerProgram
from uma.engines.mlx_training import (
    apart,
    equal_by_chance,
    optimizer_bytes,
    trained_arrays,
)
from uma.engines.mlx_updates import update_8bit_bytes, update_program
from uma.memory.adapters import trained_layers
from uma.memory.mlx_program import Program, Value
from uma.memory.mlx_sample import Sample
from uma.memory.term import MemoryTerm, Phase, TermName
from uma.quantization import FLOAT32
from uma.workload import Backend, TrainingWorkload

LOSS_SLICE_BYTES = 64 << 20  # uma/runtime/lora/loss.py, SLICE_BYTES
ATTENTION_SLICE_BYTES = 32 << 20  # uma/runtime/lora/attention.py, SLICE_BYTES
LEAST_ROWS = 16  # loss.py, slice_rows
UPDATE = 64  # times the gradients, which is more than an update of them makes: 8 times as laid out
# What the first layer may take of the others of its kind: 1.28 at most as laid out, and 1.06 where
# it recurs, which takes longest to lay out.
FIRST, FIRST_RECURRENT = 1.5, 1.15
SOURCE = "arrays of one evaluated phase in MLX's order"


@dataclass(frozen=True, slots=True)
class OwnStep:
    """The phases of a step of our own trainer; each peak is above what exists before the phase.

    ``packed_tokens`` are the inputs of the longest of several examples that share a row.
    """

    architecture: Architecture
    workload: TrainingWorkload
    backend: Backend = "metal"
    loss_slice_bytes: int = LOSS_SLICE_BYTES
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES
    packed_tokens: int | None = None
    samples: dict[object, Sample[TrainingWorkload]] = field(default_factory=dict)

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
        """Masks that the model makes for its layers: windows, and all pairs for latents.

        Packed, each of them and the causal one once more for every row, and the examples' pairs.
        """
        mixers = [m for layer in self.architecture.layers for m in layer.mixers]
        windows = {m.sliding_window for m in mixers if isinstance(m, Attention)}
        count = sum(window is not None and window < self.length for window in windows)
        count += any(isinstance(m, LatentAttention) for m in mixers)
        if self.packed_tokens is not None:
            count += (len(windows) + 1) * self.workload.batch_size
        return count * self.length**2

    def forward(self, layer: Layer) -> int:
        """A layer's run, what it gives included."""

        def lay_out(p: Program, workload: TrainingWorkload) -> Sequence[Value]:
            step = replace(self, workload=workload)
            return [step._run(p, layer, differentiated=False).forward(step._hidden(p))]

        return self._sample(layer).above("forward", lay_out)

    def backward(self, layer: Layer, *, first: bool = False) -> int:
        """A layer's run again and its gradients, those of its parameters and input included.

        The ``first`` trained layer has no gradient of its input.
        """
        lay_out = partial(self._way_back, layer, first)
        return self._sample(layer).above(("backward", first), lay_out)

    def _sample(self, layer: Layer) -> Sample[TrainingWorkload]:
        if _kind(layer) not in self.samples:
            lay_out, asked = partial(self._way_back, layer, False), self.workload
            self.samples[_kind(layer)] = Sample(
                lay_out,
                asked,
                apart(asked),
                self.backend,
                by_chance=equal_by_chance([layer], asked),
                key=("backward", False),
            )
        return self.samples[_kind(layer)]

    def _way_back(
        self, layer: Layer, first: bool, p: Program, workload: TrainingWorkload
    ) -> Sequence[Value]:
        step = replace(self, workload=workload)
        run = step._run(p, layer, differentiated=True)
        x = step._hidden(p) if first else p.primal(step._hidden(p))
        out = run.forward(x)
        wanted = run.trained if first else [*run.trained, x]
        return p.vjp([(out, step._hidden(p))], wanted)

    def loss(self) -> int:
        """One slice of the loss with its gradient, and the gradients of those before."""
        rows = LEAST_ROWS
        rows = max(rows, self.loss_slice_bytes // (FLOAT32 * self.architecture.vocab_size))
        rows = min(rows, self.positions)
        before = self.hidden_bytes * (self.positions // rows - 1) * rows // self.positions
        return before + self._loss_slice(rows)

    def update(self) -> int:
        arrays = trained_arrays(self.architecture, self.workload)
        shapes = tuple([(a.shape, a.width) for a in arrays])
        return _update_bytes(self.workload.optimizer, shapes, self.backend)

    def _run(self, p: Program, layer: Layer, *, differentiated: bool) -> LayerProgram:
        return LayerProgram(
            p,
            self.architecture,
            self.workload,
            self._narrowed(layer),
            self.length,
            self.backend,
            differentiated=differentiated,
            slice_bytes=self.attention_slice_bytes,
        )

    def _narrowed(self, layer: Layer) -> Layer:
        """The layer as examples that share a row see it: windows of the longest one."""
        most = self.packed_tokens
        if most is None:
            return layer
        mixers = tuple(
            replace(m, sliding_window=min(most, m.sliding_window or most))
            if isinstance(m, Attention)
            else m
            for m in layer.mixers
        )
        return replace(layer, mixers=mixers)

    def _hidden(self, p: Program) -> Value:
        shape = self.workload.batch_size, self.length, self.architecture.hidden_size
        return p.source(*shape, width=self.workload.dtype_bytes)

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
        return p.above([p.add(p.scalar(FLOAT32), loss), *found], self.backend)


@lru_cache(maxsize=16)
def _update_bytes(
    optimizer: str, arrays: tuple[tuple[tuple[int, ...], int], ...], backend: Backend
) -> int:
    if optimizer == "adamw-8bit":
        return update_8bit_bytes(arrays)
    p, roots = update_program(optimizer, arrays)
    return p.above(roots, backend)


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
        return [p.multiply(slopes[0], p.astype(g, logits.width)), targets]

    return p.custom(forward, backward, (logits, targets))


def own_training_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: TrainingWorkload,
    *,
    backend: Backend = "metal",
    loss_slice_bytes: int = LOSS_SLICE_BYTES,
    attention_slice_bytes: int = ATTENTION_SLICE_BYTES,
    packed_tokens: int | None = None,
    peak_alone: bool = False,
) -> tuple[MemoryTerm, ...]:
    """Every term of a step of our own trainer, by phase; the largest sum is the predicted peak.

    ``max_seq_length`` tokens a row, the last of which is only a target; rows are padded as
    ``uma lora train`` pads them. The loss is a part of ``forward``. For the ``peak_alone`` an
    update that is surely less is left out.
    """
    slices = loss_slice_bytes, attention_slice_bytes
    step = OwnStep(architecture, workload, backend, *slices, packed_tokens)
    return terms_of(step, weights, peak_alone=peak_alone)


def terms_of(
    step: OwnStep, weights: MemoryTerm, *, peak_alone: bool = False
) -> tuple[MemoryTerm, ...]:
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
    return (*terms, *_phases(step, size, peak_alone))


def _phases(step: OwnStep, gradient_bytes: int, peak_alone: bool) -> Iterator[MemoryTerm]:
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
    update = 0 if peak_alone and UPDATE * gradient_bytes < activations else step.update()
    if step.workload.grad_accumulation_steps > 1:  # their sum, which is kept, is made beside both
        update = max(update, 2 * gradient_bytes)
    else:
        yield MemoryTerm("gradients", gradient_bytes, "exact", "one a trained array", "optimizer")
    yield _bound("other", update, "optimizer")
    yield _bound("activations", each + masks + max(*forward.values(), loss), "validation")
    yield MemoryTerm("other", 0, "exact", "adapters are written in place", "save")


def _bound(name: TermName, size: int, phase: Phase) -> MemoryTerm:
    return MemoryTerm(name, size, "bound", SOURCE, phase)


def _backward(step: OwnStep, layers: Sequence[Layer]) -> tuple[int, int]:
    """Activations and gradients where the way back through the layers needs most.

    Before a layer there are the inputs of all up to it, what it gave, the gradient of that, and
    the gradients of later layers. Its own are made meanwhile.
    """
    peaks = {kind: step.backward(layer) for kind, layer in _kinds(layers[1:]).items()}
    most, gradients = (0, 0), 0
    for count in range(len(layers), 0, -1):
        layer, inputs = layers[count - 1], (count + 2) * step.hidden_bytes
        peak = peaks.get(_kind(layer), sum(most))
        if count == 1 and inputs + _first_factor(layer) * peak + gradients > sum(most):
            peak = step.backward(layer, first=True)
        if inputs + peak + gradients > sum(most):
            most = inputs + peak, gradients
        gradients += layer_gradient_bytes(step, layer)
    return most


def _first_factor(layer: Layer) -> float:
    recurs = any(isinstance(mixer, Recurrent) for mixer in layer.mixers)
    return FIRST_RECURRENT if recurs else FIRST


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
