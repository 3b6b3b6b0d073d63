"""The options of ``uma estimate --train``."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from uma import workload
from uma.cli.options import given
from uma.errors import UsageError
from uma.frozen import dataclass
from uma.workload import (
    DEFAULT_MAX_SEQ_LENGTH,
    DEFAULT_RANK,
    DEFAULT_TRAINING_BATCH,
    Sharding,
)

Kind = Literal["lora", "rslora", "qlora", "dora", "full"]
FsdpShard = Literal["full", "hybrid"]
Offload = Literal["host", "disk"]

Train = Annotated[
    Kind | None,
    typer.Option(
        help="Estimate training instead: adapters of one kind (rslora takes what lora takes, "
        "scaled otherwise; qlora is lora on a quantized base), or all weights."
    ),
]
Rank = Annotated[int, typer.Option(min=1, max=1 << 20, help="train: rank of the adapters.")]
Targets = Annotated[
    str | None,
    typer.Option(help="train: matrices with adapters, such as q_proj,v_proj. [default: all]"),
]
NumLayers = Annotated[
    int | None,
    typer.Option(help="train: layers from the last; -1 is all. [default: 16 on mlx, else all]"),
]
MaxSeqLength = Annotated[
    int, typer.Option(min=2, max=1 << 24, help="train: tokens of the longest row.")
]
GradCheckpoint = Annotated[
    bool,
    typer.Option(
        "--grad-checkpoint",
        help="train: keep the layers' inputs alone; --stack unsloth always does, on the host.",
    ),
]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, help="train: layers between saved inputs, with --grad-checkpoint.")
]
Accumulation = Annotated[
    int, typer.Option(min=1, max=1 << 20, help="train: batches whose gradients are summed.")
]
Optimizer = Annotated[str, typer.Option(help="train: adam, adamw-8bit, paged-adamw, sgd, ...")]
Loss = Annotated[workload.Loss, typer.Option(help="train: how the loss is computed.")]
TrainAttention = Annotated[
    workload.TrainingAttention | None,
    typer.Option("--attention", help="train: one kernel, or all pairs of tokens."),
]
MemKind = Annotated[
    workload.MemoryKind | None,
    typer.Option(
        help="train: what torch allocates, holds, or what the device shows. "
        "[default: device with PyTorch, allocated with MLX]"
    ),
]
Precision = Annotated[
    workload.Precision,
    typer.Option(
        help="train: torch's weights in 16 bits under autocast, in float32 under it, or 16 alone."
    ),
]
StackOption = Annotated[
    workload.StackName,
    typer.Option(
        help="train: on torch, Trainer with PEFT (transformers 5, or 4 of 2024), or other programs."
    ),
]
PrepareKbit = Annotated[
    bool,
    typer.Option(
        "--prepare-kbit",
        help="train: PEFT's prepare_model_for_kbit_training: float32 of all not quantized.",
    ),
]
LoraDropout = Annotated[
    bool, typer.Option("--lora-dropout", help="train: on torch, dropout before adapters.")
]
FusedKernels = Annotated[
    workload.Kernels | None,
    typer.Option(
        help="train: torch: of norms and rotations; Liger's of gates and a loss in slices too, "
        "Unsloth's (axolotl's) of adapters."
    ),
]
OptimizerInBackward = Annotated[
    bool,
    typer.Option("--optimizer-in-backward", help="train: torchtune's: no gradients are kept."),
]
TrainerOption = Annotated[
    workload.Trainer,
    typer.Option(help="train: on MLX, mlx_lm.lora or uma lora train."),
]
Data = Annotated[
    Path | None,
    typer.Option(help="train: JSON lines, or a folder with train.jsonl: the worst batch of them."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="train: folder with tokenizer.json, for --data. [default: the model's]"),
]
Packing = Annotated[
    bool, typer.Option("--packing", help="train: with --data, several examples in a row.")
]
LargestModel = Annotated[
    bool, typer.Option("--largest-model", help="train: also the largest model that fits.")
]
Devices = Annotated[
    int,
    typer.Option(
        "--devices", min=1, max=1 << 20, help="train: devices with a batch each (MLX: a part)."
    ),
]
ZeroStage = Annotated[
    int, typer.Option(min=0, max=3, help="train: DeepSpeed ZeRO stage over the devices.")
]
Fsdp = Annotated[
    FsdpShard | None,
    typer.Option(help="train: FSDP over all devices or in groups; MLX: fully_shard."),
]
ShardGroup = Annotated[
    int | None,
    typer.Option(min=2, help="train: devices of a group of hybrid sharding. [default: a machine]"),
]
Tensor = Annotated[
    int, typer.Option(min=1, max=1 << 10, help="train: devices that each matrix is split over.")
]
Pipeline = Annotated[
    int, typer.Option(min=1, max=1 << 10, help="train: stages that the layers are split into.")
]
Sequence = Annotated[
    int, typer.Option(min=1, max=1 << 10, help="train: devices that each row is split over.")
]
OffloadOptimizer = Annotated[Offload | None, typer.Option(help="train: where optimizer states go.")]
OffloadParameters = Annotated[Offload | None, typer.Option(help="train: where parameters go.")]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of ``uma estimate --train``, by their names."""

    train: Kind
    rank: int = DEFAULT_RANK
    targets: str | None = None
    num_layers: int | None = None
    max_seq_length: int = DEFAULT_MAX_SEQ_LENGTH
    grad_checkpoint: bool = False
    checkpoint_every: int = 1
    grad_accumulation_steps: int = 1
    optimizer: str = "adam"
    loss: workload.Loss = "naive"
    attention: workload.TrainingAttention | None = None
    mem_kind: workload.MemoryKind | None = None
    precision: workload.Precision = "16-bit"
    stack: workload.StackName = "trainer"
    prepare_kbit: bool = False
    lora_dropout: bool = False
    optimizer_in_backward: bool = False
    fused_kernels: workload.Kernels | None = None
    trainer: workload.Trainer = "mlx_lm"
    data: Path | None = None
    tokenizer: Path | None = None
    packing: bool = False
    largest_model: bool = False
    devices: int = 1
    zero_stage: int = 0
    fsdp: FsdpShard | None = None
    shard_group: int | None = None
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    batch_size: int = DEFAULT_TRAINING_BATCH


def options_asked(context: typer.Context) -> TrainOptions | None:
    """The options of training; ``None`` without ``--train``.

    Raises:
        UsageError: If options of training stand there without it, or options of generation with
            it, or one of two that mean something together alone.
    """
    params: dict[str, Any] = context.params
    every = [field.name for field in fields(TrainOptions)]
    names = [name for name in every if name not in ("train", "batch_size")]
    if params["train"] is None:
        stray = [name for name in names if given(context, name)]
        if stray:
            raise UsageError(
                f"--{stray[0].replace('_', '-')} is an option of training: give --train too"
            )
        return None
    batch = params["batch_size"] if given(context, "batch_size") else DEFAULT_TRAINING_BATCH
    values = {name: params[name] for name in names}
    for name in ("data", "tokenizer"):  # typer makes paths of them later, for the function
        values[name] = values[name] and Path(values[name])
    if values["stack"] == "unsloth":
        values["grad_checkpoint"] = True  # its own default, "unsloth"
    asked = TrainOptions(train=params["train"], batch_size=batch, **values)
    _check_together(context, asked)
    return asked


NEEDS = {
    "checkpoint_every": ("grad_checkpoint", "counts layers between saved inputs"),
    "tokenizer": ("data", "counts the tokens of a data set"),
    "packing": ("data", "joins the rows of a data set"),
    "shard_group": ("fsdp", "is the size of hybrid sharding's groups"),
}


OF_GENERATION = (
    "context",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "parallel",
    "cache_type_k",
    "cache_type_v",
    "cache_ram",
    "ubatch_size",
    "flash_attn",
    "swa_full",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "requests",
    "attn_implementation",
)


def _check_together(context: typer.Context, asked: TrainOptions) -> None:
    for name, (other, what) in NEEDS.items():
        if given(context, name) and not getattr(asked, other):
            word, needed = name.replace("_", "-"), other.replace("_", "-")
            raise UsageError(f"--{word} {what}: give --{needed} too")
    stray = [name for name in OF_GENERATION if given(context, name)]
    if stray:
        instead = "; training has --max-seq-length" if stray[0] == "context" else ""
        raise UsageError(
            f"--{stray[0].replace('_', '-')} is an option of generation, not of --train{instead}"
        )
    if asked.stack == "unsloth" and given(context, "loss") and asked.loss != "sliced":
        raise UsageError("Unsloth computes the loss in slices: leave --loss out")
    if asked.fused_kernels == "liger" and given(context, "loss") and asked.loss == "naive":
        raise UsageError("Liger's loss is in slices, or one kernel (--loss fused): leave it out")
    if asked.targets is not None and not target_names(asked.targets):
        raise UsageError(f"--targets {asked.targets!r} names nothing; give such as q_proj,v_proj")
    if asked.train == "full" and given(context, "rank"):
        raise UsageError("--rank is that of adapters; --train full has none")
    if asked.train == "full" and asked.targets is not None:
        raise UsageError("--targets are matrices with adapters; --train full has none")
    if asked.fsdp and asked.zero_stage:
        raise UsageError(
            "--fsdp and --zero-stage are two programs for the same: FSDP's full shard is what ZeRO "
            "calls stage 3; give one of them"
        )
    if (asked.offload_optimizer or asked.offload_parameters) and not (
        asked.zero_stage or asked.fsdp
    ):
        raise UsageError(
            "offloading is a part of ZeRO and of FSDP: give --zero-stage 2 (the optimizer) or 3 "
            "(parameters too), or --fsdp full with both"
        )
    if asked.fsdp == "full" and asked.shard_group:
        raise UsageError("--shard-group is for --fsdp hybrid; a full shard has one group, all")


def target_names(text: str | None) -> tuple[str, ...]:
    """The names between commas."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))


def sharding_of(asked: TrainOptions, cards: int) -> Sharding:
    """How the training is spread; ``cards`` are those of one machine, a group of hybrid sharding.

    Raises:
        UsageError: If hybrid sharding would have one group, or groups of one.
    """
    group = 0
    if asked.fsdp == "hybrid":
        replicas = asked.devices * asked.sequence
        group = asked.shard_group or cards
        if not 1 < group < replicas:
            raise UsageError(
                f"--fsdp hybrid with groups of {group} of {replicas} devices is no hybrid: give "
                "--shard-group with a number between, or --fsdp full"
            )
    return Sharding(
        data=asked.devices,
        tensor=asked.tensor,
        pipeline=asked.pipeline,
        sequence=asked.sequence,
        zero_stage=3 if asked.fsdp else asked.zero_stage,
        shard_group=group,
        offload_optimizer=asked.offload_optimizer or "",
        offload_parameters=asked.offload_parameters or "",
        fsdp=asked.fsdp is not None,
    )
