"""Rows of programs with their own modules: litgpt, torchtune, torchtitan, mlx-lm."""

import re
from dataclasses import replace

from uma.architecture.layers import Architecture, Parameter
from uma.memory.loss import TRANSFORMERS_45, Copies
from uma.memory.weights import weight_bytes
from uma.plan.training.stack import Stack
from uma.quantization import Quantization
from uma.workload import (
    DEFAULT_NUM_LAYERS,
    DEFAULT_RANK,
    Precision,
    Sharding,
    TrainingWorkload,
    bits_word,
)

from .rows import INCOMPLETE, Row, Skipped, number
from .training_models import Case
from .training_recipes import shape_of
from .training_words import LITGPT_NAMES, method_of, optimizer_of, quantized_of, targets_of


def fsdp(row: Row) -> Sharding:
    """FSDP's full shard over all devices, offloaded where the row says so."""
    devices = number(row["n_gpus"]) or 1
    if devices == 1:
        return Sharding()
    host = "host" if "CPU" in row["offload"] else ""
    return Sharding(
        data=devices,
        zero_stage=3,
        offload_parameters=host,  # type: ignore[arg-type]
        offload_optimizer=host,  # type: ignore[arg-type]
        fsdp=True,
    )


def litgpt(row: Row, architecture: Architecture) -> Case:
    """litgpt: everything in 16 bits, its own modules, no autocast."""
    shape = shape_of(row)
    method = method_of(row)
    full = method == "full"
    gpus = number(row["n_gpus"]) or 1
    sharded = gpus > 1 and "DDP" not in row["parallelism"]
    workload = TrainingWorkload(
        method=method,
        rank=number(row["rank"]) or 8,
        targets=() if full else targets_of(row) or LITGPT_NAMES["query"] + LITGPT_NAMES["value"],
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1 if row["grad_ckpt"].startswith("True") else 0,
        optimizer=optimizer_of(row),
        quantized=quantized_of(row),
        sharding=Sharding(data=gpus, zero_stage=3 if sharded else 0, fsdp=sharded),
        grad_accumulation_steps=shape.accumulated,
    )
    precision: Precision = "mixed" if "mixed" in row["precision"] else "16-bit"
    facts = {
        "whole_at_load": "8641822" in row["framework"],  # finetune/lora.py: empty_init=False
        "keeps_quantized_inputs": True,  # it asked for bitsandbytes 0.41 and 0.42
        # Until it was renamed in 2024 the longest batch came first: its graph is the last one.
        "holds_last_graph": row["framework"].startswith("litgpt"),
    }
    stack = Stack("litgpt", precision=precision, lora_dropout=not full)
    return Case(_untied(architecture), workload, stack, facts)


def _untied(architecture: Architecture) -> Architecture:
    """litgpt's fine-tuning never ties the head to the embeddings (``validate_args``)."""
    if not architecture.tie_word_embeddings:
        return architecture
    shape = (architecture.vocab_size, architecture.hidden_size)
    head = Parameter("lm_head", shape, "matrix")
    parameters = (*architecture.parameters, head)
    return replace(architecture, tie_word_embeddings=False, parameters=parameters)


def torchtune(row: Row, architecture: Architecture) -> Case:
    """torchtune's recipes of 2024 (recipes/configs/llama2).

    Full training of one card pages AdamW and updates going backward (7B_full_low_memory.yaml);
    LoRA of 7B over several is not checkpointed (7B_lora.yaml), but in the table of May, whose
    lengths are told. torchao was 0.1 from April to June (pyproject.toml).
    """
    shape, method = shape_of(row), method_of(row)
    full, optimizer, alone = method == "full", row["optimizer"], number(row["n_gpus"]) <= 1
    low_memory = full and alone and optimizer == "recipe default"
    small = not full and not alone and len(architecture.layers) <= 32
    kept = small and "recipe default" in row["grad_ckpt"] and not row["seq_len"]
    workload = TrainingWorkload(
        method=method,
        rank=number(row["rank"]) or 8,
        targets=() if full else targets_of(row) or ("q_proj", "v_proj"),
        num_layers=None,
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=0 if kept else 1,
        optimizer="paged-adamw" if low_memory else optimizer_of(row),
        quantized=quantized_of(row),
        sharding=fsdp(row),
    )
    facts = {
        "offloads_inputs": "activations" in row["offload"],
        "foreach": not re.search("fused|foreach=False", optimizer),
        "copies": _torchtune_loss(row),
        "fused_kernels": row["compile"] == "True",
        "splits_root": "custom_sharded_layers" in row["notes"],
        "quantizes_whole": bool(re.search(r"\((Apr|May-Sep) 2024|qlora_finetune", row["source"])),
    }
    stack = Stack("torchtune", optimizer_in_backward=low_memory or "in_bwd" in optimizer)
    return Case(architecture, workload, stack, facts)


def _torchtune_loss(row: Row) -> Copies:
    """In chunks since 0.4; before, one of float32 logits that are shifted (recipes, train)."""
    chunks = 8 if "chunked" in row["loss_impl"] else 1
    if row["compile"] == "True":
        return Copies(compiled=True, chunks=chunks)
    return Copies(chunks=chunks) if chunks > 1 else TRANSFORMERS_45


def torchtitan(row: Row, architecture: Architecture) -> Case:
    """Pre-training with AdamW and float32 shards (FSDP 2), computed in bfloat16."""
    shape = shape_of(row)
    text = row["parallelism"]
    tensor, pipeline, context = (_degree(text, name) for name in ("TP", "PP", "CP"))
    data = max(1, number(row["n_gpus"]) // (tensor * pipeline))
    checkpointed = row["grad_ckpt"] == "full"
    workload = TrainingWorkload(
        method="full",
        num_layers=None,
        batch_size=shape.batch if pipeline == 1 else 1,
        max_seq_length=shape.length // context,
        grad_checkpoint=1,
        optimizer="adamw",
        sharding=Sharding(data=data, tensor=tensor, pipeline=pipeline, zero_stage=3, fsdp=True),
    )
    facts = {
        "autocast": False,
        "selective": not checkpointed,
        "fused_kernels": row["compile"] == "True",
    }
    return Case(architecture, workload, Stack("trainer", precision="mixed"), facts)


def _degree(text: str, name: str) -> int:
    found = re.search(rf"{name} ?(\d+)", text)
    return int(found[1]) if found else 1


def _layers(row: Row) -> int:
    """How many layers are trained; 0 where the row does not tell."""
    told = re.match(r"last (\d+) layers", row["lora_layers"])
    return number(told[1] if told else row["lora_layers"])


def mlx(row: Row, architecture: Architecture) -> Case:
    """``mlx_lm.lora`` with its defaults where the row does not say otherwise."""
    shape, method = shape_of(row), method_of(row)
    quantized = row["method"].startswith("q")
    count = len(architecture.layers)
    layers = count if row["lora_layers"] == "all" else _layers(row) or DEFAULT_NUM_LAYERS
    bits = re.search(r"([2-8])-?bit", row["quant"] + row["model"])
    if quantized and bits is None:
        raise Skipped(INCOMPLETE)
    workload = TrainingWorkload(
        method=method,
        rank=number(row["rank"]) or DEFAULT_RANK,
        num_layers=min(layers, count),
        batch_size=shape.batch,
        max_seq_length=shape.length,
        grad_checkpoint=1 if row["grad_ckpt"] == "True" else 0,
        quantized=bits_word(int(bits[1])) if bits and quantized else "",
    )
    form = Quantization(int(bits[1]), 64) if workload.quantized and bits else None
    return Case(architecture, workload, weights=weight_bytes(architecture, form))
