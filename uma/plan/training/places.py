"""Where the state of a training lies, device by device, and what each device sends."""

from uma.engines.torch_model import Model, optimizer_states, trained_elements, weights_bytes
from uma.frozen import dataclass
from uma.memory.adapters import adapter_elements
from uma.memory.sharding import Moved, States, communication_bytes, placed
from uma.plan.training.case import TrainingCase

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class OnHost:
    """What the devices of one machine keep on its host, and what that leaves, where known."""

    held_bytes: int
    room_bytes: int | None

    @property
    def excess_bytes(self) -> int:
        """How much too much it is; 0 where the host's memory is not known."""
        return 0 if self.room_bytes is None else max(0, self.held_bytes - self.room_bytes)


@dataclass(frozen=True, slots=True)
class Places:
    """State of one device by where it lies, and what one device sends for one update.

    ``device_bytes`` is state alone, without activations; ``host_bytes`` counts what a paged
    optimizer may move too. ``sent_bytes`` are by cause, see ``communication_bytes``.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    sent_bytes: dict[str, int]


def places(case: TrainingCase) -> Places:
    """Where the state of ``case`` lies."""
    workload, spread = case.workload, case.workload.sharding
    states, paged = _mlx_states(case) if case.engine == "mlx" else _torch_states(case)
    found = placed(states, spread)
    stream = workload.tokens * case.architecture.hidden_size * workload.dtype_bytes
    sent = communication_bytes(
        Moved(
            states,
            stream,
            len(case.architecture.layers),
            workload.grad_accumulation_steps,
            bool(workload.grad_checkpoint),
            _exchanged(case),
        ),
        spread,
    )
    if case.engine == "mlx" and "parameters" in sent and not workload.grad_checkpoint:
        sent["parameters"] //= 2  # gathered once: they are still there for the backward pass
    on_host = found.host.total_bytes + paged
    return Places(found.device.total_bytes, on_host, found.disk.total_bytes, sent)


def on_host(case: TrainingCase) -> OnHost:
    """What lies on one host."""
    held = places(case).host_bytes
    together = min(case.machine_devices, case.workload.sharding.devices)
    return OnHost(held * together, _room(case) if held else None)


def _room(case: TrainingCase) -> int | None:
    from uma.plan.compare.placed import host_room_bytes

    return None if case.machine.host_memory_bytes is None else host_room_bytes(case.machine)


def _torch_states(case: TrainingCase) -> tuple[States, int]:
    """Whole parameters, gradients and optimizer states; and those that are paged."""
    model = Model(case.architecture, case.workload, case.settings)
    trained, found = trained_elements(model), optimizer_states(model)
    full = model.trains_all
    width = model.weight_width if full else case.settings.adapter_width
    parameters = weights_bytes(model) + (0 if full else trained * width)
    optimizer = found.device_bytes
    if case.settings.deepspeed:
        optimizer += trained * FLOAT32  # copies of the weights
    return States(parameters, trained * width, optimizer), found.paged_bytes


def _exchanged(case: TrainingCase) -> States | None:
    """What FSDP's MixedPrecision gathers and reduces in 16 bits of float32 weights.

    torch 2.13, ``distributed/fsdp/api.py``: ``reduce_dtype`` is ``param_dtype`` unless given.
    """
    workload = case.workload
    if case.engine == "mlx" or not workload.sharding.fsdp or workload.quantized:
        return None
    model = Model(case.architecture, workload, case.settings)
    if model.weight_width != FLOAT32:
        return None
    trained = trained_elements(model)
    elements = case.architecture.num_parameters + (0 if model.trains_all else trained)
    return States(elements * workload.dtype_bytes, trained * workload.dtype_bytes)


def _mlx_states(case: TrainingCase) -> tuple[States, int]:
    from uma.engines.mlx_training import optimizer_bytes, trained_arrays

    arrays = trained_arrays(case.architecture, case.workload)
    trained = sum(a.size_bytes for a in arrays)
    assert case.weights is not None
    parameters = case.weights.size_bytes
    if case.workload.method != "full":
        parameters += FLOAT32 * adapter_elements(case.architecture, case.workload)
    return States(parameters, trained, optimizer_bytes(case.workload, arrays)), 0
