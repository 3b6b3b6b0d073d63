"""What DeepSpeed's ZeRO keeps and makes beside a model, in sizes.

DeepSpeed 0.19.8, ``runtime/zero``: ``config.py``, ``stage_1_and_2.py`` and ``stage3.py``. Gradients
are accumulated in the width of the weights (``runtime/engine.py``, ``get_data_types``).
"""

from math import ceil, prod

from uma.engines.torch_model import Model, trained_elements
from uma.memory.term import MemoryTerm, Phase
from uma.quantization import FLOAT32

BUCKET = 500_000_000  # elements, ``reduce_bucket_size``
SUB_GROUP = 1_000_000_000  # elements of a device's part, ``sub_group_size``
# Of what is offloaded to a disk (``offload_config.py``): buffers for a sub-group each, elements of
# the buffers for parameters, and those that stay on the host.
OPTIMIZER_BUFFERS, PARAMETER_BUFFERS, PARAMETERS_ON_HOST = 4, 5 * 10**8, 10**9


def deepspeed_terms(model: Model) -> list[MemoryTerm]:
    """What lies there for good, what a backward pass makes, and what the update does.

    Stage 3 has a flat buffer of its part of the gradients from the start (``stage3.py``,
    ``grad_partitions_flat_buffer``) and a bucket, whose copy ``reduce_scatter_coalesced`` makes;
    stages 1 and 2 have the sum of earlier batches (``all_grad_tensors``). Where the optimizer is
    offloaded, it is the host that has it.
    """
    stage, width = model.workload.sharding.zero_stage, model.workload.dtype_bytes
    buckets = []
    if stage == 3:
        copied = min(BUCKET, trained_elements(model)) * width
        buckets = [
            MemoryTerm("other", BUCKET * width, "exact", "reduce bucket"),
            MemoryTerm("other", copied, "bound", "a copy of the bucket", "backward"),
        ]
    if model.workload.sharding.offload_optimizer:
        size = 0 if stage == 3 else _largest_bytes(model)
        source = "a copy of the largest gradient"  # temp_grad_buffer_for_gpu_offload
        return [*buckets, MemoryTerm("gradients", size, "exact", source)]
    elements, width = _part(model), model.trained_width
    source = "float32 copies of trained weights"
    found = [MemoryTerm("master_weights", elements * FLOAT32, "exact", source)]
    source = "a device's part of them"
    if stage == 3:
        found.append(MemoryTerm("gradients", elements * width, "exact", source))
    elif model.workload.grad_accumulation_steps > 1:
        phases: tuple[Phase, ...] = ("forward", "backward")
        found += [MemoryTerm("gradients", elements * width, "exact", source, p) for p in phases]
    source = "float32 gradients and what makes them"
    update = MemoryTerm("gradients", update_bytes(model), "bound", source, "optimizer")
    return [*found, *buckets, update]


def first_gradient_terms(model: Model) -> list[MemoryTerm]:
    """What stages 1 and 2 make with the first gradient, when the logits are gone.

    Both buckets of ``overlap_comm``, whatever is trained, and for stage 2 a buffer for a device's
    part: at once where that has the last weights (``stage_1_and_2.py``, ``process_gradients``,
    ``setup_buckets``, ``copy_grads_in_partition``).
    """
    spread, size = model.workload.sharding, 2 * BUCKET * model.workload.dtype_bytes
    if not model.settings.deepspeed or spread.zero_stage == 3:
        return []
    buckets = MemoryTerm("other", size, "exact", "reduce buckets", "backward")
    if spread.zero_stage == 1 or spread.offload_optimizer:
        return [buckets]
    part = _part(model) * model.trained_width
    source = "a device's part of them"
    return [buckets, MemoryTerm("gradients", part, "exact", source, "backward")]


def update_bytes(model: Model) -> int:
    """What ``step`` has at once beside states, and beside stage 3's buffer of gradients.

    Gradients are flattened, then made float32 and the flat ones freed; stages 1 and 2 free the
    gradients themselves only after that (``stage_1_and_2.py``, ``step``). Then AdamW has the
    float32 ones, and its root of second moments unless it is one kernel. Stage 3 does this for one
    sub-group after the other, which ends with the parameter that fills it (``stage3.py``,
    ``step``, ``_prepare_fp32_grad_for_sub_group``, ``_create_fp16_sub_groups``).
    """
    elements, width = _part(model), model.trained_width
    made = width + (FLOAT32 if width < FLOAT32 else 0)
    if model.workload.sharding.zero_stage == 3:
        elements = _sub_group(model)
    else:
        made += width
    foreach = model.settings.foreach and model.workload.optimizer in ("adam", "adamw")
    return elements * max(made, FLOAT32 * (2 if foreach else 1))


def beside_states(model: Model) -> tuple[int, int]:
    """What one device has on the host and on the disk beside its part of weights and states."""
    spread = model.workload.sharding
    by_optimizer = _beside_optimizer(model) if spread.offload_optimizer else (0, 0)
    by_parameters = _beside_parameters(model) if spread.offload_parameters else (0, 0)
    return by_optimizer[0] + by_parameters[0], by_optimizer[1] + by_parameters[1]


def _beside_optimizer(model: Model) -> tuple[int, int]:
    """Beside the part of an offloaded optimizer, on the host and on the disk.

    That part has float32 weights, moments, and 16-bit numbers: a copy of the weights in stages 1
    and 2 (``param_buffer_of_bit16_for_cpu_offload_groups``), gradients in stage 3. There are
    float32 gradients too. Stage 2 sums those of several batches (``accumulated_grads_in_cpu``), and
    stages 1 and 2 have a copy of the largest. A disk has all but the 16-bit gradients, and is read
    through buffers (``runtime/swap_tensor``).
    """
    spread, elements, width = model.workload.sharding, _part(model), model.trained_width
    narrow, wide = elements * width, elements * FLOAT32
    if spread.offload_optimizer == "disk":
        buffers = OPTIMIZER_BUFFERS * FLOAT32 * _sub_group(model)
        return narrow + buffers + _idle(narrow), wide - narrow
    if spread.zero_stage == 3:
        groups, rest = divmod(elements, SUB_GROUP)
        pinned = groups * _idle(FLOAT32 * SUB_GROUP) + _idle(FLOAT32 * rest) + _idle(narrow)
        return wide + pinned, 0
    sums = spread.zero_stage == 2 and model.workload.grad_accumulation_steps > 1
    largest = _largest_bytes(model)
    pinned = 2 * _idle(wide) + _idle(narrow) + _idle(largest)
    return wide + largest + sums * narrow + pinned, 0


def _beside_parameters(model: Model) -> tuple[int, int]:
    """Beside a device's part of offloaded parameters, on the host and on the disk.

    Trained ones are one pinned array (``_create_param_groups_fp16_flat_cpu_memory``). With a disk
    so many as ``max_in_cpu`` stay on the host, beside the buffers for the others.
    """
    elements, width = _part(model), model.trained_width
    if model.workload.sharding.offload_parameters == "host":
        return _idle(elements * width), 0
    kept = min(elements, PARAMETERS_ON_HOST) * width
    buffers = (PARAMETER_BUFFERS + _sub_group(model)) * width
    return kept + _idle(kept) + buffers, -kept


def _idle(size_bytes: int) -> int:
    """What a pinned array leaves of the power of two that torch takes for it.

    torch 2.13, ``ATen/core/CachingHostAllocator.h``, ``allocate``; ``pin_memory`` is the default.

    >>> _idle(5 << 30) >> 30, _idle(1 << 30), _idle(0)
    (3, 0, 0)
    """
    return (1 << (size_bytes - 1).bit_length()) - size_bytes if size_bytes else 0


def _largest_bytes(model: Model) -> int:
    return max(map(prod, model.shapes)) * model.trained_width


def _sub_group(model: Model) -> int:
    """Elements that stage 3 updates at once: it ends with the parameter that fills it."""
    elements = _part(model)
    largest = ceil(max(map(prod, model.shapes)) * elements / trained_elements(model))
    return min(elements, SUB_GROUP + largest)


def _part(model: Model) -> int:
    """Trained elements whose states are on one device."""
    spread = model.workload.sharding
    shards = spread.shards if spread.zero_stage else 1
    elements = model.staged(trained_elements(model))
    return ceil(elements / (shards * spread.tensor * spread.pipeline))
