"""State split over devices, moved to the host or to disk, and what it costs in communication.

``P`` is a number of parameters, ``N`` of devices. Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054),
section 7: data parallelism and stages 1 and 2 move ``2 P`` elements a step and device, stage 3
``3 P``. The estimators are DeepSpeed's (``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``estimate_zero*_model_states_mem_needs``); they leave out activations, buckets and fragmentation.
"""

from math import ceil
from typing import Literal

from uma.frozen import dataclass
from uma.workload import Sharding

MASTER_STATES = 12  # float32 copy and two moments of Adam
HALF = 2


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of parameters, gradients and optimizer states in one place."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """State of one device, of the host for each device, and of the disk for each device."""

    device: States
    host: States
    disk: States


def placed(whole: States, spread: Sharding) -> Placed:
    """Where each part of ``whole`` lies, for one device.

    Tensor and pipeline parallelism split all of it; ZeRO 1, 2, 3 the optimizer states, then the
    gradients, then the parameters; offloading moves what is left of a part. ZeRO 1 copies a
    device's part of the gradients to the host, and the device keeps all of them until the update
    (deepspeed 0.19.6, ``stage_1_and_2.py``, ``reduce_ipg_grads``).
    """
    split = spread.tensor * spread.pipeline
    stage, shards = spread.zero_stage, spread.shards
    parameters = ceil(whole.parameter_bytes / split / (shards if stage == 3 else 1))
    gradients = ceil(whole.gradient_bytes / split / (shards if stage >= 2 else 1))
    optimizer = ceil(whole.optimizer_bytes / split / (shards if stage >= 1 else 1))
    parts = {"device": States(), "host": States(), "disk": States()}
    state_place = spread.offload_optimizer or "device"
    parameter_place = spread.offload_parameters or "device"
    if stage == 1 and spread.offload_optimizer:
        parts["device"] = States(0, gradients)
        gradients = ceil(gradients / shards)
    parts[state_place] = _plus(parts[state_place], States(0, gradients, optimizer))
    parts[parameter_place] = _plus(parts[parameter_place], States(parameters))
    return Placed(parts["device"], parts["host"], parts["disk"])


def _plus(a: States, b: States) -> States:
    return States(
        a.parameter_bytes + b.parameter_bytes,
        a.gradient_bytes + b.gradient_bytes,
        a.optimizer_bytes + b.optimizer_bytes,
    )


@dataclass(frozen=True, slots=True)
class Moved:
    """What devices exchange, as one device without sharding has it, in bytes.

    ``stream_bytes`` are the residual stream of one batch at one layer, ``layers`` its layers;
    ``batches`` make one update. ``recomputed`` layers run forward twice. ``exchanged`` is what of
    ``states`` goes between devices, where they send it narrower than they keep it.
    """

    states: States
    stream_bytes: int = 0
    layers: int = 0
    batches: int = 1
    recomputed: bool = False
    exchanged: States | None = None


def communication_bytes(moved: Moved, spread: Sharding) -> dict[str, int]:
    """Bytes that one device sends for one update, by what causes them.

    Ring algorithms: an all-reduce sends ``2 (N - 1) / N`` of the data, an all-gather or a
    reduce-scatter half of that. ``gradients``: an all-reduce (stages 0 and 1), or a reduce-scatter
    for each batch (stages 2 and 3). ``parameters``: gathered after the update (1 and 2), or forward
    and backward for each batch (3). ``groups``: hybrid sharding's all-reduce between its groups.
    ``host`` and ``disk`` are both directions together.
    """
    return {
        **_between_replicas(moved, spread),
        **_between_parts(moved, spread),
        **_to_host_and_disk(moved.states, moved.batches, spread),
    }


def _between_replicas(moved: Moved, spread: Sharding) -> dict[str, int]:
    split, shards = spread.tensor * spread.pipeline, spread.shards
    exchanged = moved.exchanged or moved.states
    gradients = exchanged.gradient_bytes // split
    parameters = exchanged.parameter_bytes // split
    if spread.replicas == 1:
        return {}
    if spread.zero_stage < 2:
        return {"gradients": _ring(2 * gradients, spread.replicas)}
    reduced = _ring(gradients * moved.batches, shards)
    if spread.zero_stage == 2:  # what was trained is gathered, in the width of its gradients
        return {"gradients": reduced, "parameters": _ring(gradients, shards)}
    gathered = _ring(2 * parameters * moved.batches, shards)
    found = {"parameters": gathered, "gradients": reduced}
    if shards < spread.replicas:
        found["groups"] = _ring(2 * gradients // shards, spread.replicas // shards)
    return found


def _between_parts(moved: Moved, spread: Sharding) -> dict[str, int]:
    """What tensor, sequence and pipeline parallelism send of the activations.

    Tensor: two all-reduces of the stream a layer and pass (Megatron, arXiv:1909.08053, section 3).
    Sequence: four all-to-alls a layer and pass, of a device's part of the rows (DeepSpeed-Ulysses,
    arXiv:2309.14509, section 3.1). Pipeline: the stream to the next stage and its gradient back.
    """
    found = {}
    passes = 3 if moved.recomputed else 2
    part = moved.batches * moved.stream_bytes // spread.sequence
    through = part * -(-moved.layers // spread.pipeline)
    if spread.tensor > 1:
        found["tensor"] = _ring(passes * 2 * 2 * through, spread.tensor)
    if spread.sequence > 1:
        found["sequence"] = _ring(passes * 4 * through, spread.sequence) // spread.tensor
    if spread.pipeline > 1:
        found["pipeline"] = 2 * part // spread.tensor
    return found


def _to_host_and_disk(states: States, batches: int, spread: Sharding) -> dict[str, int]:
    """ZeRO-Offload (arXiv:2101.06840): gradients go down, what was trained comes back; parameters
    on the host come for each pass (ZeRO-Infinity, arXiv:2104.07857). A disk's optimizer states are
    read and written at each update."""
    parts = spread.shards if spread.zero_stage else 1
    split = spread.tensor * spread.pipeline * parts
    found: dict[str, int] = {}
    if spread.offload_optimizer:
        found["host"] = (batches + 1) * states.gradient_bytes // split
    if spread.offload_optimizer == "disk":
        found["disk"] = 2 * states.optimizer_bytes // split
    if place := spread.offload_parameters:
        found[place] = found.get(place, 0) + 2 * batches * states.parameter_bytes // split
    return found


def _ring(size_bytes: int, devices: int) -> int:
    return size_bytes * (devices - 1) // devices


def deepspeed_estimate(
    parameters: int,
    largest_layer: int,
    devices: int,
    nodes: int = 1,
    *,
    stage: Literal[2, 3],
    offload: Literal["", "optimizer", "all"] = "",
    whole_gradients: bool = False,
) -> tuple[int, int]:
    """DeepSpeed's printed bytes of a device and of a host, buffer factor 1.5, full training.

    As of 0.19.8, without ``zero.Init``. ``whole_gradients`` is what its documentation prints
    (``docs/source/memory.rst``), where stage 2 keeps all 16-bit gradients on each device.

    >>> deepspeed_estimate(2_851_000_000, 32_900_000, 8, stage=2)[0]  # t5-3b, 8 GPUs
    12116750000
    """
    total = devices * nodes
    if stage == 2:
        if offload:
            return HALF * parameters, int(parameters * max(4 * total, 16) * 1.5)
        whole = 4 if whole_gradients else 2
        device = whole * parameters + (20 - whole) * parameters // total
        return device, int(parameters * 4 * devices * 1.5)
    largest = 4 * largest_layer
    if offload == "all":
        factor = max(4 * devices, 18 / nodes)
        return largest, int(parameters * factor * 1.5)
    if offload == "optimizer":
        factor = max(4 * devices, 16 / nodes)
        return largest + 2 * parameters // total, int(parameters * factor * 1.5)
    return largest + 18 * parameters // total, int(parameters * 4 * devices * 1.5)
