"""Training with MLX's ``fully_shard``: each Mac keeps a part of every layer (mlx 0.32.4).

``mlx/nn/layers/distributed.py``: what is wrapped gathers its parameters before it runs, and its
gradients are summed and scattered. No program of mlx-lm does so; what is laid out is a script that
wraps attention and feed-forward of every layer (a whole layer hides what mlx-lm reads of it). Of
MLX's backends only JACCL (Thunderbolt 5) has ``sum_scatter``.
"""

from dataclasses import replace
from math import ceil

from uma.architecture.layers import Architecture
from uma.engines.mlx_training import STEP_SOURCE, Steps, optimizer_bytes, trained_arrays
from uma.memory.term import MemoryTerm
from uma.workload import Backend, TrainingWorkload

SOURCE = "nn/layers/distributed.py, FullyShardedModule"


def sharded_training_terms(
    architecture: Architecture,
    weights: MemoryTerm,
    workload: TrainingWorkload,
    *,
    backend: Backend = "metal",
) -> tuple[MemoryTerm, ...]:
    """Every term of a step on one Mac, by phase.

    Gathered weights are inputs of products, so that they live until the backward pass has used
    them: all layers at once, unless layers are checkpointed, which gathers them again. What is just
    gathered is there twice, in the order of the message and in its own. Gradients and the update
    are those of a part; two processes on a CPU needed 8 and 18 % less than this, without and with
    checkpointing.
    """
    macs = workload.sharding.data
    alone = replace(workload, batch_size=workload.batch_size // macs)
    arrays = trained_arrays(architecture, alone)
    states = ceil(optimizer_bytes(alone, arrays) / macs)
    width = workload.dtype_bytes
    layers = [width * sum(p.size for p in layer.parameters) for layer in architecture.layers]
    outside = width * sum(p.size for p in architecture.parameters)
    one = outside + 2 * max(layers)
    gathered = one if workload.grad_checkpoint else outside + sum(layers) + max(layers)
    least = replace(alone, batch_size=1, max_seq_length=2)
    step, update = (Steps(architecture, w, backend).peak_bytes() for w in (alone, least))
    gradients = sum(a.size_bytes for a in arrays) // macs
    held = max(gathered + gradients, one + update // macs)
    source = f"{workload.optimizer}, by shape, a part of each"
    return (
        MemoryTerm("weights", ceil(weights.size_bytes / macs), "exact", f"a part of {macs}"),
        MemoryTerm("optimizer_states", states, "exact", source),
        MemoryTerm("weights", gathered, "bound", SOURCE, "backward"),
        MemoryTerm(
            "gradients", held - gathered, "bound", "a part of each, with the update", "backward"
        ),
        MemoryTerm("activations", max(0, step - update), "bound", STEP_SOURCE, "backward"),
        MemoryTerm("weights", one, "bound", SOURCE, "validation"),
        MemoryTerm("other", 0, "exact", "parts are written in place", "save"),
    )
