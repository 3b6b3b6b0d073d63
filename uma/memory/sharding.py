"""State split over devices, moved to the host or to disk, and what it costs in communication.

``P`` is a number of parameters, ``N`` of devices. Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054),
section 7: data parallelism and stages 1 and 2 move ``2 P`` elements a step and device, stage 3
``3 P``; DeepSpeed's stages 1 and 2 move as much (``_between_replicas``).
"""

from math import ceil

from uma.frozen import dataclass
from uma.workload import Sharding


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
    (deepspeed 0.19.8, ``stage_1_and_2.py``, ``reduce_ipg_grads``).
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

    ``stream_bytes`` are the residual stream of one batch at one layer, ``layers`` its layers, and
    ``attention_bytes`` what attention reads and gives in all of them; ``batches`` make one update.
    ``recomputed`` layers run forward twice. ``exchanged`` is what of ``states`` goes between
    devices, where they send it narrower than they keep it; ``float32_gradient_bytes`` are the
    gradients as DeepSpeed's update has them on the host. With ``sums_first`` a device adds up the
    gradients of the batches of an update before it sends them.
    """

    states: States
    stream_bytes: int = 0
    layers: int = 0
    batches: int = 1
    recomputed: bool = False
    exchanged: States | None = None
    float32_gradient_bytes: int = 0
    attention_bytes: int = 0
    sums_first: bool = False

    def reductions(self, stage: int) -> int:
        """How often gradients are reduced for one update."""
        return 1 if stage < 2 or self.sums_first else self.batches


def communication_bytes(moved: Moved, spread: Sharding) -> dict[str, int]:
    """Bytes that one device sends for one update, by what causes them.

    Ring algorithms: an all-reduce sends ``2 (N - 1) / N`` of the data, an all-gather or a
    reduce-scatter half of that. ``groups``: hybrid sharding's all-reduce between its groups.
    ``host`` and ``disk`` are both directions together.
    """
    return {
        **_between_replicas(moved, spread),
        **_between_parts(moved, spread),
        **_to_host_and_disk(moved, spread),
    }


def _between_replicas(moved: Moved, spread: Sharding) -> dict[str, int]:
    """Gradients, and parameters where they are sharded, or updated by parts.

    Gradients are reduced to all once (stages 0 and 1) or for each batch (2): DeepSpeed takes an
    all-reduce where each device needs a part (0.19.8, ``stage_1_and_2.py``, ``average_tensor``,
    ``use_multi_rank_bucket_allreduce``). Stage 3 reduces and scatters them, for each batch unless
    they are summed first, and gathers parameters forward and backward for each batch.
    (``scripts/check_sharding.py`` counts DeepSpeed's.)
    """
    split, shards = spread.tensor * spread.pipeline, spread.shards
    exchanged = moved.exchanged or moved.states
    gradients = exchanged.gradient_bytes // split
    parameters = exchanged.parameter_bytes // split
    if spread.replicas == 1:
        return {}
    times = moved.reductions(spread.zero_stage)
    if spread.zero_stage < 3:
        found = {"gradients": _ring(2 * gradients * times, spread.replicas)}
        if spread.zero_stage:  # what was trained is gathered, in the width of its gradients
            found["parameters"] = _ring(gradients, shards)
        return found
    gathered = _ring(2 * parameters * moved.batches, shards)
    found = {"parameters": gathered, "gradients": _ring(gradients * times, shards)}
    if shards < spread.replicas:
        found["groups"] = _ring(2 * gradients // shards, spread.replicas // shards)
    return found


def _between_parts(moved: Moved, spread: Sharding) -> dict[str, int]:
    """What tensor, sequence and pipeline parallelism send of the activations.

    Tensor: two all-reduces of the stream a layer and pass (Megatron, arXiv:1909.08053, section 3).
    Sequence: all-to-alls of queries, keys, values and outputs in each pass, of a device's part of
    the rows (DeepSpeed-Ulysses, arXiv:2309.14509, section 3.1). Pipeline: the stream to the next
    stage and its gradient back.
    """
    found = {}
    passes = 3 if moved.recomputed else 2
    part = moved.batches * moved.stream_bytes // spread.sequence
    through = part * -(-moved.layers // spread.pipeline)
    if spread.tensor > 1:
        found["tensor"] = _ring(passes * 2 * 2 * through, spread.tensor)
    if spread.sequence > 1:
        attended = moved.batches * moved.attention_bytes // (spread.sequence * spread.pipeline)
        found["sequence"] = _ring(passes * attended, spread.sequence) // spread.tensor
    if spread.pipeline > 1:
        found["pipeline"] = 2 * part // spread.tensor
    return found


def _to_host_and_disk(moved: Moved, spread: Sharding) -> dict[str, int]:
    """Gradients down and parameters up; optimizer states of a disk are read and written.

    FSDP copies a part of the gradients down when they are reduced. DeepSpeed copies it in float32
    for the update, after which trained parameters come up; with several batches, and always under
    stage 3, sums go down and come up again to be added to (0.19.8, ``stage_1_and_2.py``,
    ``async_accumulate_grad_in_cpu_via_gpu``; ``stage3.py``, ``partition_grads``). Parameters on the
    host or the disk come for each pass (ZeRO-Infinity, arXiv:2104.07857).
    """
    states, stage = moved.states, spread.zero_stage
    split = spread.tensor * spread.pipeline * (spread.shards if stage else 1)
    gradients, wide = states.gradient_bytes // split, moved.float32_gradient_bytes // split
    times = moved.reductions(stage)
    host = disk = 0
    if spread.offload_optimizer and spread.fsdp:
        host = times * gradients
    elif spread.offload_optimizer:
        sums = 2 * times if stage == 3 else 2 * times - 1 if times > 1 else 0
        host = wide + (1 + sums) * gradients
    if spread.offload_optimizer == "disk":
        disk = 2 * (states.optimizer_bytes // split + wide)
    if spread.offload_parameters:
        passes = 2 * moved.batches * states.parameter_bytes // split
        host += passes
        if spread.offload_parameters == "disk":
            disk += passes + gradients  # and what was trained is written
    return {name: size for name, size in (("host", host), ("disk", disk)) if size}


def _ring(size_bytes: int, devices: int) -> int:
    return size_bytes * (devices - 1) // devices
