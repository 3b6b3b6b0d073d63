"""DeepSpeed's JSON file for a planned workload: ZeRO 1 to 3, ZeRO-Offload, ZeRO-Infinity.

Keys: DeepSpeed 0.19 (``runtime/config.py``, ``runtime/zero/config.py``, ``offload_config.py``).
JSON has no comments: the reasons stand under ``why``, a key that DeepSpeed does not read.
"""

import json
from typing import Any

from uma.errors import UsageError
from uma.workload import Sharding, TrainingWorkload

BUCKET = 500_000_000  # elements: DeepSpeed's default, and what the plan counts
NVME = "/local_nvme"
# Those that DeepSpeed has itself, and can run on the host.
OWN_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}
DEVICES = {"host": "cpu", "disk": "nvme"}


def deepspeed_json(asked: TrainingWorkload, learning_rate: float) -> str:
    """The file for ``deepspeed`` and transformers' ``TrainingArguments(deepspeed=...)``.

    Raises:
        UsageError: If nothing in the workload is DeepSpeed's.
    """
    return json.dumps(deepspeed_config(asked, learning_rate), indent=2)


def deepspeed_config(asked: TrainingWorkload, learning_rate: float) -> dict[str, Any]:
    """The same as a dictionary."""
    spread = asked.sharding
    if not spread.zero_stage or spread.fsdp:
        raise UsageError(
            "--emit deepspeed writes ZeRO stages 1 to 3: plan with --zero-stage, or take --emit "
            "fsdp or peft"
        )
    rows = asked.batch_size * asked.grad_accumulation_steps * spread.data
    config: dict[str, Any] = {"why": _reasons(asked, rows)}
    if asked.dtype != "float32":
        config["bf16" if asked.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    config["zero_optimization"] = _zero(spread)
    if asked.optimizer in OWN_OPTIMIZERS:
        name = OWN_OPTIMIZERS[asked.optimizer]
        config["optimizer"] = {"type": name, "params": {"lr": learning_rate}}
    elif spread.offload_optimizer:
        config["zero_force_ds_cpu_optimizer"] = False
    if "disk" in (spread.offload_optimizer, spread.offload_parameters):
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1}
    return config | {
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": asked.batch_size,
        "gradient_accumulation_steps": asked.grad_accumulation_steps,
        "train_batch_size": rows,
    }


def _zero(spread: Sharding) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": spread.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET,
    }
    if spread.zero_stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": BUCKET}
    else:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True}
        if spread.shard_group:
            zero["zero_hpz_partition_size"] = spread.shard_group
    for key, place in (
        ("offload_optimizer", spread.offload_optimizer),
        ("offload_param", spread.offload_parameters),
    ):
        if place:
            zero[key] = {"device": DEVICES[place], "pin_memory": True}
        if place == "disk":
            zero[key]["nvme_path"] = NVME
    return zero


def _reasons(asked: TrainingWorkload, rows: int) -> dict[str, str]:
    spread = asked.sharding
    sharded = {1: "optimizer states", 2: "optimizer states and gradients"}.get(
        spread.zero_stage, "optimizer states, gradients and parameters"
    )
    why = {
        "zero_optimization.stage": f"{sharded} are split over {spread.shards} devices"
        if spread.shards > 1
        else "one device: nothing is split, but only ZeRO offloads",
        "reduce_bucket_size": "the plan counts two such buffers on each device",
        "train_batch_size": f"{asked.batch_size} rows x {asked.grad_accumulation_steps} batches x "
        f"{spread.data} devices = {rows}; DeepSpeed refuses any other number",
    }
    if spread.offload_optimizer == "host":
        why["offload_optimizer"] = "float32 copies and states lie on the host, whose cores step"
    if "disk" in (spread.offload_optimizer, spread.offload_parameters):
        why["nvme_path"] = "a folder on the fastest disk: every step reads and writes it whole"
    if spread.offload_parameters:
        why["offload_param"] = "each layer crosses the link in every pass"
    if asked.quantized and spread.zero_stage == 3:
        why["quantized"] = "4-bit weights are sharded only if stored as 16-bit numbers (the script)"
    return why
