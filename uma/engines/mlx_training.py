"""The memory of ``mlx_lm.lora``'s training, term by term (mlx 0.32.4, mlx-lm 0.32.2).

What MLX's own counters leave out (the process, Metal's context) is not a term, nor is the pool of
freed buffers, whose size is a choice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from uma.architecture.layers import Architecture, Experts, Layer, Parameter
from uma.engines import mlx_lm_step
from uma.engines.mlx_compiled_update import updated_at_once
from uma.engines.mlx_gated_delta import is_ruled, summed_together
from uma.engines.mlx_roles import module_order
from uma.memory.adapters import layer_adapters, require_form, trained_layers
from uma.memory.liveness import MAX_WIDTH
from uma.memory.mlx_plan import Levels, highest
from uma.memory.mlx_program import Program, Value
from uma.memory.mlx_sample import LayOut, Sample
from uma.memory.optimizer_states import mlx_states
from uma.memory.term import MemoryTerm
from uma.quantization import DTYPE_BYTES, FLOAT32
from uma.workload import Backend, TrainingWorkload

ALL_REDUCE_BYTES = 32 << 20  # nn/utils.py, average_gradients: gradients joined for one message
OPTIMIZER_SCALARS = 12  # optimizers.py: the step in uint64, the learning rate in float32
# Layers between the first and the last that are laid out, beside one of each kind, where layers run
# again, and where gradients of whole matrices pile up: what is alive depends on more layers then,
# and on the CPU on as many as a hundred operations that may wait.
BESIDE: dict[Backend, int] = {"metal": 3, "cpu": 4}
BATCH_APART, RANK_APART = 23, 29
STEP_SOURCE = "arrays of one step in MLX's order of evaluation"

Roots = Callable[[Program, Architecture, TrainingWorkload, Backend], list[Value]]
"""What is evaluated, laid out in a program."""

LayerKind = tuple[object, bool]
"""What of a layer decides how it is laid out, and whether its gradients are summed together."""


class Trained(NamedTuple):
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
    layers = trained_layers(architecture, workload)
    kinds = layers if workload.targets else architecture.alike[-len(layers) :]
    known: dict[int, list[Trained]] = {}
    for kind in kinds:
        if id(kind) not in known:
            known[id(kind)] = _arrays(kind, workload)
    return [array for kind in kinds for array in known[id(kind)]]


def _arrays(layer: Layer, workload: TrainingWorkload) -> list[Trained]:
    """Those of one layer."""
    if workload.method == "full":
        return [Trained(p.shape, _width(p, workload)) for p in layer.parameters]
    found = []
    for adapter in layer_adapters(layer, workload):
        require_form(adapter)
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
    states = [
        count * mlx_states(workload.optimizer, array.shape, array.width).device_bytes
        for array, count in Counter(arrays).items()
    ]
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
    size = sum([a.size_bytes for a in arrays])
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
    """A step, and those with fewer layers.

    The sizes of all are those of a step with one layer of each kind, so that those with more
    layers are laid out, compiled and ordered once for all batches, lengths and ranks.
    """

    def __init__(
        self, architecture: Architecture, workload: TrainingWorkload, backend: Backend
    ) -> None:
        self.architecture, self.backend = architecture, backend
        self.layers = trained_layers(architecture, workload)
        self.workload = replace(workload, num_layers=None)
        kinds = _kinds(architecture)[-len(self.layers) :]
        self.kinds = list(zip(kinds, self._summed_together(kinds), strict=True))
        again = workload.method == "full" or workload.grad_checkpoint
        self.places = _laid_out(self.kinds, BESIDE[backend] if again else 0)
        self.left = Counter(self.kinds) - Counter([self.kinds[place] for place in self.places])
        self.one = dict(zip(self.kinds, self.layers, strict=True))
        together = [n for n, (_, here) in enumerate(self.one) if here]
        roots = partial(mlx_lm_step.step_roots, inner=True, small=1, summed_together=together)
        lay_out = self._lay_out(self.one.values(), roots)
        plain = replace(self.workload, grad_checkpoint=0)
        chance = equal_by_chance(self.one.values(), plain)
        self.sample = Sample(lay_out, plain, apart(plain), backend, by_chance=chance)

    def peak_bytes(self) -> int:
        """The peak of the step above what exists before it.

        A step of many trained layers is laid out for some of them. What one more of a kind leaves
        alive, until the first layer's output is used for the last time, is what a layer of that
        kind has added to what is needed after it. Small arrays stand for those of layers that are
        not laid out, as MLX's order of evaluation takes ``MAX_WIDTH`` of them at once. Gradients
        whose update is more than one kernel wait for the end, when all are there.
        """
        small = self._of_left({kind: len(self._trained(self.one[kind])) for kind in self.left})
        found = self._levels(self.places, small % MAX_WIDTH)
        if self.left and not found[0].needed:  # no array stands between two layers
            return self.step_bytes(len(self.layers))
        waiting = self._of_left({kind: self._waiting_bytes(self.one[kind]) for kind in self.left})
        return max(self._continued(levels, waiting) for levels in found)

    def step_bytes(self, layers: int) -> int:
        """The peak of a step with the last ``layers`` layers, above what exists before it."""
        return highest(self._levels(range(len(self.layers))[-layers:]))

    def forward_bytes(self) -> int:
        """The peak of ``evaluate`` on one batch: in the last layer, or of the logits."""
        lay_out = self._lay_out(self.layers[-1:], mlx_lm_step.forward_roots)
        return self.sample.above(("forward", self.kinds[-1]), lay_out)

    def _trained(self, layer: Layer) -> list[Trained]:
        """The trained arrays of a layer."""
        return _arrays(layer, self.workload)

    def _waiting_bytes(self, layer: Layer) -> int:
        """Of a layer's gradients, those that wait for their update."""
        optimizer, arrays = self.workload.optimizer, self._trained(layer)
        return sum([a.size_bytes for a in arrays if not updated_at_once(optimizer, a.width)])

    def _summed_together(self, kinds: Sequence[object]) -> list[bool]:
        """Whether gradients of a layer are, which makes its kind another one."""
        ruled = [is_ruled(layer) for layer in self.layers]
        if self.workload.method != "full" or not any(ruled):
            return [False] * len(ruled)
        one = dict(zip(kinds, self.layers, strict=True))
        arrays = {kind: len(self._trained(layer)) for kind, layer in one.items()}
        return summed_together([arrays[kind] for kind in kinds], ruled)

    def _of_left(self, each: Mapping[LayerKind, int]) -> int:
        """The sum over layers that are not laid out, of what there is of each of a kind."""
        return sum([count * each[kind] for kind, count in self.left.items()])

    def _continued(self, levels: Levels, waiting_bytes: int) -> int:
        """The peak with the layers that are not laid out, which are between the first and last.

        Their gradients that wait for the end are ``waiting_bytes``.
        """
        if not self.left:
            return max(levels.peaks)
        kinds = [self.kinds[place] for place in self.places[1:-1]]
        pairs = zip(kinds, levels.needed, levels.needed[1:], strict=False)
        added = {kind: after - before for kind, before, after in pairs}
        *until, last = levels.peaks
        return max(max(until) + self._of_left(added), last + waiting_bytes)

    def _levels(self, places: Sequence[int], small: int = 0) -> list[Levels]:
        kinds = [list(self.one).index(self.kinds[place]) for place in places]
        # The sample, with one array of each shape, does not show the order of those trained.
        again, order = self.workload.grad_checkpoint, module_order(self.architecture.model_type)
        key = (again, small, order, *kinds)
        together = [n for n, place in enumerate(places) if self.kinds[place][1]]
        roots = partial(mlx_lm_step.step_roots, small=small, summed_together=together)
        lay_out = self._lay_out([self.layers[place] for place in places], roots, again)
        return self.sample.levels(key, lay_out, compiled=True)

    def _lay_out(
        self, layers: Iterable[Layer], roots: Roots, grad_checkpoint: int = 0
    ) -> LayOut[TrainingWorkload]:
        kept = replace(self.architecture, layers=tuple(layers))

        def lay_out(p: Program, workload: TrainingWorkload) -> list[Value]:
            if grad_checkpoint:
                workload = replace(workload, grad_checkpoint=grad_checkpoint)
            return roots(p, kept, workload, self.backend)

        return lay_out


def apart(workload: TrainingWorkload) -> TrainingWorkload:
    """The same with a batch and a rank that are no dimension of a model."""
    return replace(workload, batch_size=BATCH_APART, rank=RANK_APART)


def equal_by_chance(layers: Iterable[Layer], workload: TrainingWorkload) -> bool:
    """Whether the batch or the rank may be, to a dimension with which shapes are then equal."""
    dims = {1}
    for layer in layers:
        dims.update(*[parameter.shape for parameter in layer.parameters])
        dims.update([x.num_experts_per_tok for x in layer.feed_forward if isinstance(x, Experts)])
    return workload.batch_size == 1 or (workload.method != "full" and workload.rank in dims)


def _laid_out(kinds: Sequence[object], beside: int) -> list[int]:
    """Places of layers that are laid out: the first, the last, between them the last of each kind.

    With ``beside`` more of the most frequent kind.
    """
    between = range(len(kinds) - 2, 0, -1)
    last = {kinds[place]: place for place in reversed(between)}
    (frequent, _), *_ = Counter(kinds).most_common(1)
    others = [p for p in between if kinds[p] == frequent and p != last.get(frequent)]
    return sorted({0, len(kinds) - 1, *last.values(), *others[:beside]})


def _kinds(architecture: Architecture) -> list[object]:
    """What of each layer decides how it is laid out."""
    shapes = [tuple([p.shape for p in layer.parameters]) for layer in architecture.layers]
    return list(zip(map(id, architecture.kinds), shapes, strict=True))
