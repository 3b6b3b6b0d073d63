"""The program around PyTorch that trains, as its user chooses it; ``stacks`` says what it does."""

from uma.frozen import dataclass
from uma.workload import Kernels, Precision, StackName

OF_TRANSFORMERS = ("trainer", "trainer-2024")


@dataclass(frozen=True, slots=True)
class Stack:
    """A program around PyTorch, and what its user chooses.

    ``precision`` is 16-bit weights under autocast, float32 weights under it (``mixed``), or 16 bits
    without it (``pure``). ``prepare_kbit`` is PEFT's ``prepare_model_for_kbit_training``.
    ``lora_dropout`` keeps a copy of each adapted input, and ``optimizer_in_backward`` updates a
    parameter as soon as its gradient is there (torchtune's ``optimizer_in_bwd``).
    ``fused_kernels`` are those for norms and rotary embeddings: Liger's, with those for gated
    layers and for a loss in slices (``use_liger_kernel``; Liger-Kernel 0.5, ``monkey_patch.py``),
    or Unsloth's and axolotl's, which has them for adapters too.
    ``variable_lengths`` are batches of ever other sizes.
    """

    name: StackName = "trainer"
    precision: Precision = "16-bit"
    prepare_kbit: bool = False
    lora_dropout: bool = False
    optimizer_in_backward: bool = False
    fused_kernels: Kernels | None = None
    variable_lengths: bool = False

    @property
    def is_of_transformers(self) -> bool:
        return self.name in OF_TRANSFORMERS
