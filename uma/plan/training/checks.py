"""Trainings that mean nothing, or that no program does: each is explained instead of computed."""

from collections.abc import Iterator

from uma.architecture.layers import Attention, Recurrent
from uma.errors import UsageError
from uma.memory.adapters import is_adaptable, is_target, layer_adapters, trained_layers
from uma.plan.training.case import TrainingCase
from uma.workload import Sharding

MLX_OPTIMIZERS = {
    "mlx_lm": ("adam", "adamw", "muon", "sgd", "adafactor"),  # mlx-lm 0.32.2, lora.py
    "uma": ("adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd"),
}
DORA_BITS = (2, 4, 8)  # mlx-lm 0.32.2, tuner/dora.py: 32 // bits weights a word


def check(case: TrainingCase) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: With the reason, and what to do instead.
    """
    layers, every = len(case.architecture.layers), case.workload.grad_checkpoint
    if every > layers:
        raise UsageError(f"a checkpoint every {every} layers: the model has {layers}")
    _check_targets(case)
    if case.engine == "mlx":
        check_mlx_sharding(case.workload.sharding)
    reasons = _mlx_reasons(case) if case.engine == "mlx" else _torch_reasons(case)
    for reason in reasons:
        raise UsageError(reason)


def _check_targets(case: TrainingCase) -> None:
    layers = trained_layers(case.architecture, case.workload)
    matrices = [p for layer in layers for p in layer.parameters if is_adaptable(p)]
    for target in case.workload.targets:
        if not any(is_target(parameter, (target,)) for parameter in matrices):
            names = sorted({p.name.rsplit(".", 1)[-1] for p in matrices})
            raise UsageError(f"no matrix is named {target}; this model has {', '.join(names)}")


def _mlx_reasons(case: TrainingCase) -> Iterator[str]:
    workload, name = case.workload, "mlx_lm.lora" if case.trainer == "mlx_lm" else "uma lora train"
    known = MLX_OPTIMIZERS[case.trainer]
    if workload.optimizer not in known:
        why = ""
        if "8bit" in workload.optimizer or "paged" in workload.optimizer:
            why = " (bitsandbytes', which needs CUDA; uma lora train has an 8-bit AdamW of its own)"
        yield f"{name} has no optimizer {workload.optimizer!r}{why}; it has {', '.join(known)}"
    if workload.loss != "naive" and case.trainer == "uma":
        yield "uma lora train always computes the loss in slices: leave --loss out"
    elif workload.loss != "naive":
        yield (
            f"mlx_lm.lora computes all logits at once; --loss {workload.loss} is not its own: "
            "--trainer uma computes them in slices"
        )
    if workload.mem_kind != "allocated":
        yield (
            f"--mem-kind {workload.mem_kind} is torch's; MLX counts what is allocated, and its "
            "pool of freed buffers is a choice (mx.set_cache_limit)"
        )
    if workload.grad_checkpoint > 1:
        yield (
            f"{name} checkpoints every layer, not every {workload.grad_checkpoint}: leave "
            "--checkpoint-every out"
        )
    if workload.method == "dora" and case.mlx_bits not in (*DORA_BITS, 16):
        yield (
            f"mlx-lm's DoRA takes 32 // bits weights for a word, which is wrong for "
            f"{case.mlx_bits} bits, and fails: take 2, 4 or 8 bits, or --train lora"
        )
    spread = workload.sharding
    if workload.batch_size % spread.data:
        yield (
            f"a batch of {workload.batch_size} rows is not divisible by {spread.data} devices, "
            "which mlx_lm.lora asks for"
        )
    if case.trainer == "uma" and spread.data > 1:
        yield "uma lora train runs on one Mac; several share a batch with --trainer mlx_lm"
    if spread.zero_stage == 3:
        yield from _fully_shard_reasons(case)


def check_mlx_sharding(spread: Sharding) -> None:
    """Refuse what no program does on Macs.

    Raises:
        UsageError: With the reason, and what to do instead.
    """
    reason = None
    if spread.offload_optimizer or spread.offload_parameters:
        reason = (
            "a Mac has one memory: what is offloaded to the host stays in it, and MLX does not "
            "train from a disk"
        )
    elif spread.zero_stage and not spread.fsdp:
        reason = (
            "ZeRO is DeepSpeed's, which needs --engine transformers; several Macs share a batch "
            "with --devices, or each layer too with --fsdp full (MLX's fully_shard)"
        )
    elif spread.shard_group:
        reason = "MLX's fully_shard knows no groups: --fsdp full, or --engine transformers"
    elif spread.tensor * spread.pipeline * spread.sequence > 1:
        reason = (
            "on MLX training is data parallel: give --devices; tensor and pipeline parallelism are "
            "for generation there, and sequence parallelism is of --engine transformers"
        )
    if reason is not None:
        raise UsageError(reason)


def _fully_shard_reasons(case: TrainingCase) -> Iterator[str]:
    """mlx 0.32.4, ``nn/layers/distributed.py``, ``FullyShardedModule``."""
    if case.workload.quantized:
        yield (
            "fully_shard joins all arrays of a layer in one, of one type: packed integers and "
            "their scales cannot be sharded; use --devices alone"
        )
    if case.workload.method != "full":
        yield (
            "fully_shard gathers a layer's frozen and trained arrays in one operation, whose "
            "gradient is that of all of them: adapters need as much as full training; use "
            "--devices alone, or --train full"
        )


def _torch_reasons(case: TrainingCase) -> Iterator[str]:
    workload, spread = case.workload, case.workload.sharding
    layers = case.architecture.layers
    for mixer in {m for layer in layers for m in layer.mixers if isinstance(m, Attention)}:
        for word, heads in (
            ("tensor", mixer.num_key_value_heads),
            ("sequence", mixer.num_attention_heads),
        ):
            degree = getattr(spread, word)
            if heads % degree:
                kind = "key-value heads" if word == "tensor" else "attention heads"
                yield f"--{word} {degree}: {heads} {kind} are not divisible by it"
    if spread.pipeline > len(layers):
        yield f"--pipeline {spread.pipeline}: the model has {len(layers)} layers, one a stage"
    if spread.pipeline > 1 and spread.zero_stage in (2, 3) and not spread.fsdp:
        yield (
            "DeepSpeed's pipelines keep whole gradients between micro-batches, so that ZeRO stages "
            "2 and 3 do not go with them: --zero-stage 1, or --fsdp full"
        )
    if spread.tensor > 1 and workload.quantized in ("nf4", "nf4-double", "int8"):
        yield (
            f"{workload.quantized} matrices of bitsandbytes are packed whole and cannot be split "
            "for tensor parallelism: shard them with --fsdp full"
        )


def notes(case: TrainingCase) -> Iterator[str]:
    """What holds for the case, and is not in its numbers."""
    workload, spread = case.workload, case.workload.sharding
    cards = case.machine_devices
    if cards > 1 and spread.devices == 1:
        yield f"one card of {cards} is used: --devices {cards} uses all"
    if case.engine == "torch" and spread.devices > cards:
        yield f"{spread.devices} devices are {-(-spread.devices // cards)} such machines"
    if 1 < spread.pipeline > workload.grad_accumulation_steps:
        yield (
            f"a pipeline of {spread.pipeline} stages stands still in part with fewer micro-batches "
            f"for an update: --grad-accumulation-steps {spread.pipeline} or more"
        )
    found = layer_adapters(case.architecture.layers[-1], workload)
    narrow = min((min(a.rows, a.columns) for a in found), default=workload.rank)
    if workload.rank > narrow:
        yield f"a rank of {workload.rank} is above {narrow}, the full rank of a trained matrix"
    if case.engine == "mlx":
        yield from _mlx_notes(case)


def _mlx_notes(case: TrainingCase) -> Iterator[str]:
    workload, layers = case.workload, case.architecture.layers
    if workload.method == "full" and workload.num_layers is not None:
        yield f"only the last {workload.num_layers} layers are trained: --num-layers -1 for all"
    yield "the longest batch decides: the peak appears when the longest rows turn up"
    if workload.sharding.zero_stage == 3:
        yield (
            "fully_shard needs JACCL (Thunderbolt 5): MLX's other backends do not scatter sums; "
            "mlx_lm.lora does not call it"
        )
    mixers = (mixer for layer in layers for mixer in layer.mixers)
    kinds = sorted({mixer.kind for mixer in mixers if isinstance(mixer, Recurrent)})
    if kinds and case.trainer == "mlx_lm":
        yield f"states of {', '.join(kinds)} layers are kept for every token: approximate"
