"""A model as it is to be trained on a machine, and what one step of it needs."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.architecture.layers import Architecture, Recurrent
from uma.dataset.batches import padded_length
from uma.frozen import dataclass
from uma.ledger import peak
from uma.machine import Budget, Machine
from uma.memory.adapters import adapter_elements
from uma.memory.term import MemoryTerm
from uma.memory.weights import weight_bytes
from uma.plan.training.stack import Stack
from uma.quantization import quantization_for
from uma.workload import Trainer, TrainingEngine, TrainingWorkload, bits_named

if TYPE_CHECKING:
    from uma.engines.torch_model import Model, Settings

SHORT = 256


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A model as it is to be trained.

    ``weights`` is the base as it is held, for MLX; the torch engine knows it from the workload.
    ``trainer`` is the program that trains under MLX, ``stack`` that under torch.
    """

    architecture: Architecture
    machine: Machine
    budget: Budget
    engine: TrainingEngine
    workload: TrainingWorkload
    weights: MemoryTerm | None = None
    trainer: Trainer = "mlx_lm"
    stack: Stack = Stack()

    @property
    def settings(self) -> "Settings":
        """Those of the torch engine."""
        from uma.plan.training.stacks import settings_for

        return settings_for(self.stack, self.workload, self.architecture)

    @property
    def torch_model(self) -> "Model":
        """The model as the torch engine takes it."""
        from uma.engines.torch_model import Model

        return Model(self.architecture, self.workload, self.settings)

    def terms(self, *, peak_alone: bool = False) -> tuple[MemoryTerm, ...]:
        """Every term of one step on one device, by phase; or those that may be the peak."""
        if self.engine == "torch":
            from uma.engines.torch_training import training_terms as torch_terms

            return torch_terms(self.architecture, self.workload, self.settings)
        assert self.weights is not None
        asked = (self.architecture, self.weights, self.workload)
        if self.workload.sharding.zero_stage == 3:
            from uma.engines.mlx_sharded import sharded_training_terms

            return sharded_training_terms(*asked, backend=self.machine.backend)
        if self.trainer == "uma":
            from uma.engines.mlx_own_step import own_training_terms

            short = in_short_rows(self.workload, self.architecture)
            backend = self.machine.backend
            return own_training_terms(*asked[:2], short, backend=backend, peak_alone=peak_alone)
        from uma.engines.mlx_training import training_terms

        now = replace(self.workload, loss="fused")  # mlx 0.32.4: one kernel each way on a GPU
        return training_terms(*asked[:2], now, backend=self.machine.backend)

    def needed_bytes(self) -> int:
        return peak(self.terms(peak_alone=True))[1]

    def changed(self, **changes: Any) -> "TrainingCase":
        """The same case with other values of its workload."""
        return replace(self, workload=replace(self.workload, **changes))

    @property
    def machine_devices(self) -> int:
        """Devices of one machine."""
        return max(1, len(self.machine.devices))

    @property
    def room_bytes(self) -> int:
        """What one device may hold: of a machine with several cards, each has its part."""
        return self.budget.ceiling_bytes // self.machine_devices

    @property
    def budget_bytes(self) -> int:
        """Up to which one device's part fits; it is tight above, within ``room_bytes``."""
        return self.budget.budget_bytes // self.machine_devices

    @property
    def mlx_bits(self) -> int:
        """Bits of the base under MLX: 16 where it is not quantized.

        Raises:
            UsageError: If the workload says it in other words than ``bits_word``.
        """
        return bits_named(self.workload.quantized)

    @property
    def least_weight_bytes(self) -> int:
        """What the base takes on one device at least; 0 where it can be spread or moved."""
        if self.weights is None or self.workload.sharding.zero_stage == 3:
            return 0
        if self.workload.method == "full" or self.mlx_bits <= 4:
            return self.weights.size_bytes
        return weight_bytes(self.architecture, quantization_for(4)).size_bytes

    @property
    def trainable_parameters(self) -> int:
        if self.engine == "torch":
            from uma.engines.torch_model import trained_elements

            return trained_elements(self.torch_model)
        if self.workload.method != "full":
            return adapter_elements(self.architecture, self.workload)
        from uma.engines.mlx_training import trained_arrays

        arrays = trained_arrays(self.architecture, self.workload)
        return sum(a.size_bytes // a.width for a in arrays)


def in_short_rows(workload: TrainingWorkload, architecture: Architecture) -> TrainingWorkload:
    """As many positions in rows of ``SHORT``, which are laid out in a tenth of the time.

    Our own trainer computes attention and the loss in slices of a fixed size, so that it needs
    the same for as many positions, however long their rows are (a test compares). Not so where
    layers recur: their chunks are of so many tokens of all rows.
    """
    length = padded_length(max(1, workload.max_seq_length - 1))
    recurs = any(isinstance(m, Recurrent) for layer in architecture.layers for m in layer.mixers)
    if recurs or length <= SHORT:
        return workload
    rows = -(-workload.batch_size * length // SHORT)
    return replace(workload, batch_size=rows, max_seq_length=SHORT + 1)
