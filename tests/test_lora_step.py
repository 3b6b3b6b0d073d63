"""The step against one automatic differentiation of mlx-lm's own model by mlx-lm's own loss."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import CONFIGS, VOCAB_SIZE, build_model

from uma.errors import UmaError
from uma.runtime.lora.attention import sliced_attention
from uma.runtime.lora.loss import cross_entropy
from uma.runtime.lora.random_state import at_random_state, random_state
from uma.runtime.lora.step import (
    Batch,
    hidden_of,
    loss_and_gradients,
    loss_of,
)
from uma.runtime.lora.tape import Gradients

TOLERANCE = 1e-5
SMALLEST_SLICES: dict[str, int] = {"loss_rows": 7, "attention_slice_bytes": 1}


def whole_loss_and_gradients(model: nn.Module, batch: Batch) -> tuple[mx.array, Gradients]:
    """By one automatic differentiation of the whole model: the definition, and dear.

    Segments are not known to it.
    """

    def loss(model: nn.Module) -> mx.array:
        logits = model(mx.array(batch.tokens))
        flat = logits.reshape(-1, logits.shape[-1])
        targets, weights = (mx.array(x.reshape(-1)) for x in (batch.targets, batch.weights))
        return cross_entropy(flat, targets, weights)

    value, gradients = nn.value_and_grad(model, loss)(model)
    mx.eval(value, gradients)
    return value, dict(tree_flatten(gradients))


def adapted(kind: str, *, layers: int = 4, bits: int | None = None, **settings: Any) -> nn.Module:
    """A random model with a LoRA that is not zero, so that every gradient is something."""
    overrides = settings.pop("overrides", {})
    use_dora = settings.pop("use_dora", False)
    model = build_model(CONFIGS[kind] | overrides)
    if bits is not None:
        nn.quantize(model, 32, bits)
    model.freeze()
    adapter = {"rank": 4, "scale": 5.0, "dropout": 0.0} | settings
    linear_to_lora_layers(model, layers, adapter, use_dora)
    factors = [
        (name, mx.random.normal(value.shape) * 0.05)
        for name, value in tree_flatten(model.trainable_parameters())
        if name.endswith(("lora_a", "lora_b"))
    ]
    model.update(tree_unflatten(factors))
    mx.eval(model.parameters())
    model.train()
    return model


def random_batch(rows: int = 2, length: int = 64, supervised: float = 0.6, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB_SIZE, (rows, length + 1))
    weights = (rng.random((rows, length)) < supervised).astype(np.float32)
    weights[0, -1] = 1
    return Batch(tokens[:, :-1], tokens[:, 1:], weights / weights.sum())


def relative(found: mx.array, wanted: mx.array) -> float:
    """Of the norm of the difference to that of ``wanted``; one that is zero has no relation."""
    difference = mx.linalg.norm((found - wanted).astype(mx.float32).reshape(-1)).item()
    return difference / max(mx.linalg.norm(wanted.astype(mx.float32).reshape(-1)).item(), 1e-6)


def require_equal(model: nn.Module, batch: Batch, **slices: int) -> None:
    state = random_state()
    loss, gradients = loss_and_gradients(model, batch, **slices)
    after = random_state()
    mx.random.seed(state)
    wanted_loss, wanted = whole_loss_and_gradients(model, batch)
    assert random_state() == after
    assert gradients.keys() == wanted.keys()
    assert abs(loss.item() / wanted_loss.item() - 1) <= TOLERANCE
    worst = {name: relative(gradients[name], value) for name, value in wanted.items()}
    assert max(worst.values()) <= TOLERANCE, worst


BFLOAT16_TOLERANCE = 0.03  # each number is rounded to 4e-3


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
def test_a_model_of_16_bits_trains_in_them_and_its_adapter_in_float32(
    kind: str, use_dora: bool
) -> None:
    """E15, E16: adapters made the whole network float32, or their magnitudes 16 bits."""
    model = adapted(kind, use_dora=use_dora)
    trained = dict(tree_flatten(model.trainable_parameters()))
    model.set_dtype(mx.bfloat16)
    model.update(tree_unflatten(list(trained.items())))
    batch = random_batch()
    assert hidden_of(model, batch).dtype == mx.bfloat16
    loss, gradients = loss_and_gradients(model, batch, **SMALLEST_SLICES)
    wanted_loss, wanted = whole_loss_and_gradients(model, batch)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-3)
    assert {g.dtype for g in gradients.values()} == {mx.float32}
    assert max(relative(gradients[n], g) for n, g in wanted.items()) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_loss_and_gradients_are_those_of_the_whole_model(kind: str) -> None:
    require_equal(adapted(kind), random_batch(), **SMALLEST_SLICES)


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])
def test_dropout_draws_the_same_numbers_as_in_one_pass(kind: str) -> None:
    model = adapted(kind, dropout=0.3)
    mx.random.seed(5)
    require_equal(model, random_batch(), **SMALLEST_SLICES)


def test_the_loss_is_that_of_mlx_lm() -> None:
    """mlx-lm's mask, given these lengths, holds for every target."""
    model = adapted("full")
    rows = np.random.default_rng(1).integers(3, VOCAB_SIZE, (2, 65))
    weights = np.full((2, 64), 1 / 128, np.float32)
    batch = Batch(rows[:, :-1], rows[:, 1:], weights)
    lengths = mx.array([[0, 65], [0, 65]])
    (theirs, _), gradients = nn.value_and_grad(model, default_loss)(model, mx.array(rows), lengths)
    ours, found = loss_and_gradients(model, batch, **SMALLEST_SLICES)
    assert abs(ours.item() / theirs.item() - 1) <= TOLERANCE
    for name, value in tree_flatten(gradients):
        assert relative(found[name], value) <= TOLERANCE
    assert abs(loss_of(model, batch).item() / theirs.item() - 1) <= TOLERANCE


def test_layers_below_the_first_trained_one_are_not_differentiated() -> None:
    model = adapted("full", layers=1)
    require_equal(model, random_batch(), **SMALLEST_SLICES)
    _, gradients = loss_and_gradients(model, random_batch())
    assert {name.split(".")[2] for name in gradients} == {"3"}


def test_adapters_on_embedding_and_head_get_their_gradient() -> None:
    keys = ["model.embed_tokens", "lm_head", "self_attn.q_proj"]
    require_equal(adapted("full", keys=keys), random_batch(), **SMALLEST_SLICES)


def test_a_tied_embedding_gets_the_gradient_of_both_its_uses() -> None:
    keys = ["model.embed_tokens"]
    model = adapted("full", keys=keys, overrides={"tie_word_embeddings": True})
    require_equal(model, random_batch(), **SMALLEST_SLICES)


def test_whole_layers_train_too() -> None:
    model = build_model(CONFIGS["moe"])
    model.freeze()
    model.layers[-1].unfreeze()
    require_equal(model, random_batch(), **SMALLEST_SLICES)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_and_head_give_the_same(bits: int) -> None:
    require_equal(adapted("full", bits=bits), random_batch(), **SMALLEST_SLICES)


def test_dora_gives_the_same() -> None:
    require_equal(adapted("full", use_dora=True), random_batch(), **SMALLEST_SLICES)


def test_soft_capped_logits_give_the_same() -> None:
    from mlx_lm.models import gemma2

    small = {
        k: v for k, v in CONFIGS["full"].items() if k not in ("model_type", "tie_word_embeddings")
    }
    config = small | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 50.0}
    args = gemma2.ModelArgs.from_dict(config | {"model_type": "gemma2"})
    model = gemma2.Model(args)
    model.freeze()
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 5.0, "dropout": 0.0})
    mx.eval(model.parameters())
    loss, found = loss_and_gradients(model, random_batch(), **SMALLEST_SLICES)
    wanted_loss, wanted = whole_loss_and_gradients(model, random_batch())
    assert abs(loss.item() / wanted_loss.item() - 1) <= TOLERANCE
    for name, value in wanted.items():
        if name.endswith("lora_b"):  # those of lora_a are zero as long as lora_b is
            assert relative(found[name], value) <= TOLERANCE


MODEL: list[nn.Module] = []


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 70),
    supervised=st.floats(0, 1),
    loss_rows=st.integers(1, 50),
    seed=st.integers(0, 10**6),
)
def test_any_shape_mask_and_slice_gives_the_same(
    rows: int, length: int, supervised: float, loss_rows: int, seed: int
) -> None:
    if not MODEL:
        MODEL.append(adapted("full", layers=2))
    batch = random_batch(rows, length, supervised, seed)
    require_equal(MODEL[0], batch, loss_rows=loss_rows, attention_slice_bytes=1)


@pytest.mark.parametrize("mask", ["causal", "window", "none", "additive"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_sliced_attention_is_whole_attention(mask: str, kv_heads: int) -> None:
    mx.random.seed(0)
    q = mx.random.normal((2, 4, 50, 16))
    k, v = (mx.random.normal((2, kv_heads, 50, 16)) for _ in range(2))
    window = create_causal_mask(50, window_size=20)
    masks = {
        "causal": "causal",
        "window": window,
        "none": None,
        "additive": mx.where(window, 0.0, -1e9),
    }

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=masks[mask])

    slope = mx.random.normal((2, 4, 50, 16))
    wanted, wanted_slopes = mx.vjp(attend, [q, k, v], [slope])
    with sliced_attention(1):
        found, slopes = mx.vjp(attend, [q, k, v], [slope])
    for one, other in zip([*found, *slopes], [*wanted, *wanted_slopes], strict=True):
        assert relative(one, other) <= TOLERANCE


def test_only_one_slice_of_attention_is_held_at_a_time() -> None:
    q, k, v = (mx.random.normal((1, 8, 1024, 16)) for _ in range(3))
    mx.eval(q, k, v)

    def peak() -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()

        def attend(*inputs: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(*inputs, scale=0.25, mask="causal")

        mx.eval(mx.vjp(attend, [q, k, v], [q])[1])
        return mx.get_peak_memory() - before

    whole = peak()
    with sliced_attention(1 << 20):
        assert peak() < 0.15 * whole


def test_a_long_row_costs_the_step_a_fraction_of_the_memory() -> None:
    """Half the length or vocabulary would do: the score matrices and the logits are never whole."""
    model = adapted("full", overrides={"vocab_size": 32_768})
    batch = random_batch(2, 512, 1.0)

    def peak(step: Any, **slices: int) -> int:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        step(model, batch, **slices)
        return mx.get_peak_memory() - before

    slices = {"loss_rows": 32, "attention_slice_bytes": 1 << 18}
    assert peak(loss_and_gradients, **slices) < 0.08 * peak(whole_loss_and_gradients)


def test_the_model_and_mlx_are_as_before_after_a_step_that_fails() -> None:
    model = adapted("full")
    classes = [type(layer) for layer in model.layers]
    attention = mx.fast.scaled_dot_product_attention
    bad = Batch(np.zeros((1, 8), int), np.zeros((1, 4), int), np.ones((1, 4), np.float32))
    model.layers[2].mlp.gate_proj = None
    with pytest.raises((TypeError, UmaError)):
        loss_and_gradients(model, bad)
    assert [type(layer) for layer in model.layers] == classes
    assert mx.fast.scaled_dot_product_attention is attention


def test_the_random_state_is_a_number_that_can_be_set() -> None:
    mx.random.seed(7)
    mx.random.normal((3,))
    state = random_state()
    drawn = mx.random.normal((3,)).tolist()
    with at_random_state(state):
        assert mx.random.normal((3,)).tolist() == drawn
    mx.random.seed(state)
    assert mx.random.normal((3,)).tolist() == drawn
