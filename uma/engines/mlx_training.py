"""The memory of ``mlx_lm.lora``'s training, term by term (mlx 0.32.4, mlx-lm 0.32.2).

What MLX's own counters leave out (the process, Metal's context) is not a term, nor is the pool of
freed buffers, whose size is a choice.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from uma.architecture.layers import Architecture, Layer, Parameter
from uma.engines import mlx_lm_step
from uma.engines.mlx_attention import FLOAT32
from uma.frozen import dataclass
from uma.memory.adapters import adapters, trained_layers
from uma.memory.mlx_program import Program, Value
from uma.memory.mlx_sample import LayOut, Sample
from uma.memory.optimizer_states import mlx_states
from uma.memory.term import MemoryTerm
from uma.quantization import DTYPE_BYTES
from uma.workload import Backend, TrainingWorkload

ALL_REDUCE_BYTES = 32 << 20  # nn/utils.py, average_gradients: gradients joined for one message
OPTIMIZER_SCALARS = 12  # optimizers.py: the step in uint64, the learning rate in float32
# Trained layers of a step that is laid out, more of which are extrapolated. Gradients of all arrays
# of checkpointed layers pile up until one more layer no longer changes what is alive.
SIMULATED, SIMULATED_FULL = 8, 12
STEP_SOURCE = "arrays of one step in MLX's order of evaluation"

Roots = Callable[[Program, Architecture, TrainingWorkload, Backend], list[Value]]
"""What is evaluated, laid out in a program."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One trained array."""

    shape: tuple[int, ...]
    width: int

    @property
    def size_bytes(self) -> int:
        size = self.width
        for dim in self.shape:
            size *= dim
        return size


def trained_arrays(architecture: Architecture, workload: TrainingWorkload) -> list[Trained]:
    """Every array that gets a gradient, as ``mlx_lm.lora`` makes or unfreezes it.

    Factors and magnitudes of adapters are float32 whatever the model is (``tuner/lora.py``,
    ``mx.random.uniform``; ``tuner/dora.py``, ``set_linear``).
    """
    if workload.method == "full":
        return [
            Trained(p.shape, _width(p, workload))
            for layer in trained_layers(architecture, workload)
            for p in layer.parameters
        ]
    found = []
    for adapter in adapters(architecture, workload):
        stacked = (adapter.count,) if len(adapter.parameter.shape) == 3 else ()
        found.append(Trained((*stacked, adapter.columns, adapter.rank), FLOAT32))
        found.append(Trained((*stacked, adapter.rank, adapter.rows), FLOAT32))
        if adapter.magnitude:
            found.append(Trained((adapter.rows,), FLOAT32))
    return found


def _width(parameter: Parameter, workload: TrainingWorkload) -> int:
    if parameter.dtype == "model":
        return workload.dtype_bytes
    return DTYPE_BYTES[parameter.dtype]


def optimizer_bytes(workload: TrainingWorkload, arrays: list[Trained]) -> int:
    """What the optimizer keeps of them, and its two numbers."""
    states = (mlx_states(workload.optimizer, a.shape, a.width).device_bytes for a in arrays)
    return sum(states) + OPTIMIZER_SCALARS


def training_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: TrainingWorkload,
    *,
    backend: Backend = "metal",
) -> tuple[MemoryTerm, ...]:
    """Every term of training, by phase; the largest sum of a phase is the predicted peak.

    MLX evaluates forward, backward and update of a step as one graph, so that they are one phase,
    ``backward``: gradients die one by one and are part of its activations. With accumulation they
    are kept between steps. Workers of ``mx.distributed`` take their part of each batch.
    """
    arrays = trained_arrays(architecture, workload)
    size = sum(a.size_bytes for a in arrays)
    terms = [weights]
    workers = workload.sharding.data
    if workers > 1:
        workload = replace(workload, batch_size=workload.batch_size // workers)
        bucket = 2 * min(size, ALL_REDUCE_BYTES)
        terms.append(MemoryTerm("other", bucket, "bound", "nn/utils.py, average_gradients"))
    if workload.method != "full":
        terms.append(MemoryTerm("adapters", size, "exact", "tuner/lora.py, by shape"))
    states = optimizer_bytes(workload, arrays)
    terms.append(MemoryTerm("optimizer_states", states, "exact", f"{workload.optimizer}, by shape"))
    if workload.grad_accumulation_steps > 1:
        source = "kept between steps"
        terms.append(MemoryTerm("gradients", size, "exact", source))
    steps = Steps(architecture, workload, backend)
    terms.append(MemoryTerm("activations", steps.peak_bytes(), "bound", STEP_SOURCE, "backward"))
    source = "one batch without gradients"
    terms.append(MemoryTerm("activations", steps.forward_bytes(), "bound", source, "validation"))
    terms.append(MemoryTerm("other", 0, "exact", "adapters are written in place", "save"))
    return tuple(terms)


class Steps:
    """A step, and those with more or fewer of the last layers.

    The sizes of all are those of a step with one layer of each kind, so that those with more
    layers are laid out, compiled and ordered once for all batches, lengths and ranks.
    """

    def __init__(
        self, architecture: Architecture, workload: TrainingWorkload, backend: Backend
    ) -> None:
        self.architecture, self.backend = architecture, backend
        self.trained = len(trained_layers(architecture, workload))
        self.workload = replace(workload, num_layers=None)
        kinds = _kinds(architecture)
        self.period = _period(kinds)
        full = workload.method == "full" and workload.grad_checkpoint
        least = SIMULATED_FULL if full else SIMULATED
        self.most = self.period * max(2, -(-least // self.period))  # layers that are laid out
        one = dict(zip(kinds[-self.most :], architecture.layers[-self.most :], strict=True))
        self.kinds = [list(one).index(kind) for kind in kinds[-self.most :]]
        inner = partial(mlx_lm_step.step_roots, inner=True)
        self.sample = Sample(self._lay_out(tuple(one.values()), inner), backend)

    def peak_bytes(self) -> int:
        """The peak of the step above what exists before it.

        A step of many trained layers is laid out for few of them, whole periods of their kinds,
        and continued in a straight line: a layer more or less may end where a command buffer is
        closed, or be alive with one more of the others. A checkpointed layer adds its input.
        """
        trained, period, count = self.trained, self.period, self.most
        if trained <= count:
            return self.step_bytes(trained)
        pair = period * max(1, 2 // period)
        more = self.step_bytes(count)
        if self.workload.grad_checkpoint:
            width = self.architecture.hidden_size * self.workload.dtype_bytes
            each = self.workload.tokens * width
            fewer = self.step_bytes(count - pair) + each * pair
            return max(more, fewer) + each * (trained - count)
        return more + (more - self.step_bytes(pair)) * (trained - count) // (count - pair)

    def step_bytes(self, layers: int) -> int:
        """The peak of a step with ``layers`` layers, above what exists before it."""
        return self._above(layers, mlx_lm_step.step_roots, compiled=True)

    def forward_bytes(self) -> int:
        """The peak of ``evaluate`` on one batch: in the last layer, or of the logits."""
        return self._above(1, mlx_lm_step.forward_roots, compiled=False)

    def _above(self, layers: int, roots: Roots, *, compiled: bool) -> int:
        key = compiled, layers, *self.kinds[-layers:]
        lay_out = self._lay_out(self.architecture.layers[-layers:], roots)
        return self.sample.above(key, lay_out, compiled=compiled)

    def _lay_out(self, layers: tuple[Layer, ...], roots: Roots) -> LayOut:
        kept = replace(self.architecture, layers=layers)
        return lambda p: roots(p, kept, self.workload, self.backend)


def _kinds(architecture: Architecture) -> list[object]:
    """What of each layer decides how it is laid out."""
    shapes = [tuple([p.shape for p in layer.parameters]) for layer in architecture.layers]
    return list(zip(map(id, architecture.kinds), shapes, strict=True))


def _period(kinds: list[object]) -> int:
    """After how many layers their kinds repeat, counted from the last; all if they do not."""
    kinds = kinds[::-1]
    for period in range(1, len(kinds) // 2 + 1):
        if all(kinds[i] == kinds[i + period] for i in range(min(period * 2, len(kinds) - period))):
            return period
    return len(kinds)
