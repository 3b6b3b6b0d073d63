"""What DeepSpeed's ZeRO keeps and makes beside a model, in sizes.

DeepSpeed 0.19.6, ``runtime/zero``: ``config.py``, ``stage_1_and_2.py`` and ``stage3.py``. Gradients
are accumulated in the width of the weights (``runtime/engine.py``, ``get_data_types``).
"""

from math import ceil, prod

from uma.engines.torch_model import Model, trained_elements
from uma.engines.torch_ops import FLOAT32
from uma.memory.term import MemoryTerm, Phase

BUCKET = 500_000_000  # elements, ``reduce_bucket_size``
SUB_GROUP = 1_000_000_000  # elements of a device's part, ``sub_group_size``


def deepspeed_terms(model: Model) -> list[MemoryTerm]:
    """What lies there for good, what a backward pass makes, and what the update does.

    Stage 3 has a flat buffer of its part of the gradients from the start (``stage3.py``,
    ``grad_partitions_flat_buffer``), stage 2 one for each backward pass (``stage_1_and_2.py``,
    ``copy_grads_in_partition``), and stages 1 and 2 the sum of those before it
    (``all_grad_tensors``); where the optimizer is offloaded, it is the host that has it.
    Gradients go through a bucket, and a second one: with ``overlap_comm``, or the copy that
    ``reduce_scatter_coalesced`` makes.
    """
    stage = model.workload.sharding.zero_stage
    bucket = min(BUCKET, trained_elements(model)) * model.workload.dtype_bytes
    phase: Phase = "always" if stage == 3 else "backward"
    buckets = [
        MemoryTerm("other", bucket, "bound", "reduce bucket", phase),
        MemoryTerm("other", bucket, "bound", "second bucket", "backward"),
    ]
    if model.workload.sharding.offload_optimizer:
        return buckets
    elements, width = _part(model), _width(model)
    source = "float32 copies of trained weights"
    found = [MemoryTerm("master_weights", elements * FLOAT32, "exact", source)]
    source = "a device's part of them"
    if stage == 3:
        found.append(MemoryTerm("gradients", elements * width, "exact", source))
    else:
        copies = (stage == 2) + (model.workload.grad_accumulation_steps > 1)
        held = copies * elements * width
        found.append(MemoryTerm("gradients", held, "exact", source, "backward"))
    source = "float32 gradients and what makes them"
    update = MemoryTerm("gradients", update_bytes(model), "bound", source, "optimizer")
    return [*found, *buckets, update]


def update_bytes(model: Model) -> int:
    """What ``step`` has at once beside states, and beside stage 3's buffer of gradients.

    Gradients are flattened, then made float32 and the flat ones freed; stages 1 and 2 free the
    gradients themselves only after that (``stage_1_and_2.py``, ``step``). Then AdamW has the
    float32 ones, and its root of second moments unless it is one kernel. Stage 3 does this for one
    sub-group after the other, which ends with the parameter that fills it (``stage3.py``,
    ``step``, ``_prepare_fp32_grad_for_sub_group``, ``_create_fp16_sub_groups``).
    """
    elements, width = _part(model), _width(model)
    made = width + (FLOAT32 if width < FLOAT32 else 0)
    if model.workload.sharding.zero_stage == 3:
        largest = ceil(max(map(prod, model.shapes)) * elements / trained_elements(model))
        elements = min(elements, SUB_GROUP + largest)
    else:
        made += width
    foreach = model.settings.foreach and model.workload.optimizer in ("adam", "adamw")
    return elements * max(made, FLOAT32 * (2 if foreach else 1))


def _width(model: Model) -> int:
    """Bytes of a trained weight, and of its gradient."""
    return model.weight_width if model.trains_all else model.settings.adapter_width


def _part(model: Model) -> int:
    """Trained elements whose states are on one device."""
    spread = model.workload.sharding
    shards = spread.shards if spread.zero_stage else 1
    return ceil(trained_elements(model) / (shards * spread.tensor * spread.pipeline))
