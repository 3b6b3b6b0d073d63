"""What is emitted for PyTorch in the tests, and run by scripts/check_torch_emitted.py."""

from dataclasses import replace
from typing import Any

from uma.architecture import architecture_from_config
from uma.plan.emit.accelerate import script
from uma.plan.emit.device_map import Device, modules_of
from uma.plan.emit.peft import Training
from uma.plan.emit.training import TrainingTarget
from uma.plan.training.stack import Stack
from uma.workload import Sharding, TrainingWorkload

MODEL = "a/tiny-llama"
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ARCHITECTURE = architecture_from_config(TINY)
EMBEDDINGS, LAYERS = modules_of(ARCHITECTURE)[0].children[:2]
LAYER = LAYERS.children[0].size_bytes


def _rooms(card: float, host: float) -> dict[Device, int]:
    """Room for the embeddings and so many layers on the card, for so many on the host."""
    return {0: EMBEDDINGS.size_bytes + int(card * LAYER), "cpu": int(host * LAYER)}


ACCELERATE: dict[str, tuple[dict[Device, int], str | None]] = {
    "16 bits on a card": (_rooms(20, 0), None),
    "16 bits on card, host and disk": (_rooms(3, 3), None),
    "8 bits on a card": (_rooms(20, 0), "int8"),
    "8 bits on card, host and disk": (_rooms(3, 3), "int8"),
    "4 bits on card and host": (_rooms(1.5, 20), "nf4"),
}


def accelerate_script(case: str) -> str:
    rooms, scheme = ACCELERATE[case]
    return "\n".join(script(MODEL, ARCHITECTURE, rooms, scheme)) + "\n"


def training(**changes: Any) -> Training:
    values: dict[str, Any] = {"num_layers": None, "batch_size": 2, "max_seq_length": 64}
    return Training(MODEL, TrainingWorkload(**(values | {"optimizer": "adamw"} | changes)))


def _zero(stage: int, data: int = 8, **offload: Any) -> Sharding:
    return Sharding(data=data, zero_stage=stage, **offload)


# The second article's file is "ZeRO-2": 16 rows a step, 4 batches, states on the host.
TRAINING: dict[str, tuple[TrainingTarget, Training]] = {
    "LoRA": ("peft", training(grad_checkpoint=1)),
    "DoRA of two matrices": ("peft", training(method="dora", targets=("q_proj", "v_proj"))),
    "QLoRA": ("peft", training(quantized="nf4-double", grad_checkpoint=1)),
    "QLoRA, prepared": (
        "peft",
        replace(training(quantized="nf4", grad_checkpoint=1), stack=Stack(prepare_kbit=True)),
    ),
    "LoRA of an 8-bit base, last layers": ("peft", training(quantized="int8", num_layers=2)),
    "full": ("peft", training(method="full", grad_accumulation_steps=2)),
    "full, last layers": ("peft", training(method="full", num_layers=2, optimizer="adafactor")),
    "ZeRO-2": (
        "deepspeed",
        training(
            method="full",
            dtype="float16",
            grad_accumulation_steps=4,
            sharding=_zero(2, 2, offload_optimizer="host"),
        ),
    ),
    "ZeRO-3": ("deepspeed", training(method="full", sharding=_zero(3))),
    "ZeRO-Infinity": (
        "deepspeed",
        training(
            method="full", sharding=_zero(3, offload_optimizer="disk", offload_parameters="disk")
        ),
    ),
    "ZeRO-3, parameters on the host": (
        "deepspeed",
        training(sharding=_zero(3, offload_optimizer="host", offload_parameters="host")),
    ),
    "ZeRO-1, 8-bit states": ("deepspeed", training(optimizer="adamw-8bit", sharding=_zero(1))),
    "FSDP": (
        "fsdp",
        replace(
            training(method="full", grad_checkpoint=1, sharding=_zero(3, fsdp=True)),
            stack=Stack(precision="mixed"),
        ),
    ),
    "FSDP 1, LoRA": ("fsdp", training(grad_checkpoint=1, sharding=_zero(3, 4, fsdp=True))),
    "FSDP, 16 bits, on the host": (
        "fsdp",
        training(
            method="full",
            sharding=_zero(3, fsdp=True, offload_optimizer="host", offload_parameters="host"),
        ),
    ),
}
