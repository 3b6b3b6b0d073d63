"""Trainings that mean nothing, or that no program does: each is explained instead of computed."""

from collections.abc import Iterator
from dataclasses import replace

from uma.architecture.layers import Architecture, Attention, Mixer, Recurrent
from uma.catalog import gpus
from uma.errors import UsageError
from uma.machine import Machine
from uma.plan.training.case import TrainingCase
from uma.plan.training.stack import Stack
from uma.plan.training.targets import check_targets, target_notes
from uma.workload import Sharding, Trainer, TrainingWorkload

MLX_OPTIMIZERS = {
    "mlx_lm": ("adam", "adamw", "muon", "sgd", "adafactor"),  # mlx-lm 0.32.2, lora.py
    "uma": ("adam", "adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd"),
}
# PEFT 0.21, tuners/lora/model.py, _create_new_module, and transformers 5.24, is_trainable of each
# quantizer; torchtune 0.6, recipes/lora_finetune_single_device.py; litgpt 0.5, finetune/lora.py;
# unsloth, models/loader.py.
TRAINED_ON = {
    "trainer": ("nf4", "nf4-double", "int8", "gptq", "gptq-int8", "awq", "fp8"),
    "trainer-2024": ("nf4", "nf4-double", "int8", "gptq", "gptq-int8", "awq"),
    "torchtune": ("nf4", "nf4-double"),
    "litgpt": ("nf4", "nf4-double", "int8"),
    "unsloth": ("nf4", "nf4-double", "int8"),
}
DORA_BITS = (2, 4, 8)  # mlx-lm 0.32.2, tuner/dora.py: 32 // bits weights a word
OF_BITSANDBYTES = ("adamw-8bit", "paged-adamw", "paged-adamw-8bit")
AMPERE = 2020  # the year of the first card of NVIDIA that has bfloat16


def check(case: TrainingCase) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: With the reason, and what to do instead.
    """
    layers, every = len(case.architecture.layers), case.workload.grad_checkpoint
    if every > layers:
        raise UsageError(f"a checkpoint every {every} layers: the model has {layers}")
    check_unpacked(case.architecture)
    check_targets(case)
    if case.engine == "mlx":
        check_mlx_sharding(case.workload.sharding)
    for reason in reasons(case):
        raise UsageError(reason)


def check_unpacked(architecture: Architecture) -> None:
    """
    Raises:
        UsageError: If the matrices are packed, which nothing trains.
    """
    if any(p.dtype == "uint8" for p in architecture.layers[0].parameters):
        raise UsageError(
            "the matrices of this model are packed, several numbers to a byte, and have neither "
            "gradients nor adapters: take one in 16 bits"
        )


def reasons(case: TrainingCase) -> Iterator[str]:
    """Why it cannot be trained like this."""
    return _mlx_reasons(case) if case.engine == "mlx" else _torch_reasons(case)


def _mlx_reasons(case: TrainingCase) -> Iterator[str]:
    workload, name = case.workload, "mlx_lm.lora" if case.trainer == "mlx_lm" else "uma lora train"
    known = MLX_OPTIMIZERS[case.trainer]
    if workload.optimizer not in known:
        why = ""
        if "8bit" in workload.optimizer or "paged" in workload.optimizer:
            why = " (bitsandbytes', which needs CUDA; uma lora train has an 8-bit AdamW of its own)"
        yield f"{name} has no optimizer {workload.optimizer!r}{why}; it has {', '.join(known)}"
    yield from _mlx_kernel_reasons(workload, case.trainer)
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


def _mlx_kernel_reasons(workload: TrainingWorkload, trainer: Trainer) -> Iterator[str]:
    """Of how the loss and attention are computed, of which each trainer has one way."""
    if workload.loss != "naive" and trainer == "uma":
        yield "uma lora train always computes the loss in slices: leave --loss out"
    elif workload.loss != "naive":
        yield (
            f"mlx_lm.lora computes all logits at once; --loss {workload.loss} is not its own: "
            "--trainer uma computes them in slices"
        )
    if workload.attention is not None and trainer == "uma":
        yield "uma lora train always computes attention in slices: leave --attention out"
    elif workload.attention == "fused":
        yield (
            "mlx_lm.lora has no fused attention: MLX makes gradients from the scores of all pairs "
            "of tokens; leave --attention out, or give --trainer uma, which slices them"
        )


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
    yield from _stack_reasons(case)
    if case.workload.dtype == "float16":
        yield from float16_reasons(case.stack, case.workload)
    yield from _optimizer_reasons(case)
    if case.workload.quantized:
        yield from _format_reasons(case)
    workload, spread = case.workload, case.workload.sharding
    layers, settings = case.architecture.layers, case.settings
    last = workload.method == "full" and workload.num_layers not in (None, len(layers))
    nothing = settings.reentrant and not settings.inputs_need_gradients
    if last and workload.grad_checkpoint and nothing:
        yield (  # torch 2.4, utils/checkpoint.py, CheckpointFunction
            "reentrant checkpoints have no gradients where no input needs one, as behind frozen "
            f"layers: leave out --grad-checkpoint or --stack {case.stack.name}"
        )
    if spread.tensor * spread.sequence > 1:
        for mixer in {mixer for layer in layers for mixer in layer.mixers}:
            yield from _split_reasons(mixer, spread)
    if spread.pipeline > len(layers):
        yield f"--pipeline {spread.pipeline}: the model has {len(layers)} layers, one a stage"
    if spread.pipeline > 1 and spread.zero_stage in (2, 3) and not spread.fsdp:
        yield (  # DeepSpeed 0.19.8, runtime/pipe/engine.py, PipelineEngine.__init__
            "DeepSpeed's pipelines keep whole gradients between micro-batches, so that ZeRO stages "
            "2 and 3 do not go with them: --zero-stage 1, or --fsdp full"
        )
    if spread.tensor > 1 and workload.quantized in ("nf4", "nf4-double", "int8"):
        yield (
            f"{workload.quantized} matrices of bitsandbytes are packed whole and cannot be split "
            "for tensor parallelism: shard them with --fsdp full"
        )


def float16_reasons(
    stack: Stack, workload: TrainingWorkload, *, has_bfloat16: bool = True
) -> Iterator[str]:
    """Why weights in float16 are not trained without a float32 copy; without autocast none says so.

    torch 2.13, ``amp/grad_scaler.py``, ``_unscale_grads_``, which Trainer calls to clip; torchtune
    0.6, each recipe's ``__init__``; unsloth 2026, ``models/vision.py``, ``from_pretrained``.
    """
    deepspeed = workload.sharding.zero_stage > 0 and not workload.sharding.fsdp
    full = workload.method == "full"
    instead = "bfloat16, or " * has_bfloat16 + "float32 weights (--precision mixed)"
    if stack.name == "torchtune":
        yield "torchtune has no float16, only bfloat16 and float32: leave --quant out"
    elif stack.name == "unsloth" and full and stack.precision != "mixed":
        yield f"Unsloth makes float32 of float16 weights that are trained: take {instead}"
    elif full and stack.is_of_transformers and stack.precision == "16-bit" and not deepspeed:
        yield (
            "weights in float16 alone are not trained: torch's GradScaler refuses gradients in "
            f"float16; take {instead}, DeepSpeed (--zero-stage), which keeps such, or --train lora"
        )


def _optimizer_reasons(case: TrainingCase) -> Iterator[str]:
    """Of bitsandbytes' optimizers, where states are sharded or lie on the host."""
    optimizer, spread = case.workload.optimizer, case.workload.sharding
    if optimizer not in OF_BITSANDBYTES:
        return
    if spread.fsdp:  # bitsandbytes issues 89 and 1633; torchtune, memory_optimizations.rst
        yield (
            f"{optimizer} is of bitsandbytes, which does not go with FSDP's shards: take "
            "--optimizer adamw, or --zero-stage 3 instead of --fsdp"
        )
    elif spread.offload_optimizer:  # accelerate 1.15, map_pytorch_optim_to_deepspeed
        yield (
            f"{optimizer} on the host: accelerate takes DeepSpeed's float32 Adam in its place; "
            "give --optimizer adamw, which is that"
        )


def _format_reasons(case: TrainingCase) -> Iterator[str]:
    from uma.engines.torch_model import COPIED

    workload, known = case.workload, TRAINED_ON[case.stack.name]
    if workload.quantized not in known:
        whose = "PEFT" if case.stack.is_of_transformers else case.stack.name
        yield (
            f"{whose} has no adapters on {workload.quantized} weights: take bf16, or --quant "
            f"{', '.join(known)}"
        )
    if workload.method == "dora" and workload.quantized not in COPIED:
        yield (  # PEFT 0.21, tuners/lora/gptq.py and awq.py
            f"PEFT has no DoRA on {workload.quantized}: take --quant nf4 or int8, or --train lora"
        )


def _split_reasons(mixer: Mixer, spread: Sharding) -> Iterator[str]:
    """Of a mixer's heads, over the devices of tensor and of sequence parallelism.

    Ulysses sends each of fewer key-value heads than devices to several (DeepSpeed 0.19.8,
    ``runtime/sequence_parallel/ulysses_sp.py``, ``UlyssesSPAttentionHF``).
    """
    tensor, sequence = spread.tensor, spread.sequence
    if isinstance(mixer, Recurrent):
        if sequence > 1:
            yield (
                f"--sequence {sequence}: Ulysses sends heads of attention; {mixer.kind} layers "
                "carry a state from token to token"
            )
        return
    heads = groups = mixer.num_attention_heads
    if isinstance(mixer, Attention):
        groups = mixer.num_key_value_heads
    if groups % tensor:
        yield f"--tensor {tensor}: {groups} key-value heads are not divisible by it"
    if heads % sequence:
        yield f"--sequence {sequence}: {heads} attention heads are not divisible by it"
    if tensor > 1 and sequence > 1 and heads % (tensor * sequence):
        yield (
            f"--tensor {tensor} --sequence {sequence}: {heads} attention heads are not divisible "
            f"by {tensor * sequence}, and both split them"
        )
    if groups % sequence and sequence % groups:
        yield f"--sequence {sequence}: {groups} key-value heads are neither multiple nor divisor"


def _stack_reasons(case: TrainingCase) -> Iterator[str]:
    stack, workload, spread = case.stack, case.workload, case.workload.sharding
    if stack.name == "unsloth" and (spread.devices > 1 or spread.zero_stage):
        yield (
            "Unsloth trains on one device, without ZeRO and FSDP; leave --stack out, or the other "
            "devices and what is for them"
        )
    elif not stack.is_of_transformers and spread.zero_stage and not spread.fsdp:
        yield f"{stack.name} shards with FSDP, not with DeepSpeed: --fsdp full"
    if stack.precision == "mixed" and stack.name == "torchtune":
        yield "torchtune has no autocast (0.6, recipes: dtype bf16 or fp32): leave --precision out"
    if stack.precision == "mixed" and spread.zero_stage and not spread.fsdp:
        yield "DeepSpeed keeps float32 weights of its own beside 16-bit ones: leave --precision out"
    if stack.precision == "mixed" and workload.quantized:
        yield (
            f"--precision mixed keeps float32 weights, which {workload.quantized} ones are not; "
            "leave it out"
        )
    if stack.optimizer_in_backward and stack.name != "torchtune":
        yield "--optimizer-in-backward is torchtune's optimizer_in_bwd: give --stack torchtune"
    if stack.optimizer_in_backward and workload.grad_accumulation_steps > 1:
        yield (
            "--optimizer-in-backward updates a weight as soon as its gradient is there: nothing "
            "can be accumulated, leave --grad-accumulation-steps out"
        )
    if stack.fused_kernels and not stack.is_of_transformers:
        yield f"--fused-kernels are for transformers' modules; {stack.name} has its own"
    if stack.lora_dropout and workload.method == "full":
        yield "--lora-dropout is that of adapters; --train full has none"
    if stack.prepare_kbit:
        yield from _preparing_reasons(case)
    if workload.quantized and spread.offload_parameters and not spread.fsdp:
        yield (  # PEFT 0.21, docs/source/accelerate/fsdp.md
            f"{workload.quantized} weights go to the host under FSDP alone: --fsdp full with "
            "both offloaded there"
        )


def _preparing_reasons(case: TrainingCase) -> Iterator[str]:
    from uma.engines.torch_model import COPIED

    name = "--prepare-kbit is PEFT's prepare_model_for_kbit_training"
    if not case.stack.is_of_transformers:
        yield f"{name}, which {case.stack.name} does not call: leave it out"
    if case.workload.quantized not in COPIED:
        yield f"{name}, for a base in one of {', '.join(sorted(COPIED))}: give --quant"
    if case.workload.sharding.zero_stage:
        yield (
            f"{name}: it makes float32 arrays, which FSDP does not join with 16-bit ones and "
            "DeepSpeed narrows again; leave it out"
        )


def notes(case: TrainingCase) -> Iterator[str]:
    """What holds for the case, and is not in its numbers."""
    if case.engine == "torch" and case.settings.kernel == "eager" and not case.workload.attention:
        yield (
            "attention is eager, as transformers has no sdpa for this model: the scores of all "
            "pairs of tokens are held; --attention fused is for a kernel such as flash_attention_2"
        )
    workload, spread = case.workload, case.workload.sharding
    cards = case.machine_devices
    if cards > 1 and spread.devices == 1:
        yield f"one card of {cards} is used: --devices {cards} uses all"
    if case.engine == "torch" and spread.devices > cards:
        yield f"{spread.devices} devices are {-(-spread.devices // cards)} such machines"
    if spread.offload_optimizer == "disk":
        yield (
            "DeepSpeed reads the disk through four buffers of a sub-group on the host, up to 16 GB "
            "for each device: a smaller sub_group_size needs less"
        )
    if 1 < spread.pipeline > workload.grad_accumulation_steps:
        yield (
            f"a pipeline of {spread.pipeline} stages stands still in part with fewer micro-batches "
            f"for an update: --grad-accumulation-steps {spread.pipeline} or more"
        )
    yield from target_notes(case)
    longest = case.architecture.max_position_embeddings
    if longest and workload.max_seq_length > longest:
        yield f"the model was made for {longest:,} tokens of context"
    yield from _mlx_notes(case) if case.engine == "mlx" else _half_notes(case)


def _half_notes(case: TrainingCase) -> Iterator[str]:
    """What float16 needs, where it is asked for, or a card has no bfloat16."""
    if case.workload.dtype == "float16":
        if not (case.settings.autocast or case.settings.deepspeed):
            yield (
                "without autocast no loss is scaled, and what is too small for float16 becomes 0: "
                "bfloat16 has no need of it"
            )
        return
    for too_old in without_bfloat16(case.machine):
        yield too_old
        asked = replace(case.workload, dtype="float16")
        yield from float16_reasons(case.stack, asked, has_bfloat16=False)


def without_bfloat16(machine: Machine) -> Iterator[str]:
    """That cards are too old for it, where they are."""
    names = {device.name for device in machine.devices}
    if any(row.name in names and row.vendor == "NVIDIA" and row.year < AMPERE for row in gpus()):
        yield "no bfloat16 before Ampere: float16 takes as much, and needs its losses scaled"


def _mlx_notes(case: TrainingCase) -> Iterator[str]:
    workload, layers = case.workload, case.architecture.layers
    if workload.method == "full" and workload.num_layers is not None:
        yield f"only the last {workload.num_layers} layers are trained: --num-layers -1 for all"
    yield "the longest batch decides: the peak appears when the longest rows turn up"
    if case.architecture.module is None:
        yield f"mlx-lm 0.32.2 has no module for {case.architecture.model_type}"
    if workload.sharding.zero_stage == 3:
        yield (
            "fully_shard needs JACCL (Thunderbolt 5): MLX's other backends do not scatter sums; "
            "mlx_lm.lora does not call it"
        )
    mixers = (mixer for layer in layers for mixer in layer.mixers)
    kinds = sorted({m.kind for m in mixers if isinstance(m, Recurrent)} - {"mamba2"})
    if kinds and case.trainer == "mlx_lm":
        yield f"states of {', '.join(kinds)} layers are kept for every token: approximate"
