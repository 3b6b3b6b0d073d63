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
    gradients, then the parameters; offloading moves what is left of a part.
    """
    split = spread.tensor * spread.pipeline
    stage, shards = spread.zero_stage, spread.shards
    parameters = ceil(whole.parameter_bytes / split / (shards if stage == 3 else 1))
    gradients = ceil(whole.gradient_bytes / split / (shards if stage >= 2 else 1))
    optimizer = ceil(whole.optimizer_bytes / split / (shards if stage >= 1 else 1))
    parts = {"device": States(), "host": States(), "disk": States()}
    state_place = spread.offload_optimizer or "device"
    parameter_place = spread.offload_parameters or "device"
    parts[state_place] = _plus(parts[state_place], States(0, gradients, optimizer))
    parts[parameter_place] = _plus(parts[parameter_place], States(parameters))
    return Placed(parts["device"], parts["host"], parts["disk"])


def _plus(a: States, b: States) -> States:
    return States(
        a.parameter_bytes + b.parameter_bytes,
        a.gradient_bytes + b.gradient_bytes,
        a.optimizer_bytes + b.optimizer_bytes,
    )


def communication_bytes(
    parameter_bytes: int, gradient_bytes: int, activation_bytes: int, spread: Sharding
) -> dict[str, int]:
    """Bytes that one device sends in one step, by what causes them.

    Ring algorithms: an all-reduce sends ``2 (N - 1) / N`` of the data, an all-gather or a
    reduce-scatter half of that. Stage 3 gathers the parameters forward and backward and scatters
    the gradients; hybrid sharding also reduces between its groups. Tensor parallelism reduces the
    residual stream four times a layer (twice forward, twice backward: Megatron, arXiv:1909.08053);
    ``activation_bytes`` are those of the stream through all layers.
    """
    found = {}
    shards, data = spread.shards, spread.data
    if data > 1 and spread.zero_stage < 3:
        found["gradients"] = _ring(2 * gradient_bytes, data)
    elif data > 1:
        found["parameters"] = _ring(2 * parameter_bytes, shards)
        found["gradients"] = _ring(gradient_bytes, shards)
        if shards < data:
            found["groups"] = _ring(2 * gradient_bytes // shards, data // shards)
    if spread.tensor > 1:
        found["tensor"] = _ring(4 * 2 * activation_bytes, spread.tensor)
    if spread.sequence > 1:
        found["sequence"] = _ring(4 * activation_bytes, spread.sequence)
    if spread.offload_optimizer:
        found["host"] = gradient_bytes // shards + parameter_bytes // shards
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
) -> tuple[int, int]:
    """DeepSpeed's printed bytes of a device and of a host, buffer factor 1.5, full training.

    >>> deepspeed_estimate(2_851_000_000, 32_900_000, 8, stage=2)[0]  # t5-3b, 8 GPUs
    17106000000
    """
    total = devices * nodes
    if stage == 2:
        if offload:
            return HALF * parameters, int(parameters * max(4 * devices, 16) * 1.5)
        return 4 * parameters + 16 * parameters // total, int(parameters * 4 * devices * 1.5)
    largest = 4 * largest_layer
    if offload == "all":
        factor = max(4 * devices, 18 / nodes)
        return largest, int(parameters * factor * 1.5)
    if offload == "optimizer":
        factor = max(4 * devices, 16 / nodes)
        return largest + 2 * parameters // total, int(parameters * factor * 1.5)
    return largest + 18 * parameters // total, int(parameters * 4 * devices * 1.5)
