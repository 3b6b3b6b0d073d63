"""``uma estimate --train``: the memory of LoRA, DoRA and full fine-tuning."""

import json as json_module
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uma.cli.options import RunOptions
from uma.cli.training_options import TrainOptions, sharding_of, target_names
from uma.errors import CheckpointError, DataError, DoesNotFit, UnsupportedModel, UsageError
from uma.workload import DEFAULT_NUM_LAYERS, Engine, MemoryKind, TrainingWorkload, bits_word

if TYPE_CHECKING:
    from pathlib import Path

    from uma.architecture.layers import Architecture
    from uma.checkpoint.source import ModelSource
    from uma.dataset.lengths import Lengths
    from uma.engines.schemes import Scheme
    from uma.machine import Machine
    from uma.memory.term import MemoryTerm
    from uma.plan.forms import Form
    from uma.plan.training.case import TrainingCase
    from uma.plan.training.stack import Stack

CUDA_FORMATS = ("int8", "nf4", "nf4-double", "gptq", "awq")
NOT_QLORA = "--train qlora is LoRA on a quantized base, and 16 bits are none: give --train lora"


def training(
    chosen: RunOptions,
    asked: TrainOptions,
    engine: Engine | None,
    machine: "Machine",
    *,
    exact: bool = False,
) -> int:
    """Print the estimate; the exit code. With ``exact`` the step is traced beside it."""
    from uma.cli.plan import model_json
    from uma.plan.training.estimate import training_estimate
    from uma.report.training import training_json, training_text

    source, case = _case(chosen, asked, engine, machine, exact)
    data = None
    if asked.data is not None:
        from uma.plan.training.data import with_worst_batch

        case, data = with_worst_batch(
            case, _lengths(asked, source, chosen.json), packed=asked.packing
        )
    found = training_estimate(case, data)
    traced = _traced(chosen, asked, case) if exact else None
    largest = None
    if asked.largest_model:
        from uma.plan.training.models import largest_model

        largest = largest_model(case)
    if chosen.json:
        print(
            json_module.dumps(training_json(found, model_json(source), largest, traced), indent=2)
        )
    else:
        print(training_text(found, source.name, largest, traced))
    return DoesNotFit.exit_code if found.ledger.verdict == "exceeds" else 0


def _traced(
    chosen: RunOptions, asked: TrainOptions, case: "TrainingCase"
) -> "tuple[MemoryTerm, ...]":
    """The terms of the step from mlx-lm's own code, without weights.

    Raises:
        RuntimeUnavailable: If MLX is not installed.
        UnsupportedModel: If the step cannot be traced.
    """
    from uma.cli.asked import require_mlx
    from uma.quantization import quantization_of_config

    require_mlx()
    from uma.runtime.trace_training import trace_training

    source, _, forms = _mlx_forms(chosen, asked, case.machine)
    form, config = _held(forms, asked, case.budget_bytes), source.config or {}
    held = None if form.kind == "float32" else form.quantization or quantization_of_config(config)
    return trace_training(config, held, case.workload, case.machine.backend, trainer=case.trainer)


def _lengths(asked: TrainOptions, source: "ModelSource", quiet: bool) -> "Lengths":
    """The lengths of the rows of ``--data``.

    Raises:
        CheckpointError: If no tokenizer is on this disk.
        DataError: If there is no such data.
    """
    from functools import partial

    from uma.cli.progress import progress
    from uma.dataset.lengths import lengths_of
    from uma.runtime.file_encoder import FileEncoder

    assert asked.data is not None
    if not asked.data.exists():
        raise DataError(f"{asked.data} is no file and no folder; give JSON lines")
    folder = asked.tokenizer or source.path
    if folder is not None and folder.is_file() and folder.name == "tokenizer.json":
        folder = folder.parent
    if folder is None or not folder.is_dir():
        where = (
            f"no file of {source.name} is on this disk" if folder is None else _no_folder(folder)
        )
        raise CheckpointError(
            f"--data counts tokens with the model's tokenizer, and {where}: give a model's folder, "
            "or --tokenizer with one that has tokenizer.json"
        )
    with progress("counting tokens", quiet=quiet) as show:
        return lengths_of(asked.data, partial(FileEncoder(folder).lengths, progress=show))


def _no_folder(path: "Path") -> str:
    if path.is_file():
        return f"{path} is a file of weights, beside which none is read"
    return f"{path} is no folder"


def _case(
    chosen: RunOptions,
    asked: TrainOptions,
    engine: Engine | None,
    machine: "Machine",
    exact: bool,
) -> "tuple[ModelSource, TrainingCase]":
    from uma.machine import budget_of

    if engine not in (None, "mlx", "transformers"):
        raise UsageError(
            f"--train with --engine {engine}: it does not train; mlx and transformers do"
        )
    at_home = machine.backend == "metal" or machine.kind == "host"
    if exact and not at_home:
        raise UsageError(
            f"--exact traces mlx-lm's own code, which is not estimated on {machine.name}: leave it "
            "out"
        )
    trains_mlx = engine == "mlx" or (engine is None and at_home)
    if not trains_mlx and at_home:
        raise UsageError(
            f"--engine {engine} is estimated on CUDA's cards and chips, and {machine.name} has "
            "none; give --engine mlx, or --machine with one such as rtx-4090 or dgx-spark"
        )
    if trains_mlx and not at_home:
        raise UsageError(
            f"training under MLX is known on Macs and on this machine's processor, not on "
            f"{machine.name}; give --engine transformers"
        )
    if exact and not trains_mlx:
        raise UsageError("--exact traces mlx-lm's own code: give --engine mlx, or leave it out")
    budget = budget_of(
        machine, user_budget_bytes=chosen.budget_bytes, reserve_bytes=chosen.reserve_bytes
    )
    make = _mlx_case if trains_mlx else _torch_case
    return make(chosen, asked, machine, budget)


def workload_of(
    asked: TrainOptions,
    machine: "Machine",
    *,
    num_layers: int | None,
    quantized: str,
    dtype: Any,
    kind: MemoryKind,
) -> TrainingWorkload:
    """The workload that the options describe.

    Raises:
        UsageError: If they mean nothing together.
    """
    layers = num_layers if asked.num_layers is None else asked.num_layers
    return TrainingWorkload(
        method="lora" if asked.train == "qlora" or asked.train == "rslora" else asked.train,
        rank=asked.rank,
        targets=target_names(asked.targets),
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
        sharding=sharding_of(asked, max(1, len(machine.devices))),
    )


def _mlx_forms(
    chosen: RunOptions, asked: TrainOptions, machine: "Machine"
) -> "tuple[ModelSource, Architecture, tuple[Form, ...]]":
    """The model in the forms that are trained: in 16 bits where a name is trained in full."""
    from uma.architecture import architecture_from_config
    from uma.cli.asked import source_asked
    from uma.cli.plan import located
    from uma.plan.forms import bits_of, forms_of

    plain = (chosen.bits, chosen.mode, chosen.quant) == (None, None, None)
    if asked.train == "full" and plain and located(chosen).path is None:
        chosen = replace(chosen, bits=16)  # the usual 4 bits have no gradients
    source, wanted = source_asked(chosen)
    architecture = architecture_from_config(_config_of(source))
    forms = forms_of(source, architecture, backend=machine.backend, **wanted)
    if asked.train != "qlora" or bits_of(forms[-1], source) < 16:
        return source, architecture, forms
    if not plain:
        raise UsageError(NOT_QLORA)
    return _mlx_forms(replace(chosen, bits=4), asked, machine)


def _config_of(source: "ModelSource") -> dict[str, Any]:
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    return source.config


def _mlx_case(
    chosen: RunOptions, asked: TrainOptions, machine: "Machine", budget: Any
) -> "tuple[ModelSource, TrainingCase]":
    from uma.plan.forms import bits_of
    from uma.plan.training.case import TrainingCase
    from uma.plan.training.checks import check_mlx_sharding

    if asked.precision != "16-bit":
        raise UsageError(
            f"--precision {asked.precision} is torch's autocast; MLX trains in the model's type"
        )
    if asked.stack != "trainer":
        raise UsageError(f"--stack {asked.stack} is of torch: give --engine transformers")
    for name in ("prepare_kbit", "lora_dropout", "optimizer_in_backward", "fused_kernels"):
        if getattr(asked, name):
            raise UsageError(f"--{name.replace('_', '-')} is of torch: give --engine transformers")
    check_mlx_sharding(sharding_of(asked, 1))
    if chosen.quant in CUDA_FORMATS:
        raise UsageError(
            f"--quant {chosen.quant} is a format of CUDA's libraries; MLX has its own: --bits 4 or "
            "8, or --quant mxfp4"
        )
    source, architecture, forms = _mlx_forms(chosen, asked, machine)
    form = _held(forms, asked, budget.budget_bytes)
    layers = min(DEFAULT_NUM_LAYERS, len(architecture.layers))
    quantized = bits_word(bits_of(forms[-1], source))
    dtype = "float32" if form.activation_bytes == 4 else "bfloat16"
    workload = workload_of(
        asked, machine, num_layers=layers, quantized=quantized, dtype=dtype, kind="allocated"
    )
    case = TrainingCase(
        architecture, machine, budget, "mlx", workload, form.weights, trainer=asked.trainer
    )
    return source, case


def _held(forms: "tuple[Form, ...]", asked: TrainOptions, budget_bytes: int) -> "Form":
    """The weights as the trainer holds them: mlx_lm.lora as they are stored.

    On a CPU uma lora train makes float32 of them where that fits (``--dequantize auto``).
    """
    forms = forms if asked.trainer == "uma" else forms[-1:]
    fitting = (form for form in forms if form.weights.size_bytes <= budget_bytes)
    return next(fitting, forms[-1])


def _torch_case(
    chosen: RunOptions, asked: TrainOptions, machine: "Machine", budget: Any
) -> "tuple[ModelSource, TrainingCase]":
    from uma.architecture import architecture_from_config
    from uma.cli.plan import described, located
    from uma.plan.training.case import TrainingCase

    if asked.trainer == "uma":
        raise UsageError("--trainer uma is uma lora train, which runs on MLX: give --engine mlx")
    plain = replace(chosen, quant=None, bits=None)
    source = described(plain, located(plain))
    config = _config_of(source)
    scheme = _torch_format(chosen, asked)
    quantized = "" if scheme.bits == 16 else scheme.name
    dtype = "float16" if scheme.name == "fp16" else "bfloat16"
    workload = workload_of(
        asked, machine, num_layers=None, quantized=quantized, dtype=dtype, kind="device"
    )
    architecture = architecture_from_config(config)
    case = TrainingCase(architecture, machine, budget, "torch", workload, stack=_stack(asked))
    return source, case


def _torch_format(chosen: RunOptions, asked: TrainOptions) -> "Scheme":
    """The format of the base.

    Raises:
        UsageError: If options of it contradict each other, or torch does not train on it.
    """
    from uma.engines.schemes import scheme_named

    if chosen.bits is not None and chosen.quant is not None:
        raise UsageError("--bits and --quant both say the format of the weights: give one of them")
    for name in ("mode", "group_size"):
        if (value := getattr(chosen, name)) is not None:
            word = name.replace("_", "-")
            raise UsageError(f"--{word} {value} is of MLX's formats; torch has --quant or --bits")
    # unsloth, models/llama.py, from_pretrained: bnb_4bit_use_double_quant
    own = "nf4-double" if asked.stack == "unsloth" else "nf4"
    usual = own if asked.train == "qlora" else "bf16"
    named = chosen.quant or {4: "nf4", 8: "int8", None: usual, 16: "bf16"}.get(chosen.bits)
    if named is None:
        raise UsageError(
            f"--bits {chosen.bits}: torch trains on 4 (nf4), 8 (int8) or 16 bits; other formats "
            "with --quant"
        )
    scheme = scheme_named(named)
    if scheme.bits > 16:
        raise UsageError(
            f"--quant {named}: leave it out; float32 weights are trained with --precision mixed, "
            "whose products are in 16 bits"
        )
    if asked.train == "qlora" and scheme.bits == 16:
        raise UsageError(NOT_QLORA)
    return scheme


def _stack(asked: TrainOptions) -> "Stack":
    from uma.plan.training.stack import Stack

    return Stack(
        name=asked.stack,
        precision=asked.precision,
        prepare_kbit=asked.prepare_kbit,
        lora_dropout=asked.lora_dropout,
        optimizer_in_backward=asked.optimizer_in_backward,
        fused_kernels=asked.fused_kernels,
        variable_lengths=asked.data is not None and not asked.packing,
    )
