"""``uma estimate --train``: the memory of LoRA, DoRA and full fine-tuning."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from uma.cli.options import RunOptions, given
from uma.errors import DoesNotFit, UsageError
from uma.workload import (
    DEFAULT_MAX_SEQ_LENGTH,
    DEFAULT_NUM_LAYERS,
    DEFAULT_RANK,
    DEFAULT_TRAINING_BATCH,
    Engine,
    MemoryKind,
    Sharding,
    TrainingWorkload,
)

if TYPE_CHECKING:
    from uma.checkpoint.source import ModelSource
    from uma.machine import Machine
    from uma.plan.training import TrainingCase

Train = Annotated[
    Literal["lora", "dora", "full"] | None,
    typer.Option(help="Estimate training instead: adapters of one kind, or all weights."),
]
Rank = Annotated[int, typer.Option(min=1, help="train: rank of the adapters.")]
Targets = Annotated[
    str | None,
    typer.Option(help="train: matrices with adapters, such as q_proj,v_proj. [default: all]"),
]
NumLayers = Annotated[
    int | None,
    typer.Option(help="train: layers from the last; -1 is all. [default: 16 on mlx, else all]"),
]
MaxSeqLength = Annotated[int, typer.Option(min=1, help="train: tokens of the longest row.")]
GradCheckpoint = Annotated[
    bool, typer.Option("--grad-checkpoint", help="train: keep the layers' inputs alone.")
]
CheckpointEvery = Annotated[
    int, typer.Option(min=0, help="train: layers between saved inputs, with --grad-checkpoint.")
]
Accumulation = Annotated[
    int, typer.Option(min=1, help="train: batches whose gradients are summed.")
]
Optimizer = Annotated[str, typer.Option(help="train: adam, adamw-8bit, paged-adamw, sgd, ...")]
Loss = Annotated[
    Literal["naive", "fused", "sliced"], typer.Option(help="train: how the loss is computed.")
]
TrainAttention = Annotated[
    Literal["fused", "materialised"] | None,
    typer.Option("--attention", help="train: one kernel, or all pairs of tokens."),
]
MemKind = Annotated[
    Literal["allocated", "reserved", "device"] | None,
    typer.Option(
        help="train: what torch allocates, holds, or what the device shows. "
        "[default: device with PyTorch, allocated with MLX]"
    ),
]
Devices = Annotated[int, typer.Option("--devices", min=1, help="train: devices to spread over.")]
ZeroStage = Annotated[int, typer.Option(min=0, max=3, help="train: ZeRO stage; FSDP is 3.")]
OffloadOptimizer = Annotated[
    Literal["host", "disk"] | None, typer.Option(help="train: where optimizer states go.")
]


class TrainOptions(NamedTuple):
    """The options of ``uma estimate --train``, by their names."""

    train: Literal["lora", "dora", "full"]
    rank: int = DEFAULT_RANK
    targets: str | None = None
    num_layers: int | None = None
    max_seq_length: int = DEFAULT_MAX_SEQ_LENGTH
    grad_checkpoint: bool = False
    checkpoint_every: int = 1
    grad_accumulation_steps: int = 1
    optimizer: str = "adam"
    loss: Literal["naive", "fused", "sliced"] = "naive"
    attention: Literal["fused", "materialised"] | None = None
    mem_kind: Literal["allocated", "reserved", "device"] | None = None
    devices: int = 1
    zero_stage: int = 0
    offload_optimizer: Literal["host", "disk"] | None = None
    batch_size: int = DEFAULT_TRAINING_BATCH


def options_asked(context: typer.Context) -> TrainOptions | None:
    """The options of training; ``None`` without ``--train``.

    Raises:
        UsageError: If options of training stand there without it, or tracing with it.
    """
    params = context.params
    names = [name for name in TrainOptions._fields if name not in ("train", "batch_size")]
    if params["train"] is None:
        stray = [name for name in names if given(context, name)]
        if stray:
            raise UsageError(
                f"--{stray[0].replace('_', '-')} is an option of training: give --train too"
            )
        return None
    if params["exact"]:
        raise UsageError("--exact traces a generation, not training; leave one of the two out")
    batch = params["batch_size"] if given(context, "batch_size") else DEFAULT_TRAINING_BATCH
    values = {name: params[name] for name in names}
    return TrainOptions(train=params["train"], batch_size=batch, **values)


def training(
    chosen: RunOptions, asked: TrainOptions, engine: Engine | None, machine: "Machine"
) -> int:
    """Print the estimate; the exit code."""
    from uma.cli.plan import model_json
    from uma.plan.training import training_estimate
    from uma.report.training import training_json, training_text

    source, case = _case(chosen, asked, engine, machine)
    found = training_estimate(case)
    if chosen.json:
        print(json_module.dumps(training_json(found, model_json(source)), indent=2))
    else:
        print(training_text(found, source.name))
    return DoesNotFit.exit_code if found.ledger.verdict == "exceeds" else 0


def _case(
    chosen: RunOptions, asked: TrainOptions, engine: Engine | None, machine: "Machine"
) -> "tuple[ModelSource, TrainingCase]":
    from uma.machine import budget_of

    if engine not in (None, "mlx", "transformers"):
        raise UsageError(
            f"--train with --engine {engine}: it does not train; mlx and transformers do"
        )
    trains_mlx = engine == "mlx" or (engine is None and machine.kind != "discrete")
    if trains_mlx and machine.kind == "discrete":
        raise UsageError(f"--engine mlx does not run on {machine.name}; give --engine transformers")
    budget = budget_of(
        machine, user_budget_bytes=chosen.budget_bytes, reserve_bytes=chosen.reserve_bytes
    )
    make = _mlx_case if trains_mlx else _torch_case
    return make(chosen, asked, machine, budget)


def workload_of(
    asked: TrainOptions, *, num_layers: int | None, quantized: str, dtype: Any, kind: MemoryKind
) -> TrainingWorkload:
    """The workload that the options describe.

    Raises:
        UsageError: If they mean nothing together.
    """
    layers = num_layers if asked.num_layers is None else asked.num_layers
    return TrainingWorkload(
        method=asked.train,
        rank=asked.rank,
        targets=tuple(asked.targets.split(",")) if asked.targets else (),
        num_layers=None if layers == -1 else layers,
        batch_size=asked.batch_size,
        max_seq_length=asked.max_seq_length,
        grad_checkpoint=asked.checkpoint_every if asked.grad_checkpoint else 0,
        optimizer=asked.optimizer,
        dtype=dtype,
        quantized=quantized,
        grad_accumulation_steps=asked.grad_accumulation_steps,
        loss=asked.loss,
        attention=asked.attention,
        mem_kind=asked.mem_kind or kind,
        sharding=Sharding(
            data=asked.devices,
            zero_stage=asked.zero_stage,
            offload_optimizer=asked.offload_optimizer or "",
        ),
    )


def _mlx_case(
    chosen: RunOptions, asked: TrainOptions, machine: "Machine", budget: Any
) -> "tuple[ModelSource, TrainingCase]":
    from uma.cli.asked import mlx_asked
    from uma.memory.weights import weight_bytes
    from uma.plan.training import TrainingCase
    from uma.quantization import Quantization

    source, case = mlx_asked(chosen, machine)
    best = case.cases[0]
    layers = min(DEFAULT_NUM_LAYERS, len(best.architecture.layers))
    quantized = "" if best.form.quantization is None and case.bits >= 16 else f"{case.bits} bits"
    dtype = "float32" if best.form.activation_bytes == 4 else "bfloat16"
    workload = workload_of(
        asked, num_layers=layers, quantized=quantized, dtype=dtype, kind="allocated"
    )
    smaller = None if quantized else weight_bytes(best.architecture, Quantization(4, 64))
    return source, TrainingCase(
        best.architecture, machine, budget, "mlx", workload, best.form.weights, smaller
    )


def _torch_case(
    chosen: RunOptions, asked: TrainOptions, machine: "Machine", budget: Any
) -> "tuple[ModelSource, TrainingCase]":
    from uma.architecture import architecture_from_config
    from uma.cli.plan import described, located
    from uma.engines.schemes import scheme_named
    from uma.errors import UnsupportedModel
    from uma.plan.training import TrainingCase

    plain = chosen._replace(quant=None, bits=None)
    source = described(plain, located(plain))
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    named = chosen.quant or {4: "nf4", 8: "int8", None: "bf16", 16: "bf16"}.get(chosen.bits, "bf16")
    scheme = scheme_named(named)
    quantized = "" if scheme.bits >= 16 else scheme.name
    workload = workload_of(
        asked, num_layers=None, quantized=quantized, dtype="bfloat16", kind="device"
    )
    architecture = architecture_from_config(source.config)
    return source, TrainingCase(architecture, machine, budget, "torch", workload)
