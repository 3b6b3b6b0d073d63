"""Temporary memory of a call, against MLX's own counters and against arithmetic by hand."""

from typing import Any

import pytest

from uma.architecture.layers import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Recurrent,
    State,
)
from uma.memory.activations import (
    Call,
    Transient,
    attended_tokens,
    held_bytes,
    kept_bytes,
    layer_transient,
    score_bytes,
)
from uma.memory.metal_activations import (
    IN_FLIGHT,
    MAX_ELEMENTS,
    MAX_OPERATIONS,
    LayerTape,
    is_fused,
    layer_tape,
    run_ahead,
)

FULL = Attention(8, 2, 64, 64)
SLIDING = Attention(8, 2, 64, 64, sliding_window=256)
LATENT = LatentAttention(8, 128, 32, 64, 64)
DELTA = Recurrent(
    "gated_delta",
    (State("conv", (3, 1024), "model"), State("delta", (8, 64, 64), "float32")),
    8,
    64,
    512,
)
CONVOLUTION = Recurrent("short_conv", (State("conv", (2, 256), "model"),), inner_size=256)


DENSE = FeedForward(768)


def layer(mixer: Any, feed_forward: Any = DENSE) -> Layer:
    return Layer((mixer,), (feed_forward,), ())


def test_scores_span_heads_tokens_and_attended_tokens() -> None:
    call = Call(512, 1536, batch_size=2, activation_bytes=4)
    assert score_bytes(FULL, call) == 2 * 8 * 512 * 2048 * 4


def test_a_sliding_window_attends_its_size_less_one_and_the_chunk() -> None:
    assert attended_tokens(SLIDING, Call(512, 100)) == 612
    assert attended_tokens(SLIDING, Call(512, 5000)) == 255 + 512


def test_scores_of_a_long_context_are_most_of_a_cpu_layer() -> None:
    call = Call(1024, 1024, activation_bytes=4)
    scores, mask = 8 * 1024 * 2048 * 4, 1024 * 2048
    residual, queries, output = 1024 * 512 * 4, 1024 * 512 * 4, 1024 * 512 * 4
    assert layer_transient(layer(FULL), 512, call) == Transient(
        residual + queries + output, scores + mask
    )


def test_a_short_chunk_needs_most_between_the_feed_forward_projections() -> None:
    call = Call(16, 0, activation_bytes=4)
    assert layer_transient(layer(FULL, FeedForward(4096)), 256, call) == Transient(
        16 * (2 * 256 + 3 * 4096) * 4
    )


@pytest.mark.parametrize("mixer", [FULL, SLIDING, LATENT, DELTA, CONVOLUTION])
@pytest.mark.parametrize("feed_forward", [DENSE, Experts(16, 4, 192, 192)])
def test_more_tokens_and_more_cached_ones_never_need_less(mixer: Any, feed_forward: Any) -> None:
    def size(tokens: int, cached: int) -> int:
        return layer_transient(layer(mixer, feed_forward), 256, Call(tokens, cached)).total

    for tokens in (64, 512):
        for cached in (2048, 4096):
            assert size(tokens, cached) <= size(2 * tokens, cached)
            assert size(tokens, cached) <= size(tokens, 2 * cached)


def test_16_bit_activations_need_half_of_float32_ones_in_long_contexts() -> None:
    wide = layer_transient(layer(FULL), 256, Call(512, 4096, activation_bytes=4))
    narrow = layer_transient(layer(FULL), 256, Call(512, 4096, activation_bytes=2))
    mask = 512 * 4608
    assert narrow.activations * 2 == wide.activations
    assert (narrow.attention - mask) * 2 == wide.attention - mask


def test_a_stepped_recurrence_holds_a_state_for_every_token_on_the_cpu() -> None:
    one = layer_transient(layer(DELTA), 256, Call(1000, activation_bytes=4)).total
    two = layer_transient(layer(DELTA), 256, Call(1001, activation_bytes=4)).total
    assert two - one >= 8 * 64 * 64 * 4


def test_the_inputs_of_a_convolution_live_to_the_end_of_the_call() -> None:
    call = Call(512, activation_bytes=4)
    assert held_bytes(layer(CONVOLUTION), call) == 512 * 256 * 4
    assert held_bytes(layer(DELTA), call) == 512 * 1024 * 4
    assert kept_bytes(layer(CONVOLUTION), call) == 512 * 256 * 4
    assert kept_bytes(layer(DELTA), call) == 0


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "tokens", "fused"),
    [
        (128, 128, 2048, True),
        (64, 64, 1, True),
        (256, 256, 2048, False),
        (256, 256, 1, True),
        (192, 128, 2048, False),
        (192, 128, 1, True),
        (48, 48, 1, False),
    ],
)
def test_metal_fuses_attention_for_these_head_sizes(
    head_dim: int, v_head_dim: int, tokens: int, fused: bool
) -> None:
    mixer = Attention(16, 2, head_dim, v_head_dim)
    assert is_fused(mixer, Call(tokens, 2048)) is fused


def test_metal_does_not_fuse_attention_over_a_quantized_cache() -> None:
    assert not is_fused(Attention(16, 2, 128, 128), Call(1, 2048, kv_bits=8))


def test_fused_attention_has_no_scores_and_unfused_has() -> None:
    fused = run_ahead([layer_tape(layer(Attention(8, 2, 64, 64)), 256, Call(512), 1.0)], 0)
    unfused = run_ahead([layer_tape(layer(Attention(8, 2, 256, 256)), 256, Call(512), 1.0)], 0)
    assert fused.attention == 0
    assert unfused.attention == 8 * 512 * 512 * 2


def test_command_buffers_hold_what_fits_their_elements_and_operations() -> None:
    """Operations that each touch a whole buffer's elements: eleven are held, and no more."""
    operation = (((0, MAX_ELEMENTS + 1),), 100, 10)
    assert run_ahead([LayerTape([operation] * 40)], 0) == Transient(100 * IN_FLIGHT, 10 * IN_FLIGHT)
    small = (((0, 1),), 1, 0)
    assert run_ahead([LayerTape([small] * 2000)], 0) == Transient((MAX_OPERATIONS + 1) * IN_FLIGHT)


def test_a_growing_cache_keeps_its_old_arrays_until_the_command_buffer_ends() -> None:
    still = run_ahead([layer_tape(layer(FULL), 256, Call(1, 511), 1.0)], 0)
    growing = run_ahead([layer_tape(layer(FULL), 256, Call(1, 511), 1.0, 1 << 20)], 0)
    assert growing.activations - still.activations == 1 << 20
