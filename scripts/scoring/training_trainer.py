"""Rows of transformers' Trainer and of programs around it: PEFT, TRL, DeepSpeed, Unsloth."""

import re
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.memory.loss import TRANSFORMERS, TRANSFORMERS_45, TRANSFORMERS_46, Copies, sliced
from uma.plan.training.stack import Stack
from uma.workload import Sharding, TrainingWorkload

from .rows import INCOMPLETE, NOT_TOLD, Row, Skipped, number
from .training_models import Case
from .training_native import fsdp
from .training_recipes import shape_of
from .training_words import method_of, optimizer_of, quantized_of, targets_of


def fms(row: Row, architecture: Architecture) -> Case:
    """IBM's fms-acceleration benchmarks: scripts/benchmarks/scenarios.yaml, defaults.yaml."""
    plugins = re.search(r"\(([^()]*)\)$", row["framework"])
    name = plugins[1] if plugins else ""
    shape, method = shape_of(row), method_of(row)
    experts = re.search(r"moe-\S+-ep(\d+)", name)  # spread over so many devices, not by FSDP
    expert_devices = int(experts[1]) if experts else 0
    gpus = number(row["n_gpus"])
    quantized, sharded, full = quantized_of(row), gpus > 1, method == "full"
    half = "float16 w" in row["precision"] and "bf" not in row["precision"]
    workload = TrainingWorkload(
        method=method,
        loss="sliced" if "liger" in name else "fused" if "foak" in name else "naive",
        rank=number(row["rank"]) or 16,
        targets=() if full else targets_of(row),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1,
        optimizer="adamw",
        dtype="float16" if half else "bfloat16",
        quantized=quantized,
        grad_accumulation_steps=shape.accumulated,
        sharding=Sharding(data=gpus, zero_stage=3 if sharded else 0, fsdp=sharded),
    )
    autocast, foak = "autocast off" not in row["precision"], "foak" in name
    stack = Stack(
        "trainer-2024",
        precision="pure" if not autocast else "mixed" if sharded and full else "16-bit",
        prepare_kbit="baseline" in name and not sharded,
        lora_dropout=not full,
        fused_kernels="unsloth" if foak else None,
    )
    facts = {
        "adapter_width": 2 if sharded and not autocast else 4,
        "copies": _fms_loss(row, architecture, name),
        "fused_adapters": foak and bool(quantized),  # Unsloth has them for 16 bits too
        "repeats_kv": "istral" in row["model"] or "ixtral" in row["model"],
        "sorted_experts": bool(experts) or "granite" in row["model"],
        "expert_devices": expert_devices,
        "foreach": expert_devices < 2,  # not for the experts' DTensors
    }
    return Case(architecture, workload, stack, facts)


def _fms_loss(row: Row, architecture: Architecture, plugins: str) -> Copies:
    """The loss of the run: the version's, Unsloth's in place, or Liger's.

    GPT-BigCode's file upcasts under autocast alone, and its outputs are kept.
    """
    autocast, foak = "autocast off" not in row["precision"], "foak" in plugins
    old = "4.45" in row["framework_version"] or "4.43" in row["framework_version"]
    if "bigcode" in row["model"]:
        return Copies(
            shifts=True,
            keeps_outputs=True,
            width=4 if autocast else 2,
            converts_outputs=autocast,
            in_place=foak,
        )
    if "liger" in plugins:
        return sliced(architecture)
    return replace(TRANSFORMERS_45 if old else TRANSFORMERS_46, in_place=foak)


def fitcheck(row: Row, architecture: Architecture) -> Case:
    """fitcheck's scripts/measure.py: no autocast, the outputs kept through the backward pass."""
    shape = shape_of(row)
    quantized = quantized_of(row)
    workload = TrainingWorkload(
        rank=number(row["rank"]),
        targets=targets_of(row),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1,
        optimizer="adamw",
        dtype="float16",
        quantized=quantized,
    )
    facts = {
        "foreach": True,
        "reentrant": True,
        "kernel": "eager" if row["attn_impl"] == "eager" else "efficient",
        "copies": replace(TRANSFORMERS, keeps_outputs=True),
    }
    stack = Stack("trainer", precision="pure", prepare_kbit=bool(quantized))
    return Case(architecture, workload, stack, facts)


def fsdp_qlora(row: Row, architecture: Architecture) -> Case:
    """Answer.AI's train.py: LoRA of rank 64 on all but the output projection, in 16 bits."""
    shape = shape_of(row)
    full_copy = "DDP" in row["parallelism"]
    offload = "CPU params" in row["offload"]
    workload = TrainingWorkload(
        rank=64,
        targets=("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1,
        optimizer="adamw",
        quantized=quantized_of(row),
        sharding=Sharding(
            data=number(row["n_gpus"]),
            zero_stage=0 if full_copy else 3,
            offload_parameters="host" if offload else "",
            offload_optimizer="host" if offload else "",
            fsdp=not full_copy,
        ),
    )
    facts = {"adapter_width": 2, "copies": TRANSFORMERS_45}
    stack = Stack("trainer-2024", precision="pure", lora_dropout=True)
    return Case(architecture, workload, stack, facts)


def axolotl(row: Row, architecture: Architecture) -> Case:
    shape = shape_of(row)
    if "kernels" not in row["lora_targets"]:
        raise Skipped(INCOMPLETE)
    workload = TrainingWorkload(
        rank=number(row["rank"]),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1,
        optimizer="adamw",
    )
    facts = {"foreach": True, "copies": sliced(architecture)}
    return Case(architecture, workload, Stack("trainer", fused_kernels="unsloth"), facts)


def peft(row: Row, architecture: Architecture) -> Case:
    """PEFT's method_comparison/MetaMathQA: weights in bfloat16, adapters in float32."""
    shape, method = shape_of(row), method_of(row)
    workload = TrainingWorkload(
        method=method,
        rank=number(row["rank"]) or 32,
        targets=() if method == "full" else targets_of(row),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        optimizer="adamw",
        mem_kind="reserved",
    )
    facts = {
        "kernel": "efficient",
        "empties_cache": True,
        "copies": replace(TRANSFORMERS, keeps_outputs=True),
    }
    return Case(architecture, workload, Stack("trainer-2024", precision="pure"), facts)


def trainer(row: Row, architecture: Architecture) -> Case:
    """Trainer with autocast, as most recipes run it: Qwen's finetune.py, swift, LLaMA-Factory.

    ms-swift and LLaMA-Factory (``model/model_utils/checkpointing.py``) prepare quantized models
    themselves and leave them in 16 bits.
    """
    shape, method = shape_of(row), method_of(row)
    full = method == "full"
    spread, deepspeed = _spread(row)
    workload = TrainingWorkload(
        method=method,
        rank=number(row["rank"]) or 8,
        targets=() if full else _trainer_targets(row),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=int(_is_checkpointed(row)),
        optimizer=optimizer_of(row),
        quantized=quantized_of(row),
        sharding=spread,
    )
    unsloth = "nsloth" in row["framework"]
    prepares = not (unsloth or re.search(r"swift|factory", row["framework"], re.IGNORECASE))
    stack = Stack(
        "unsloth" if unsloth else "trainer-2024",
        prepare_kbit=prepares and bool(workload.quantized),
        lora_dropout=not full and not unsloth,  # whose kernels for adapters know none
    )
    facts = {
        "copies": _trainer_loss(row, architecture, deepspeed),
        "kernel": "flash" if "flash" in row["attn_impl"] else "efficient",
        "deepspeed": deepspeed,
        "modules_to_save": "modules_to_save" in row["lora_targets"],
        "autocast": not deepspeed,
    }
    return Case(architecture, workload, stack, facts)


def _is_checkpointed(row: Row) -> bool:
    """As told, or by default: Trainer does not, what prepares a quantized model does.

    ms-swift, LLaMA-Factory and Unsloth do too (``gradient_checkpointing``,
    ``disable_gradient_checkpointing``, ``use_gradient_checkpointing``).
    """
    told = row["grad_ckpt"].lower()
    if told not in NOT_TOLD:
        return told != "false"
    default = r"swift|factory|unsloth|qwen|longlora"
    return bool(quantized_of(row) or re.search(default, row["framework"], re.IGNORECASE))


def _spread(row: Row) -> tuple[Sharding, bool]:
    """The devices of a Trainer's run, and whether DeepSpeed runs it."""
    text = row["parallelism"]
    gpus = number(row["n_gpus"]) or 1
    split = r"model parallel|sequence|ddp_device_map" + "|device_map" * (gpus > 1)
    if re.search(split, f"{text} {row['source']}"):
        raise Skipped(INCOMPLETE)
    stage = number(row["zero_stage"]) or (3 if re.search(r"zero-?3", text, re.I) else 0)
    spread = Sharding(data=gpus, zero_stage=stage) if gpus > 1 else Sharding()
    if "FSDP" in text.upper():
        spread = fsdp(row)
    elif row["offload"]:
        spread = replace(
            spread,
            offload_optimizer="host",
            offload_parameters="host" if "param" in row["offload"] else "",
        )
    return spread, bool(stage) or "deepspeed (" in text


def _trainer_loss(row: Row, architecture: Architecture, deepspeed: bool) -> Copies:
    """The loss of the row's own code.

    Unsloth's of 2024 (``models/llama.py``, ``fast_cross_entropy_loss``) writes over the 16-bit
    logits, and accelerate (``utils/operations.py``, ``ConvertOutputsToFp32``) widens them. The
    first Qwen's file does not upcast, which only autocast then does, not DeepSpeed.
    """
    if "liger" in row["loss_impl"]:
        return sliced(architecture)
    if "nsloth" in row["framework"]:
        return Copies(in_place=True, width=2, converts_outputs=True)
    if architecture.module == "qwen" and deepspeed:
        return Copies(shifts=True, width=2)
    return TRANSFORMERS_45


def _trainer_targets(row: Row) -> tuple[str, ...]:
    if row["lora_targets"].startswith("DEFAULT"):
        return ("q_proj", "k_proj", "v_proj", "c_attn", "qkv_proj")
    return targets_of(row) if row["lora_targets"] else ("q_proj", "v_proj")
