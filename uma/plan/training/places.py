"""Where the state of a training lies, device by device, and what each device sends."""

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from uma.architecture.layers import Attention, LatentAttention
from uma.frozen import dataclass
from uma.memory.adapters import adapter_elements
from uma.memory.sharding import Moved, States, communication_bytes, placed
from uma.plan.training.case import TrainingCase
from uma.quantization import FLOAT32

if TYPE_CHECKING:
    from uma.engines.torch_model import Model


@dataclass(frozen=True, slots=True)
class OnHost:
    """What the devices of one machine keep on its host, and what that leaves, where known.

    ``stays_bytes`` of what is meant for it each device holds itself.
    """

    held_bytes: int = 0
    room_bytes: int | None = None
    stays_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        """How much too much it is; 0 where the host's memory is not known."""
        return 0 if self.room_bytes is None else max(0, self.held_bytes - self.room_bytes)


@dataclass(frozen=True, slots=True)
class Places:
    """State of one device by where it lies, and what one device sends for one update.

    ``device_bytes`` is state alone, without activations; ``host_bytes`` counts the ``paged_bytes``
    too, which a paged optimizer may move. ``sent_bytes`` are by cause, see
    ``communication_bytes``.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    sent_bytes: dict[str, int]
    paged_bytes: int = 0

    def with_staying(self, stays_bytes: int) -> "Places":
        """The same with so much of what is meant for the host on the device."""
        device, host = self.device_bytes + stays_bytes, self.host_bytes - stays_bytes
        return replace(self, device_bytes=device, host_bytes=host)


@dataclass(frozen=True, slots=True)
class _Kept:
    """State as one device without sharding has it; what a paged optimizer may move; and traffic.

    ``beside`` is what a device has on the host and on the disk beside its part of ``states``. The
    others are those of ``Moved``.
    """

    states: States
    paged_bytes: int = 0
    beside: tuple[int, int] = (0, 0)
    exchanged: States | None = None
    float32_gradient_bytes: int = 0


def places(case: TrainingCase) -> Places:
    """Where the state of ``case`` lies."""
    workload, spread = case.workload, case.workload.sharding
    kept = _mlx_kept(case) if case.engine == "mlx" else _torch_kept(case)
    found = placed(kept.states, spread)
    stream = workload.tokens * case.architecture.hidden_size * workload.dtype_bytes
    sent = communication_bytes(
        Moved(
            kept.states,
            stream_bytes=stream,
            layers=len(case.architecture.layers),
            batches=workload.grad_accumulation_steps,
            recomputed=bool(workload.grad_checkpoint),
            exchanged=kept.exchanged,
            float32_gradient_bytes=kept.float32_gradient_bytes,
            attention_bytes=_attention_bytes(case) if spread.sequence > 1 else 0,
            # FSDP.no_sync, which accelerate enters
            sums_first=spread.fsdp and case.engine == "torch",
        ),
        spread,
    )
    if case.engine == "mlx" and "parameters" in sent and not workload.grad_checkpoint:
        sent["parameters"] //= 2  # gathered once: they are still there for the backward pass
    paged = placed(States(0, 0, kept.paged_bytes), spread).device.total_bytes
    host, disk = kept.beside
    host += _checkpoint_bytes(case) if case.engine == "torch" else 0
    on_host, on_disk = found.host.total_bytes + paged + host, found.disk.total_bytes + disk
    return Places(found.device.total_bytes, on_host, on_disk, sent, paged)


def _attention_bytes(case: TrainingCase) -> int:
    """Queries, keys, values and outputs of one batch, as Ulysses sends them.

    Of fewer key-value heads than devices each goes to several (DeepSpeed 0.19.8,
    ``runtime/sequence_parallel/ulysses_sp.py``, ``_combine_local_sequences``).
    """
    elements, devices = 0, case.workload.sharding.sequence
    for mixer in (mixer for layer in case.architecture.layers for mixer in layer.mixers):
        if isinstance(mixer, Attention):
            groups = max(mixer.num_key_value_heads, devices)
            width, v_width = mixer.head_dim, mixer.v_head_dim
        elif isinstance(mixer, LatentAttention):
            groups = mixer.num_attention_heads
            width, v_width = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
        else:
            continue
        elements += (mixer.num_attention_heads + groups) * (width + v_width)
    return elements * case.workload.tokens * case.workload.dtype_bytes


def _checkpoint_bytes(case: TrainingCase) -> int:
    """Inputs of layers that Unsloth's checkpointing keeps on the host."""
    workload, every = case.workload, case.workload.grad_checkpoint
    if not (every and case.settings.offloads_inputs):
        return 0
    kept = ceil(len(case.architecture.layers) / every)
    return kept * workload.tokens * case.architecture.hidden_size * workload.dtype_bytes


def on_host(case: TrainingCase, spare_bytes: int = 0) -> OnHost:
    """What lies on one host, where a device leaves ``spare_bytes`` to a paged optimizer's states.

    CUDA moves those as far as a card has no room (managed memory), so that what the host has no
    room for stays. In a machine of one memory nothing leaves it.
    """
    if case.engine == "mlx":
        return OnHost()
    found, machine = places(case), case.machine
    if machine.kind != "discrete":
        return OnHost(stays_bytes=found.host_bytes)
    together = min(case.machine_devices, case.workload.sharding.devices)
    known = found.host_bytes and machine.host_memory_bytes is not None
    room = machine.host_room_bytes if known else None
    lacks = 0 if room is None else found.host_bytes - room // together
    stays = min(found.paged_bytes, max(0, lacks, spare_bytes))
    return OnHost((found.host_bytes - stays) * together, room, stays)


def _torch_kept(case: TrainingCase) -> _Kept:
    from uma.engines.schemes import tower_terms
    from uma.engines.torch_deepspeed import beside_states
    from uma.engines.torch_model import optimizer_states, trained_elements, weights_bytes

    model = case.torch_model
    trained, found = model.staged(trained_elements(model)), optimizer_states(model)
    width, deepspeed = model.trained_width, model.settings.deepspeed
    parameters = model.staged(weights_bytes(model), weights=True)
    parameters += 0 if model.trains_all else trained * width
    towers = tower_terms(case.architecture, case.workload.dtype_bytes)
    parameters += sum(tower.size_bytes for tower in towers)
    masters = trained * FLOAT32 if deepspeed else 0
    return _Kept(
        States(parameters, trained * width, model.staged(found.device_bytes) + masters),
        found.paged_bytes,
        beside_states(model) if deepspeed else (0, 0),
        _exchanged(model, trained),
        trained * FLOAT32 if deepspeed else 0,
    )


def _exchanged(model: "Model", trained: int) -> States | None:
    """What FSDP's MixedPrecision gathers and reduces in 16 bits of float32 weights.

    torch 2.13, ``distributed/fsdp/api.py``: ``reduce_dtype`` is ``param_dtype`` unless given.
    """
    workload = model.workload
    mixes = workload.sharding.fsdp and model.weight_width == FLOAT32 and not workload.quantized
    if not mixes:
        return None
    elements = model.architecture.num_parameters + (0 if model.trains_all else trained)
    return States(elements * workload.dtype_bytes, trained * workload.dtype_bytes)


def _mlx_kept(case: TrainingCase) -> _Kept:
    """Of ``mlx_lm.lora``'s step, one graph, gradients die one by one unless they are summed."""
    from uma.engines.mlx_training import optimizer_bytes, trained_arrays

    workload = case.workload
    arrays = trained_arrays(case.architecture, workload)
    trained = sum(a.size_bytes for a in arrays)
    assert case.weights is not None
    parameters = case.weights.size_bytes
    if workload.method != "full":
        parameters += FLOAT32 * adapter_elements(case.architecture, workload)
    summed = workload.grad_accumulation_steps > 1 or workload.sharding.zero_stage == 3
    gradients = trained if summed or case.trainer == "uma" else 0
    states = States(parameters, gradients, optimizer_bytes(workload, arrays))
    return _Kept(states, exchanged=States(parameters, trained))
