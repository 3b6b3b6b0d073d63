"""Cases that the tables of docs/training-memory.md are made of, and how their sizes are written."""

from functools import cache
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.catalog import model_config
from uma.checkpoint.free_names import find_free
from uma.ledger import phase_totals
from uma.machine import budget_of
from uma.machine.named import machine_named
from uma.memory.weights import weight_bytes
from uma.plan.training.case import TrainingCase
from uma.plan.training.stack import Stack
from uma.quantization import quantization_for
from uma.units import GB
from uma.workload import TrainingWorkload, bits_word

ONE_ROW: dict[str, Any] = {"batch_size": 1, "grad_checkpoint": 1}
PLAIN, MIXED, OF_2024 = Stack(), Stack(precision="mixed"), Stack("trainer-2024", precision="mixed")
PREPARED = Stack(prepare_kbit=True)


@cache
def architecture_of(name: str) -> Architecture:
    return architecture_from_config(model_config(find_free(name)).values)


def torch(
    model: str, machine: str = "a100-80gb", stack: Stack = PLAIN, **asked: Any
) -> TrainingCase:
    """A case under PyTorch: AdamW, all layers, what torch allocates, unless asked otherwise."""
    here = machine_named(machine)
    workload = TrainingWorkload(**{"optimizer": "adamw", "num_layers": None} | asked)
    architecture = architecture_of(model)
    return TrainingCase(architecture, here, budget_of(here), "torch", workload, stack=stack)


def mlx(model: str, bits: int, **asked: Any) -> TrainingCase:
    """A case under mlx_lm.lora, with its defaults."""
    here, architecture = machine_named("mac-studio-m2-ultra-192"), architecture_of(model)
    weights = weight_bytes(architecture, quantization_for(bits))
    workload = TrainingWorkload(quantized=bits_word(bits), **asked)
    return TrainingCase(architecture, here, budget_of(here), "mlx", workload, weights)


def gb(size_bytes: float) -> str:
    """GB of 10^9 bytes, as the articles count, and MB below one.

    >>> gb(16.06e9), gb(84e6), gb(0)
    ('16.1 GB', '84 MB', '0')
    """
    if size_bytes < GB:
        return f"{size_bytes / 1e6:,.0f} MB" if size_bytes else "0"
    return f"{size_bytes / GB:,.1f} GB"


def term(case: TrainingCase, name: str) -> int:
    """Bytes of what is always there under that name."""
    return sum(t.size_bytes for t in case.terms() if t.name == name and t.phase == "always")


def activations(case: TrainingCase) -> int:
    """Bytes of the phase that needs more, forward or backward, beside what is always there."""
    terms = case.terms()
    totals = phase_totals(terms)
    held = sum(t.size_bytes for t in terms if t.phase == "always")
    return max(totals["forward"], totals["backward"]) - held


def checkpointed(model: str, tokens: int, every: tuple[int, ...]) -> list[int]:
    """Activations of one row, in bytes, with a checkpoint every so many layers; 0 for none."""
    asked = {"batch_size": 1, "max_seq_length": tokens}
    return [activations(torch(model, **asked, grad_checkpoint=k)) for k in every]
