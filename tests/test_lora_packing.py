"""Packed rows against the same examples apart, in mlx-lm's own models."""

from typing import Any

import pytest
from test_lora_run import examples
from test_lora_step import adapted, relative

from uma.errors import UnsupportedModel
from uma.runtime.lora.step import loss_and_gradients, loss_of
from uma.runtime.lora.train import batch_of, inputs_of, require_packable, targets_of, units_of


@pytest.mark.parametrize("kind", ["full", "moe", "sliding", "sinks", "latent"])
@pytest.mark.parametrize("slices", [{}, {"loss_rows": 5, "attention_slice_bytes": 1}])
def test_packed_rows_give_the_loss_and_gradients_of_the_rows_apart(
    kind: str, slices: dict[str, Any]
) -> None:
    """More than a sliding window (32 tokens) in a row, and rows of several lengths."""
    model = adapted(kind)
    rows = examples(9)
    packed, apart = units_of(rows, 96), units_of(rows)
    assert len(packed) < len(apart)
    loss, found = loss_and_gradients(model, batch_of(packed), **slices)
    wanted_loss, wanted = loss_and_gradients(model, batch_of(apart))
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
    assert max(relative(found[name], value) for name, value in wanted.items()) <= 1e-5
    assert loss_of(model, batch_of(packed)).item() == pytest.approx(loss.item(), rel=1e-6)


def test_packing_keeps_every_target_and_fills_rows() -> None:
    rows = examples(40)
    packed = units_of(rows, 64)
    assert targets_of(packed) == targets_of(units_of(rows))
    assert sum(map(inputs_of, packed)) > 0.9 * 64 * len(packed)


@pytest.mark.parametrize("kind", ["hybrid", "side_by_side", "recurrent"])
def test_a_model_whose_recurrence_would_run_on_into_the_next_example_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be packed"):
        require_packable(adapted(kind, layers=2))


def test_learned_positions_are_refused() -> None:
    from mlx_lm.models import gpt2

    args = gpt2.ModelArgs(
        model_type="gpt2",
        n_ctx=64,
        n_embd=64,
        n_head=4,
        n_layer=2,
        n_positions=64,
        layer_norm_epsilon=1e-5,
        vocab_size=384,
    )
    with pytest.raises(UnsupportedModel, match="cannot be packed"):
        require_packable(gpt2.Model(args))


@pytest.mark.parametrize("kind", ["full", "sliding", "moe"])
def test_models_of_rotary_attention_can_be_packed(kind: str) -> None:
    require_packable(adapted(kind))
