"""What rows of measured training memory ask, by the program that ran."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.engines.torch_model import Settings
from uma.memory.loss import TRANSFORMERS, TRANSFORMERS_45, TRANSFORMERS_46, Copies
from uma.memory.term import MemoryTerm
from uma.memory.weights import weight_bytes
from uma.quantization import Quantization
from uma.workload import DEFAULT_NUM_LAYERS, DEFAULT_RANK, Sharding, TrainingWorkload

from .rows import FORMAT, INCOMPLETE, MODEL, NOT_TOLD, Row, Skipped, known_model, number
from .training_models import SHAPES

# Notes with which the collectors took a number back, and tasks with more than one model.
DOUBTS = re.compile(r"equals a card size|treat as suspect|does not explain")
# Lengths that are only caps on data whose lengths the row does not tell.
CAPS = re.compile(r"^max_length$|^max$|^max \(variable\)|^max; peak|README states|^approx|^about")
OTHER_TASKS = re.compile(r"\b(ppo|dpo|orpo|grpo|rlhf)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Case:
    """What a row asks; ``weights`` are those of MLX, whose engine it is then."""

    architecture: Architecture
    workload: TrainingWorkload
    settings: Settings
    weights: MemoryTerm | None = None


@cache
def architecture_named(name: str) -> Architecture:
    """The layers of a model by its name in the rows."""
    if name not in SHAPES:
        return known_model(name)[1]
    published, config = SHAPES[name]
    architecture = architecture_from_config(config)
    if abs(architecture.num_parameters / published - 1) > 0.02:
        raise Skipped(MODEL)
    return architecture


def _shape(row: Row) -> tuple[int, int]:
    batch, length = number(row["micro_batch"]), number(row["seq_len"])
    if not batch or not length or CAPS.search(row["seq_len_kind"]):
        raise Skipped(INCOMPLETE)
    return batch, length


# litgpt's names of the parts of a layer.
LITGPT_NAMES = {
    "query": ("q_proj", "qkv_proj", "query_key_value"),
    "key": ("k_proj", "qkv_proj", "query_key_value"),
    "value": ("v_proj", "qkv_proj", "query_key_value"),
    "projection": ("o_proj", "dense"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "dense_h_to_4h"),
}


def _targets(row: Row) -> tuple[str, ...]:
    text = row["lora_targets"].split(";")[0]
    if text.strip().lower() in NOT_TOLD or re.search(r"\ball\b", text, re.IGNORECASE):
        return ()
    names = re.findall(r"[a-z_]+[a-z0-9_]*", text)
    return tuple(found for name in names for found in LITGPT_NAMES.get(name, (name,)))


def _quantized(row: Row) -> str:
    text = row["quant"].lower()
    if not text:
        return ""
    if "gptq" in text:
        return "gptq-int8" if "int8" in text else "gptq"
    if "awq" in text:
        return "awq"
    if "double" in text and "double_quant=false" not in text and "off" not in text:
        return "nf4-double"
    if re.search(r"nf4-dq", text):
        return "nf4-double"
    if re.search(r"nf4|4-bit|4bit|int4", text):
        return "nf4"
    if re.search(r"int8|8-bit|8bit", text):
        return "int8"
    raise Skipped(INCOMPLETE)


def _liger(architecture: Architecture) -> Copies:
    """Liger's fused linear cross-entropy: as many slices as the vocabulary is wider than the input
    (``ops/fused_linear_cross_entropy.py``, ``inc_factor``)."""
    return Copies(slices=-(-architecture.vocab_size // architecture.hidden_size))


def _fms(row: Row, architecture: Architecture) -> Case:
    """IBM's fms-acceleration benchmarks: scripts/benchmarks/scenarios.yaml, defaults.yaml."""
    plugins = re.search(r"\(([^()]*)\)$", row["framework"])
    name = plugins[1] if plugins else ""
    if "variable" in row["seq_len_kind"]:
        raise Skipped(INCOMPLETE)
    batch, length = _shape(row)
    gpus = number(row["n_gpus"])
    quantized, sharded, full = _quantized(row), gpus > 1, row["method"] == "full"
    half = "float16 w" in row["precision"] and "bf" not in row["precision"]
    workload = TrainingWorkload(
        method="full" if full else "lora",
        rank=number(row["rank"]) or 16,
        targets=() if full else _targets(row),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1,
        optimizer="adamw",
        dtype="float16" if half else "bfloat16",
        quantized=quantized,
        grad_accumulation_steps=number(row["grad_accum"]) or 1,
        sharding=Sharding(data=gpus, zero_stage=3 if sharded else 0),
    )
    autocast, foak = "autocast off" not in row["precision"], "foak" in name
    settings = Settings(
        autocast=autocast,
        prepare_kbit="baseline" in name and not sharded,
        casts_head_back=True,
        weight_width=4 if sharded and autocast and full else 0,
        adapter_width=2 if sharded and not autocast else 4,
        fused_kernels=foak,
        fused_adapters=foak and bool(quantized),
        dropout=not full,
        copies=_fms_loss(row, architecture, name),
        repeats_kv="istral" in row["model"] or "ixtral" in row["model"],
    )
    return Case(architecture, workload, settings)


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
        return _liger(architecture)
    return replace(TRANSFORMERS_45 if old else TRANSFORMERS_46, in_place=foak)


def _fitcheck(row: Row, architecture: Architecture) -> Case:
    """fitcheck's scripts/measure.py: no autocast, the outputs kept through the backward pass."""
    batch, length = _shape(row)
    quantized = _quantized(row)
    workload = TrainingWorkload(
        rank=number(row["rank"]),
        targets=_targets(row),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1,
        optimizer="adamw",
        dtype="float16",
        quantized=quantized,
    )
    settings = Settings(
        autocast=False,
        kernel="eager" if row["attn_impl"] == "eager" else "efficient",
        copies=replace(TRANSFORMERS, keeps_outputs=True),
        quantizes_experts=False,
    )
    return Case(architecture, workload, settings)


def _fsdp_qlora(row: Row, architecture: Architecture) -> Case:
    """Answer.AI's train.py: LoRA of rank 64 on all but the output projection, in 16 bits."""
    batch, length = _shape(row)
    full_copy = "DDP" in row["parallelism"]
    offload = "CPU params" in row["offload"]
    workload = TrainingWorkload(
        rank=64,
        targets=("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1,
        optimizer="adamw",
        quantized=_quantized(row),
        sharding=Sharding(
            data=number(row["n_gpus"]),
            zero_stage=0 if full_copy else 3,
            offload_parameters="host" if offload else "",
            offload_optimizer="host" if offload else "",
        ),
    )
    settings = Settings(
        autocast=False,
        prepare_kbit=False,
        adapter_width=2,
        dropout=True,
        copies=TRANSFORMERS_45,
    )
    return Case(architecture, workload, settings)


def _axolotl(row: Row, architecture: Architecture) -> Case:
    batch, length = _shape(row)
    if "kernels" not in row["lora_targets"]:
        raise Skipped(INCOMPLETE)
    workload = TrainingWorkload(
        rank=number(row["rank"]),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1,
        optimizer="adamw",
    )
    settings = Settings(
        fused_kernels=True, fused_adapters=True, reentrant=False, copies=_liger(architecture)
    )
    return Case(architecture, workload, settings)


def _litgpt(row: Row, architecture: Architecture) -> Case:
    """litgpt: everything in 16 bits, its own modules, no autocast."""
    batch, length = _shape(row)
    full = row["method"].startswith("full")
    if not full and row["method"] not in ("lora", "qlora"):
        raise Skipped(FORMAT)
    gpus = number(row["n_gpus"]) or 1
    sharded = gpus > 1
    workload = TrainingWorkload(
        method="full" if full else "lora",
        rank=number(row["rank"]) or 8,
        targets=() if full else _targets(row) or LITGPT_NAMES["query"] + LITGPT_NAMES["value"],
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1 if row["grad_ckpt"].startswith("True") else 0,
        optimizer="paged-adamw" if "Paged" in row["optimizer"] else "adamw",
        quantized=_quantized(row),
        sharding=Sharding(data=gpus, zero_stage=3 if sharded else 0),
    )
    mixed = "mixed" in row["precision"]
    settings = Settings(
        autocast=mixed,
        weight_width=4 if mixed else 0,
        prepare_kbit=False,
        adapter_width=4 if mixed else 2,
        dropout=True,
        reentrant=False,
        inputs_need_gradients=False,
        copies=Copies(chunks=8),
        fsdp_hooks=False,
        whole_at_load="8641822" in row["framework"],  # finetune/lora.py: empty_init=False
    )
    return Case(architecture, workload, settings)


def _peft(row: Row, architecture: Architecture) -> Case:
    """PEFT's method_comparison/MetaMathQA: weights in bfloat16, adapters in float32."""
    method = row["method"]
    if method not in ("lora", "dora", "full"):
        raise Skipped(FORMAT)
    batch, length = _shape(row)
    workload = TrainingWorkload(
        method=method,  # type: ignore[arg-type]
        rank=number(row["rank"]) or 32,
        targets=() if method == "full" else _targets(row),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        optimizer="adamw",
        mem_kind="reserved",
    )
    settings = Settings(
        autocast=False,
        kernel="efficient",
        empties_cache=True,
        inputs_need_gradients=False,
        copies=replace(TRANSFORMERS, keeps_outputs=True),
    )
    return Case(architecture, workload, settings)


def _fsdp(row: Row) -> Sharding:
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
    )


def _torchtune(row: Row, architecture: Architecture) -> Case:
    batch, length = _shape(row)
    full = row["method"].startswith("full")
    optimizer = row["optimizer"]
    workload = TrainingWorkload(
        method="full" if full else "lora",
        rank=number(row["rank"]) or 8,
        targets=() if full else _targets(row) or ("q_proj", "v_proj"),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1,
        optimizer="paged-adamw-8bit" if "8bit" in optimizer else "adamw",
        quantized=_quantized(row),
        sharding=_fsdp(row),
    )
    settings = Settings(
        autocast=False,
        prepare_kbit=False,
        adapter_width=2,
        offloads_inputs="activations" in row["offload"],
        foreach="fused" not in optimizer,
        optimizer_in_backward="in_bwd" in optimizer,
        reentrant=False,
        inputs_need_gradients=False,
        copies=Copies(compiled=True) if row["compile"] == "True" else Copies(chunks=8),
        fsdp_hooks=False,
        fused_kernels=row["compile"] == "True",
    )
    return Case(architecture, workload, settings)


def _torchtitan(row: Row, architecture: Architecture) -> Case:
    """Pre-training with AdamW and float32 shards (FSDP 2), computed in bfloat16."""
    batch, length = _shape(row)
    text = row["parallelism"]
    tensor, pipeline, context = (_degree(text, name) for name in ("TP", "PP", "CP"))
    data = max(1, number(row["n_gpus"]) // (tensor * pipeline))
    checkpointed = row["grad_ckpt"] == "full"
    workload = TrainingWorkload(
        method="full",
        num_layers=None,
        batch_size=batch if pipeline == 1 else 1,
        max_seq_length=length // context,
        grad_checkpoint=1,
        optimizer="adamw",
        sharding=Sharding(data=data, tensor=tensor, pipeline=pipeline, zero_stage=3),
    )
    settings = Settings(
        autocast=False,
        weight_width=4,
        foreach=False,
        reentrant=False,
        selective=not checkpointed,
        fused_kernels=row["compile"] == "True",
    )
    return Case(architecture, workload, settings)


def _degree(text: str, name: str) -> int:
    found = re.search(rf"{name} ?(\d+)", text)
    return int(found[1]) if found else 1


def _trainer(row: Row, architecture: Architecture) -> Case:
    """Trainer with autocast, as most recipes run it: Qwen's finetune.py, swift, LLaMA-Factory."""
    batch, length = _shape(row)
    method = row["method"].split("(")[0].strip()
    if method not in ("lora", "qlora", "full", "dora"):
        raise Skipped(FORMAT)
    full = method == "full"
    spread, deepspeed = _spread(row)
    workload = TrainingWorkload(
        method="full" if full else "dora" if method == "dora" else "lora",
        rank=number(row["rank"]) or 8,
        targets=() if full else _trainer_targets(row),
        num_layers=None,
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=0 if row["grad_ckpt"] == "False" else 1,
        optimizer="adamw",
        quantized=_quantized(row),
        sharding=spread,
    )
    unsloth = "nsloth" in row["framework"]
    settings = Settings(
        casts_head_back=True,
        copies=_trainer_loss(row, architecture, deepspeed),
        dropout=not full,
        kernel="flash" if "flash" in row["attn_impl"] else "efficient",
        deepspeed=deepspeed,
        modules_to_save="modules_to_save" in row["lora_targets"],
        autocast=not deepspeed,
        fsdp_hooks=False,
        offloads_inputs=unsloth,
        fused_kernels=unsloth,
        fused_adapters=unsloth,
    )
    return Case(architecture, workload, settings)


def _spread(row: Row) -> tuple[Sharding, bool]:
    """The devices of a Trainer's run, and whether DeepSpeed runs it."""
    text = row["parallelism"]
    if re.search(r"model parallel|megatron|ep=|device_map/|sequence", text):
        raise Skipped(INCOMPLETE)
    stage = number(row["zero_stage"]) or (3 if re.search(r"zero-?3", text, re.I) else 0)
    gpus = number(row["n_gpus"]) or 1
    spread = Sharding(data=gpus, zero_stage=stage) if gpus > 1 else Sharding()
    if "FSDP" in text.upper():
        spread = _fsdp(row)
    elif row["offload"]:
        spread = replace(
            spread,
            offload_optimizer="host",
            offload_parameters="host" if "param" in row["offload"] else "",
        )
    return spread, bool(stage) or "deepspeed (" in text


def _trainer_loss(row: Row, architecture: Architecture, deepspeed: bool) -> Copies:
    """The loss of the row's own code.

    Unsloth's (``models/llama.py``, ``fast_cross_entropy_loss``) writes over the 16-bit logits. The
    first Qwen's file does not upcast, which only autocast then does, not DeepSpeed.
    """
    if "liger" in row["loss_impl"]:
        return _liger(architecture)
    if "nsloth" in row["framework"]:
        return Copies(in_place=True, width=2)
    if architecture.module == "qwen" and deepspeed:
        return Copies(shifts=True, width=2)
    return TRANSFORMERS_45


def _trainer_targets(row: Row) -> tuple[str, ...]:
    if row["lora_targets"].startswith("DEFAULT"):
        return ("q_proj", "k_proj", "v_proj", "c_attn", "qkv_proj")
    return _targets(row) if row["lora_targets"] else ("q_proj", "v_proj")


def _mlx(row: Row, architecture: Architecture) -> Case:
    """``mlx_lm.lora`` with its defaults where the row does not say otherwise."""
    batch, length = _shape(row)
    method = row["method"].split("(")[0].strip()
    if method not in ("lora", "qlora", "dora", "full"):
        raise Skipped(FORMAT)
    layers = number(row["lora_layers"]) or min(DEFAULT_NUM_LAYERS, len(architecture.layers))
    bits = re.search(r"([2-8])-?bit", row["quant"] + row["model"])
    if method == "qlora" and bits is None:
        raise Skipped(INCOMPLETE)
    workload = TrainingWorkload(
        method="lora" if method == "qlora" else method,  # type: ignore[arg-type]
        rank=number(row["rank"]) or DEFAULT_RANK,
        num_layers=min(layers, len(architecture.layers)),
        batch_size=batch,
        max_seq_length=length,
        grad_checkpoint=1 if row["grad_ckpt"] == "True" else 0,
        quantized=bits[0] if bits and method == "qlora" else "",
    )
    form = Quantization(int(bits[1]), 64) if workload.quantized and bits else None
    return Case(architecture, workload, Settings(), weight_bytes(architecture, form))


READERS: tuple[tuple[str, Callable[[Row, Architecture], Case]], ...] = (
    (r"^mlx_lm", _mlx),
    (r"fms-acceleration", _fms),
    (r"fitcheck", _fitcheck),
    (r"fsdp_qlora", _fsdp_qlora),
    (r"axolotl", _axolotl),
    (r"lit-?gpt", _litgpt),
    (r"^transformers\+peft$", _peft),
    (r"torchtune", _torchtune),
    (r"torchtitan", _torchtitan),
    (r"qwen|swift|llama-?factory|transformers|trl|longlora|xtuner|unsloth", _trainer),
)
