"""Copies of the logits that a loss makes, in bytes a logit, by program and version."""

import pytest

from uma.memory.autograd import Memory
from uma.memory.loss import TRANSFORMERS, TRANSFORMERS_45, TRANSFORMERS_46, Copies, LossRun

TOKENS, VOCABULARY, WIDTH = 4, 1000, 2
LOGITS = TOKENS * VOCABULARY


def bytes_a_logit(copies: Copies, width: int = WIDTH) -> tuple[int, int]:
    """The most that is alive in the forward and in the backward pass."""
    memory = Memory()
    loss = LossRun(memory, TOKENS, VOCABULARY, width, copies)
    loss.forward(0)
    forward = memory.peak_bytes
    memory.begin()
    loss.backward(0)
    return forward // LOGITS, memory.peak_bytes // LOGITS


@pytest.mark.parametrize(
    ("copies", "forward", "backward"),
    [
        (TRANSFORMERS_45, 12, 12),  # float32, shifted, log-softmax; two gradients beside the last
        (TRANSFORMERS_46, 14, 12),  # the 16-bit logits have a name (Mistral-7B: 14 V, measured)
        (TRANSFORMERS, 10, 12),  # the labels are padded, the logits not shifted
        (Copies(keeps_outputs=True), 10, 14),  # fitcheck's lambda of 3.5 float32
        (Copies(in_place=True, shifts=True, keeps_logits=False), 8, 8),  # Llama-3-8B: 8 V
        (Copies(in_place=True, shifts=True), 10, 8),  # Mistral-7B with 4.48: 10 V
        (Copies(compiled=True), 2, 4),
        (Copies(shifts=True, keeps_outputs=True, width=2), 6, 8),  # GPT-BigCode without autocast
    ],
)
def test_a_loss_holds_so_many_bytes_a_logit(copies: Copies, forward: int, backward: int) -> None:
    assert bytes_a_logit(copies) == (forward, backward)


def test_a_float32_head_needs_16_bytes_with_its_outputs_kept() -> None:
    """fitcheck, SPEC 3.1: lambda is 4 where the head is float32."""
    assert bytes_a_logit(Copies(keeps_outputs=True), width=4)[1] == 16


def test_slices_hold_a_part_of_the_logits_and_the_inputs_gradient() -> None:
    memory = Memory()
    LossRun(memory, TOKENS, VOCABULARY, WIDTH, Copies(slices=4)).forward(500)
    assert memory.peak_bytes == 500 + LOGITS * 8 // 4
