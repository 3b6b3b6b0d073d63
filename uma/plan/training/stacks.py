"""What programs around PyTorch do differently: presets of the stack's options."""

from typing import Literal

from uma.engines.torch_model import Settings
from uma.memory.loss import Copies

Stack = Literal["trainer", "torchtune", "unsloth"]


def settings_of(stack: Stack) -> Settings:
    """``trainer``: transformers' Trainer with PEFT and bitsandbytes.

    ``torchtune`` (0.4 to 0.6, and litgpt): all in 16 bits without autocast, adapters too, the loss
    in chunks. ``unsloth`` (2024 and later): its kernels for norms, adapters and the loss, which
    writes over the logits, and checkpoints that lie on the host.
    """
    if stack == "torchtune":
        return Settings(
            autocast=False,
            prepare_kbit=False,
            adapter_width=2,
            reentrant=False,
            inputs_need_gradients=False,
            copies=Copies(chunks=8),
        )
    if stack == "unsloth":
        return Settings(
            casts_head_back=True,
            copies=Copies(in_place=True, width=2),
            offloads_inputs=True,
            fused_kernels=True,
            fused_adapters=True,
        )
    return Settings()
