"""What the words of a measured training row mean: methods, formats, targets."""

import re

from uma.workload import Method

from .rows import FORMAT, INCOMPLETE, NOT_TOLD, Row, Skipped

# Notes with which the collectors took a number back.
DOUBTS = re.compile(r"equals a card size|treat as suspect|does not explain")
# Tasks of more than one model or another loss: "task" in the notes is not "sft", or preference.
OTHER_TASKS = re.compile(
    r"\b(ppo|dpo|orpo|grpo|kto|rlhf)\b|\btask (?!sft\b|pt\b)\w+", re.IGNORECASE
)
METHODS: dict[str, Method] = {
    "lora": "lora",
    "qlora": "lora",
    "dora": "dora",
    "qdora": "dora",
    "full": "full",
}
OTHER_OPTIMIZERS = re.compile(r"4-?bit|galore|torchao CPU|lora-fa", re.IGNORECASE)


# Words for optimizers, the first that is found; all else is AdamW.
OPTIMIZERS = (
    (r"paged.*8-?bit", "paged-adamw-8bit"),
    (r"8-?bit", "adamw-8bit"),
    (r"paged", "paged-adamw"),
    (r"adafactor", "adafactor"),
    (r"sgd", "sgd"),
    (r"lion", "lion"),
)


def optimizer_of(row: Row) -> str:
    """The optimizer in the workload's words."""
    text = row["optimizer"].lower()
    return next((name for pattern, name in OPTIMIZERS if re.search(pattern, text)), "adamw")


def method_of(row: Row) -> Method:
    """The workload's word for what is trained.

    Raises:
        Skipped: If it is a method, a task or an optimizer that is not claimed.
    """
    told = row["method"].split("(")[0].strip().lower()
    if told in NOT_TOLD:
        raise Skipped(INCOMPLETE)
    if told not in METHODS or OTHER_TASKS.search(f"{row['method']} {row['notes']}"):
        raise Skipped(FORMAT)
    if OTHER_OPTIMIZERS.search(row["optimizer"]):
        raise Skipped(FORMAT)
    return METHODS[told]


# litgpt's names of the parts of a layer.
LITGPT_NAMES = {
    "query": ("q_proj", "qkv_proj", "query_key_value"),
    "key": ("k_proj", "qkv_proj", "query_key_value"),
    "value": ("v_proj", "qkv_proj", "query_key_value"),
    "projection": ("o_proj", "dense"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "dense_h_to_4h"),
}


def targets_of(row: Row) -> tuple[str, ...]:
    """The matrices that get an adapter; empty is all."""
    text = row["lora_targets"].split(";")[0]
    if text.strip().lower() in NOT_TOLD or re.search(r"\ball\b", text, re.IGNORECASE):
        return ()
    names = re.findall(r"[a-z_]+[a-z0-9_]*", text)
    return tuple(found for name in names for found in LITGPT_NAMES.get(name, (name,)))


def quantized_of(row: Row) -> str:
    """The format of a frozen base in the engine's words.

    Raises:
        Skipped: If it is another one, or not told.
    """
    text = row["quant"].lower()
    if not text:
        return ""
    if "gptq" in text:
        return "gptq-int8" if "int8" in text else "gptq"
    if "awq" in text:
        return "awq"
    if "double" in text and "double_quant=false" not in text and "off" not in text:
        return "nf4-double"
    if re.search(r"nf4-dq|torchao nf4", text):  # torchao quantizes the scales too
        return "nf4-double"
    if re.search(r"nf4|4-bit|4bit|int4", text):
        return "nf4"
    if re.search(r"int8|8-bit|8bit", text):
        return "int8"
    raise Skipped(INCOMPLETE if "not stated" in text else FORMAT)
