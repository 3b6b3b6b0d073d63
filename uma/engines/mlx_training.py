"""The memory of ``mlx_lm.lora``'s training, term by term (mlx 0.32.4, mlx-lm 0.32.2).

What MLX's own counters leave out (the process, Metal's context) is not a term, nor is the pool of
freed buffers, whose size is a choice.
"""

from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture, Layer, Parameter
from uma.engines import mlx_lm_step
from uma.engines.mlx_attention import FLOAT32
from uma.memory.adapters import adapters, trained_layers
from uma.memory.optimizer_states import mlx_states
from uma.memory.term import MemoryTerm
from uma.quantization import DTYPE_BYTES
from uma.workload import Backend, TrainingWorkload

ALL_REDUCE_BYTES = 32 << 20  # nn/utils.py, average_gradients: gradients joined for one message
OPTIMIZER_SCALARS = 12  # optimizers.py: the step in uint64, the learning rate in float32
SIMULATED = 4  # trained layers of a step that is laid out; more of them are extrapolated
STEP_SOURCE = "arrays of one step in MLX's order of evaluation"


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
    step = extrapolated(architecture, workload, backend)
    terms.append(MemoryTerm("activations", step, "bound", STEP_SOURCE, "backward"))
    forward = _forward_bytes(architecture, workload, backend)
    terms.append(
        MemoryTerm("activations", forward, "bound", "one batch without gradients", "validation")
    )
    terms.append(MemoryTerm("other", 0, "exact", "adapters are written in place", "save"))
    return tuple(terms)


def extrapolated(architecture: Architecture, workload: TrainingWorkload, backend: Backend) -> int:
    """Bytes of a step above what exists before it.

    A step of many trained layers is laid out for few of them, whole periods of their kinds, and
    continued in a straight line from one period on: on Metal a layer more or less may end where a
    command buffer is closed. A checkpointed layer adds its input.
    """
    trained = len(trained_layers(architecture, workload))
    period = _period(architecture.layers)
    count = period * max(2, SIMULATED // period)
    if trained <= count:
        return step_bytes(architecture, workload, trained, backend)
    first, more = (step_bytes(architecture, workload, n, backend) for n in (period, count))
    if workload.grad_checkpoint:
        each = _input_bytes(architecture, workload)
        return max(more + each * (trained - count), first + each * (trained - period))
    return more + (more - first) * (trained - count) // (count - period)


def _input_bytes(architecture: Architecture, workload: TrainingWorkload) -> int:
    """What a checkpointed layer keeps."""
    return workload.tokens * architecture.hidden_size * workload.dtype_bytes


def step_bytes(
    architecture: Architecture, workload: TrainingWorkload, layers: int, backend: Backend
) -> int:
    """Bytes of a step with ``layers`` trained layers above what exists before it."""
    kept = replace(architecture, layers=architecture.layers[-layers:])
    return mlx_lm_step.step_bytes(kept, replace(workload, num_layers=None), backend)


def _forward_bytes(architecture: Architecture, workload: TrainingWorkload, backend: Backend) -> int:
    """Bytes of ``evaluate`` on one batch: the largest layer, or the logits."""
    kept = replace(architecture, layers=architecture.layers[-1:])
    return mlx_lm_step.forward_bytes(kept, replace(workload, num_layers=None), backend)


def _period(layers: tuple[Layer, ...]) -> int:
    """After how many layers their kinds repeat, counted from the last; all if they do not."""
    kinds = [
        (layer.mixers, layer.feed_forward, tuple(p.shape for p in layer.parameters))
        for layer in reversed(layers)
    ]
    for period in range(1, len(kinds) // 2 + 1):
        if all(kinds[i] == kinds[i + period] for i in range(min(period * 2, len(kinds) - period))):
            return period
    return len(kinds)
