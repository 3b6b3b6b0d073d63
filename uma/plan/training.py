"""Training of one model on one machine: terms by phase, verdict, inverses, and what would help."""

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from math import sqrt
from typing import Literal

from uma.architecture.layers import Architecture, Recurrent
from uma.engines import mlx_training, torch_training
from uma.engines.torch_model import Settings
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.ledger import Ledger, peak
from uma.machine import Budget, Machine, verdict
from uma.memory.adapters import adapters
from uma.memory.sharding import Placed, States, communication_bytes, placed
from uma.memory.term import MemoryTerm, Phase
from uma.plan.estimate import ceiling_bytes
from uma.workload import TrainingEngine, TrainingWorkload

FLOAT32 = 4
MOST = {"batch_size": 4096, "max_seq_length": 1 << 20, "rank": 4096}  # looked for, not allowed
TRIES = 12


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A model as it is to be trained.

    ``weights`` is the base as it is held, for MLX; the torch engine knows it from the workload.
    ``smaller`` is the same base in 4 bits, where it is not quantized yet.
    """

    architecture: Architecture
    machine: Machine
    budget: Budget
    engine: TrainingEngine
    workload: TrainingWorkload
    weights: MemoryTerm | None = None
    smaller: MemoryTerm | None = None
    settings: Settings = Settings()

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Every term of one step, by phase."""
        if self.engine == "torch":
            return torch_training.training_terms(self.architecture, self.workload, self.settings)
        assert self.weights is not None
        return mlx_training.training_terms(
            self.architecture, self.weights, self.workload, backend=self.machine.backend
        )

    def needed_bytes(self) -> int:
        return peak(self.terms())[1]

    @property
    def room_bytes(self) -> int:
        """What one device may hold: of a machine with several cards, each has its part."""
        devices = max(1, len(self.machine.devices))
        return ceiling_bytes(self.budget) // devices


@dataclass(frozen=True, slots=True)
class Measure:
    """Something to do differently: what it saves, and what it costs in time."""

    name: str
    options: tuple[str, ...]
    saves_bytes: int
    cost: str
    workload: TrainingWorkload


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """What training needs on one device, and the phase that needs most.

    ``measures`` are the cheapest ones, in their order, that make it fit: all of them where even
    together they do not; none where it fits as it is. ``sent_bytes`` is what each device sends in
    a step, by what causes it; ``host_bytes`` and ``disk_bytes`` are state of all devices together.
    """

    case: TrainingCase
    ledger: Ledger
    phase: Phase
    trainable_parameters: int
    largest: dict[str, int | None]
    measures: tuple[Measure, ...]
    notes: tuple[str, ...]
    host_bytes: int = 0
    disk_bytes: int = 0
    sent_bytes: dict[str, int] = field(default_factory=dict)


def training_estimate(case: TrainingCase) -> TrainingEstimate:
    """The estimate of ``case`` with its inverses.

    Raises:
        UsageError: If the workload does not suit the model or the engine.
    """
    _check(case)
    terms = case.terms()
    phase, needed = peak(terms)
    devices = max(1, len(case.machine.devices))
    lines = (case.budget.budget_bytes // devices, case.budget.limit_bytes // devices)
    result = verdict(needed * devices, case.budget)
    elsewhere, sent = _elsewhere(case)
    return TrainingEstimate(
        case,
        Ledger(terms, *lines, result),
        phase,
        _trainable(case),
        _largest(case, needed),
        tuple(measures(case)) if result == "exceeds" else (),
        tuple(_notes(case)),
        elsewhere.host.total_bytes * case.workload.sharding.data,
        elsewhere.disk.total_bytes * case.workload.sharding.data,
        sent,
    )


def _elsewhere(case: TrainingCase) -> tuple[Placed, dict[str, int]]:
    """Where the state lies, for one device, and what that device sends in a step."""
    workload, spread = case.workload, case.workload.sharding
    trained = _trainable(case)
    parameters = case.architecture.num_parameters * workload.dtype_bytes
    width = workload.dtype_bytes if workload.method == "full" else FLOAT32
    states = States(parameters, trained * width, 3 * FLOAT32 * trained)
    stream = workload.tokens * case.architecture.hidden_size * workload.dtype_bytes
    layers = len(case.architecture.layers)
    sent = communication_bytes(parameters, trained * width, stream * layers, spread)
    return placed(states, spread), sent


def _check(case: TrainingCase) -> None:
    workload, spread = case.workload, case.workload.sharding
    if case.engine == "mlx" and workload.batch_size % spread.data:
        raise UsageError(
            f"a batch of {workload.batch_size} rows is not divisible by {spread.data} devices, "
            "which mlx_lm.lora asks for"
        )
    if case.engine == "mlx":
        known = ("adam", "adamw", "muon", "sgd", "adafactor")
        if workload.optimizer not in known:
            raise UsageError(
                f"mlx_lm.lora has no optimizer {workload.optimizer!r}; it has {', '.join(known)}"
            )
        if spread.zero_stage or spread.offload_optimizer or spread.tensor * spread.pipeline > 1:
            raise UsageError(
                "on MLX training is data parallel: give --devices alone; ZeRO, offloading, tensor "
                "and pipeline parallelism are of --engine transformers"
            )
    if workload.loss == "sliced" and case.engine == "mlx":
        raise UsageError("mlx_lm.lora computes all logits at once; --loss sliced is not its own")


def _trainable(case: TrainingCase) -> int:
    if case.workload.method != "full":
        return sum(a.size for a in adapters(case.architecture, case.workload))
    if case.engine == "torch" and case.workload.num_layers is None:
        return case.architecture.num_parameters
    arrays = mlx_training.trained_arrays(case.architecture, case.workload)
    return sum(a.size_bytes // a.width for a in arrays)


def _notes(case: TrainingCase) -> Iterator[str]:
    workload = case.workload
    if case.engine != "mlx":
        return
    if workload.method == "full" and workload.num_layers is not None:
        yield f"only the last {workload.num_layers} layers are trained: --num-layers -1 for all"
    yield "the longest batch decides: the peak appears when the longest rows turn up"
    mixers = (mixer for layer in case.architecture.layers for mixer in layer.mixers)
    kinds = sorted({mixer.kind for mixer in mixers if isinstance(mixer, Recurrent)})
    if kinds:
        yield f"states of {', '.join(kinds)} layers are kept for every token: approximate"


def _largest(case: TrainingCase, needed: int) -> dict[str, int | None]:
    """The largest batch, length and rank that fit, each alone; ``None`` where 1 does not.

    Memory is a straight line over the batch and the rank, and a parabola over the length, of which
    the estimate itself, ``needed``, is one point and its double another.
    """
    found = {
        "batch_size": _along(case, needed, "batch_size", 1),
        "max_seq_length": _along(case, needed, "max_seq_length", 2),
    }
    if case.workload.method != "full":
        found["rank"] = _along(case, needed, "rank", 1)
    return found


def _along(case: TrainingCase, needed: int, field: str, degree: Literal[1, 2]) -> int | None:
    asked: int = getattr(case.workload, field)
    room = case.room_bytes
    twice = _needed(case, field, asked * 2)
    if degree == 1:
        slope = (twice - needed) / asked
        count = int(asked + (room - needed) / slope) if slope > 0 else asked
    else:
        count = int(asked * _root(needed, twice, _needed(case, field, asked * 4), room))
    count = min(count, MOST[field])
    for _ in range(TRIES):  # where another phase than the one measured begins to bind
        if count < 1:
            return None
        if _needed(case, field, count) <= room:
            return count
        count = count * 15 // 16
    return None


def _needed(case: TrainingCase, field: str, value: int) -> int:
    return _with(case, **{field: value}).needed_bytes()


def _root(at_1: int, at_2: int, at_4: int, room: int) -> float:
    """Where the parabola through three points, at 1, 2 and 4, reaches ``room``."""
    curve = max(0.0, ((at_4 - at_2) / 2 - (at_2 - at_1)) / 3)
    slope = at_2 - at_1 - 3 * curve
    constant = at_1 - slope - curve - room
    if curve < 1:
        return -constant / slope if slope > 0 else float(MOST["max_seq_length"])
    inside = slope * slope - 4 * curve * constant
    return 0.0 if inside < 0 else (sqrt(inside) - slope) / (2 * curve)


Change = Callable[[TrainingCase], TrainingCase | None]


def measures(case: TrainingCase) -> Iterator[Measure]:
    """What to change, the cheapest in time first, until it fits."""
    for name, options, cost, change in _CHANGES:
        before = case.needed_bytes()
        if before <= case.room_bytes:
            return
        changed = change(case)
        if changed is None:
            continue
        saved = before - changed.needed_bytes()
        if saved <= 0:
            continue
        case = changed
        yield Measure(name, options(case.workload), saved, cost, case.workload)


def _with(case: TrainingCase, **changes: object) -> TrainingCase:
    return replace(case, workload=replace(case.workload, **changes))  # type: ignore[arg-type]


def _sliced(case: TrainingCase) -> TrainingCase | None:
    if case.engine == "mlx" or case.workload.loss == "sliced":
        return None
    return _with(case, loss="sliced")


def _eight_bit(case: TrainingCase) -> TrainingCase | None:
    if case.engine == "mlx" or case.workload.optimizer not in ("adam", "adamw"):
        return None
    return _with(case, optimizer="adamw-8bit")


def _checkpointed(case: TrainingCase) -> TrainingCase | None:
    return None if case.workload.grad_checkpoint else _with(case, grad_checkpoint=1)


def _four_bits(case: TrainingCase) -> TrainingCase | None:
    if case.workload.quantized or case.workload.method == "full":
        return None
    if case.engine == "torch":
        return _with(case, quantized="nf4")
    return None if case.smaller is None else replace(case, weights=case.smaller)


def _halved(field: Literal["batch_size", "num_layers", "max_seq_length"], least: int) -> Change:
    def change(case: TrainingCase) -> TrainingCase | None:
        value = getattr(case.workload, field) or len(case.architecture.layers)
        tried = None
        while value // 2 >= least:
            value //= 2
            tried = _with(case, **{field: value})
            if tried.needed_bytes() <= case.room_bytes:
                break
        return tried

    return change


def _sharded(case: TrainingCase) -> TrainingCase | None:
    devices = len(case.machine.devices)
    if case.engine == "mlx" or devices < 2 or case.workload.sharding.zero_stage == 3:
        return None
    spread = replace(case.workload.sharding, data=devices, zero_stage=3)
    return _with(case, sharding=spread)


def _offloaded(case: TrainingCase) -> TrainingCase | None:
    if case.engine == "mlx" or case.machine.host_memory_bytes is None:
        return None
    spread = case.workload.sharding
    if spread.offload_optimizer or case.workload.optimizer.startswith("paged"):
        return None
    return _with(case, sharding=replace(spread, offload_optimizer="host"))


Options = Callable[[TrainingWorkload], tuple[str, ...]]

# Costs: Chen et al. 2016 (arXiv:1604.06174) and the Megatron paper for checkpointing; QLoRA's
# slower products are those of the fms-acceleration rows (a quarter to a third fewer tokens/s).
_CHANGES: tuple[tuple[str, Options, str, Change], ...] = (
    ("loss in slices", lambda w: ("--loss", "sliced"), "none to 5 % of a step", _sliced),
    (
        "8-bit optimizer",
        lambda w: ("--optimizer", "adamw-8bit"),
        "none to speak of",
        _eight_bit,
    ),
    (
        "a smaller batch, with accumulation",
        lambda w: ("--batch-size", str(w.batch_size), "--grad-accumulation-steps"),
        "little: the same tokens in more steps",
        _halved("batch_size", 1),
    ),
    ("checkpointing", lambda w: ("--grad-checkpoint",), "20 to 35 % of a step", _checkpointed),
    ("a base in 4 bits", lambda w: ("--quant", w.quantized or "4bit"), "25 to 35 %", _four_bits),
    ("sharding", lambda w: ("--zero-stage", "3"), "half as much traffic again", _sharded),
    (
        "fewer layers",
        lambda w: ("--num-layers", str(w.num_layers)),
        "saves time; adapts less",
        _halved("num_layers", 4),
    ),
    (
        "optimizer on the host",
        lambda w: ("--offload-optimizer", "host"),
        "the link's speed: gradients down, weights up",
        _offloaded,
    ),
    (
        "shorter rows",
        lambda w: ("--max-seq-length", str(w.max_seq_length)),
        "cuts the text",
        _halved("max_seq_length", 128),
    ),
)
