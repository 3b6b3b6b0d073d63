"""torch's allocator, run on sizes (``scripts/torch_allocator.py``), against what torch reserved."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from torch_allocator import Allocator, lora, slack_over_logits, torchtune_qlora

from uma.engines.torch_training import LOGITS_SLACK, VARIABLE_SLACK
from uma.units import MIB


def test_making_a_model_for_qlora_reserves_what_torchtune_published() -> None:
    """docs/source/tutorials/qlora_finetune.rst: 9.13 GB after Llama-2-7B was made."""
    device = Allocator()
    torchtune_qlora(device)
    assert device.reserved == pytest.approx(9.13e9, rel=0.01)


def test_a_freed_block_serves_what_is_smaller_and_joins_its_neighbours() -> None:
    device = Allocator()
    device.free(device.malloc(100 * MIB))
    parts = [device.malloc(50 * MIB) for _ in range(2)]
    assert device.reserved == 100 * MIB
    for part in parts:
        device.free(part)
    device.malloc(100 * MIB)
    assert device.reserved == 100 * MIB
    device.malloc(101 * MIB)
    assert device.reserved == 202 * MIB  # in steps of 2 MiB


def test_batches_of_ever_other_lengths_leave_blocks_that_are_too_small() -> None:
    """The longest comes late; of equal lengths hardly anything is left (the fixed share)."""
    model = lora("Llama-3.2-1B", 1, 1024)
    assert slack_over_logits(model, 1, 1) < 2 * LOGITS_SLACK
    assert slack_over_logits(model, 30, 1) > VARIABLE_SLACK / 2
