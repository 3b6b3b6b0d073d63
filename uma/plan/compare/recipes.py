"""Ways to train a model: the numbers kept for each weight, where they lie, what is computed twice.

PyTorch's are PEFT and Trainer on one device, DeepSpeed's ZeRO and FSDP on several or with a part
of the state on the host or its disk; MLX's are those of ``mlx_lm.lora`` and ``uma lora train``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from uma.frozen import dataclass
from uma.plan.training.stack import Stack
from uma.workload import Place, Sharding, TrainingEngine, TrainingWorkload, bits_word

Kind = Literal["lora", "qlora", "dora", "full"]
"""What is trained; ``lora`` and ``dora`` may be on a base in fewer bits, ``qlora`` is."""

PLAIN = Stack()
FLOAT32_WEIGHTS = Stack(precision="mixed")  # Trainer with bf16=True: autocast

MIXED, EIGHT_BIT, SIXTEEN_BIT = 2, 1, 0
HALF = {"bfloat16": "bf16", "float16": "fp16"}
STATES = {MIXED: "float32 states", EIGHT_BIT: "8-bit states", SIXTEEN_BIT: "bf16 states"}
GIVES_UP = {
    EIGHT_BIT: "weights are updated in 16 bits, by states in 8: small updates are rounded away",
    SIXTEEN_BIT: "weights and states are in 16 bits: small updates are rounded away",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way; ``bits`` are those of the weights that are read, ``format`` says it in words.

    ``quality`` is that of the optimizer's numbers in full training.
    """

    engine: TrainingEngine
    workload: TrainingWorkload
    bits: int
    format: str
    quality: int = 0
    stack: Stack = PLAIN
    own: bool = False

    @property
    def trainer(self) -> str:
        """What runs it: uma, mlx_lm, peft, deepspeed or fsdp."""
        spread = self.workload.sharding
        if self.engine == "mlx":
            return "uma" if self.own else "mlx_lm"
        return "fsdp" if spread.fsdp else "deepspeed" if spread.zero_stage else "peft"

    @property
    def technique(self) -> str:
        """In words, as ``QLoRA, ZeRO 3, parameters on the host, checkpointing``."""
        workload, spread = self.workload, self.workload.sharding
        name = {"lora": "LoRA", "dora": "DoRA", "full": "full"}[workload.method]
        parts = [f"Q{name}" if workload.quantized else name]
        if spread.fsdp:
            parts.append("FSDP")
        elif spread.zero_stage:
            parts.append(f"ZeRO {spread.zero_stage}")
        elif spread.data > 1:
            parts.append("data parallel")
        if workload.optimizer.startswith("paged"):
            parts.append("paged optimizer")
        if spread.offload_parameters:
            parts.append(f"parameters on the {spread.offload_parameters}")
        if spread.offload_optimizer:
            parts.append(f"optimizer on the {spread.offload_optimizer}")
        if self.own:
            parts.append("uma lora train")
        elif workload.grad_checkpoint:
            parts.append("checkpointing")
        return ", ".join(parts)


def mlx_recipes(asked: TrainingWorkload, kind: Kind) -> Iterator[Recipe]:
    """With the optimizer's states in the model's own 16 bits where all of it is trained.

    ``uma lora train`` runs every layer again in its backward pass, as checkpointing does.
    """
    widths = {"qlora": (8, 4), "full": (16,)}.get(kind, (16, 8, 4))
    for bits in widths:
        for every, own in ((0, False), (1, True), (1, False)):
            workload = replace(
                asked, grad_checkpoint=every, quantized=bits_word(bits), optimizer="adamw"
            )
            words = f"{bits}bit" if bits < 16 else "bf16"
            if kind == "full":
                words += f", {STATES[SIXTEEN_BIT]}"
            yield Recipe("mlx", workload, bits, words, SIXTEEN_BIT, own=own)


def torch_recipes(
    asked: TrainingWorkload, kind: Kind, devices: int, places: tuple[Place, ...]
) -> Iterator[Recipe]:
    """PyTorch's on equal cards, the simplest first; ``places`` are those to offload to.

    Parameters go there with checkpointing alone: layers that run again cost less than the link.
    What ``reasons`` refuse is among them.
    """
    ways = _full(devices, places) if kind == "full" else _adapters(kind, devices, places)
    for recipe in ways:
        for every in (1,) if recipe.workload.sharding.offload_parameters else (0, 1):
            workload = replace(
                asked,
                optimizer=recipe.workload.optimizer,
                quantized=recipe.workload.quantized,
                sharding=recipe.workload.sharding,
                grad_checkpoint=every,
            )
            yield replace(
                recipe,
                workload=workload,
                format=recipe.format.replace("bf16", HALF[asked.dtype]),
            )


def _adapters(kind: Kind, devices: int, places: tuple[Place, ...]) -> Iterator[Recipe]:
    """A base in 16 bits, or in 4 as QLoRA has it; whole on each device, in parts, or elsewhere."""
    for bits, held in ((16, ""), (4, "nf4-double")):
        if bits == 16 and kind == "qlora":
            continue
        words = held or "bf16"
        for optimizer in ("adamw", "paged-adamw-8bit"):
            yield _recipe(optimizer, Sharding(data=devices), bits, words, held=held)
        if devices > 1:
            yield _recipe("adamw", _fsdp(devices), bits, words, held=held)
        for place in places:
            spread = Sharding(
                devices, zero_stage=3, offload_parameters=place, offload_optimizer=place
            )
            yield _recipe("adamw", spread, bits, words, held=held)
        if "host" in places:
            yield _recipe("adamw", _fsdp(devices, "host"), bits, words, held=held)


def _fsdp(devices: int, place: Literal["", "host"] = "") -> Sharding:
    return Sharding(
        devices, zero_stage=3, fsdp=True, offload_parameters=place, offload_optimizer=place
    )


def _full(devices: int, places: tuple[Place, ...]) -> Iterator[Recipe]:
    """By what is kept for each weight: float32, states in 8 bits, or 16 bits of everything."""
    words = {quality: f"bf16, {states}" for quality, states in STATES.items()}
    alone = Sharding(data=devices)
    for optimizer in ("adamw", "paged-adamw"):
        yield _recipe(optimizer, alone, 16, words[MIXED], MIXED, FLOAT32_WEIGHTS)
    for spread in _zero(devices, places):
        stack = FLOAT32_WEIGHTS if spread.fsdp else PLAIN  # DeepSpeed has float32 copies
        yield _recipe("adamw", spread, 16, words[MIXED], MIXED, stack)
    for optimizer in ("adamw-8bit", "paged-adamw-8bit"):
        yield _recipe(optimizer, alone, 16, words[EIGHT_BIT], EIGHT_BIT)
    spreads = [alone, *([_fsdp(devices)] if devices > 1 else [])]
    spreads += [_fsdp(devices, "host")] if "host" in places else []
    for spread in spreads:
        yield _recipe("adamw", spread, 16, words[SIXTEEN_BIT], SIXTEEN_BIT)


def _zero(devices: int, places: tuple[Place, ...]) -> Iterator[Sharding]:
    """Stages 1 to 3, FSDP, and what is offloaded: ZeRO-Offload, and ZeRO-Infinity with a disk."""
    if devices > 1:
        yield Sharding(devices, zero_stage=1)
        yield Sharding(devices, zero_stage=2)
        yield Sharding(devices, zero_stage=3)
        yield _fsdp(devices)
    if "host" in places:
        yield Sharding(devices, zero_stage=2, offload_optimizer="host")
        if devices > 1:
            yield Sharding(devices, zero_stage=3, offload_optimizer="host")
        yield Sharding(devices, zero_stage=3, offload_optimizer="host", offload_parameters="host")
        yield _fsdp(devices, "host")
    if "disk" in places:
        if devices > 1:
            yield Sharding(devices, zero_stage=3, offload_optimizer="disk")
        yield Sharding(devices, zero_stage=3, offload_optimizer="disk", offload_parameters="host")
        yield Sharding(devices, zero_stage=3, offload_optimizer="disk", offload_parameters="disk")


def _recipe(
    optimizer: str,
    spread: Sharding,
    bits: int,
    words: str,
    quality: int = 0,
    stack: Stack = PLAIN,
    *,
    held: str = "",
) -> Recipe:
    workload = TrainingWorkload(optimizer=optimizer, quantized=held, sharding=spread)
    return Recipe("torch", workload, bits, words, quality, stack)
