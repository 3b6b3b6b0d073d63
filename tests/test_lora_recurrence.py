"""Recurrences in chunks against mlx-lm's own, run over all tokens at once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta, ssm
from test_lora_step import adapted, random_batch, relative

from uma.memory.recurrence import LONGEST, SHORTEST, delta_chunk, scan_chunk
from uma.runtime.lora.recurrence import chunked_recurrences
from uma.runtime.lora.tape import Tape

ROWS, HEADS, WIDTH, STATE, LENGTH = 2, 4, 8, 16, 75  # a length that no chunk divides
TOLERANCE = 1e-5


def scan(*inputs: mx.array) -> Any:
    x, dt, b, c, a_log, d, dt_bias, *state = inputs
    return ssm.ssm_attn(x, a_log, b, c, d, dt, dt_bias, *state)


def scan_inputs() -> list[mx.array]:
    shapes = [(ROWS, LENGTH, HEADS, WIDTH), (ROWS, LENGTH, HEADS)]
    shapes += [(ROWS, LENGTH, 2, STATE)] * 2 + [(HEADS,)] * 3
    return [mx.random.normal(shape) for shape in shapes]


def delta(*inputs: mx.array) -> Any:
    q, k, v, g, beta, state = inputs
    return gated_delta.gated_delta_ops(q, k, v, mx.sigmoid(g), mx.sigmoid(beta), state)


def delta_inputs() -> list[mx.array]:
    heads = [(ROWS, LENGTH, HEADS // 2, STATE)] * 2 + [(ROWS, LENGTH, HEADS, WIDTH)]
    gates = [(ROWS, LENGTH, HEADS)] * 2 + [(ROWS, HEADS, WIDTH, STATE)]
    return [0.3 * mx.random.normal(shape) for shape in heads + gates]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    mx.random.seed(3)


def gradients(run: Callable[..., Any], inputs: list[mx.array], chunked: bool) -> list[mx.array]:
    """Outputs, the last state, and the gradients of a number made of both."""
    weights = [mx.random.normal(out.shape) for out in run(*inputs)]

    def number(*inputs: mx.array) -> mx.array:
        with chunked_recurrences() if chunked else nullcontext():
            out, state = run(*inputs)
        return (out * weights[0]).sum() + (state * weights[1]).sum()

    with chunked_recurrences() if chunked else nullcontext():
        outputs = list(run(*inputs))
    found = mx.grad(number, argnums=list(range(len(inputs))))(*inputs)
    return [*outputs, *found]


@pytest.mark.parametrize(("run", "inputs"), [(scan, scan_inputs), (delta, delta_inputs)])
def test_outputs_states_and_gradients_are_those_of_one_pass(run: Any, inputs: Any) -> None:
    given = inputs()
    mx.random.seed(4)
    wanted = gradients(run, given, chunked=False)
    mx.random.seed(4)
    found = gradients(run, given, chunked=True)
    assert len(found) == len(wanted) == len(given) + 2
    assert all(relative(a, b) <= TOLERANCE for a, b in zip(found, wanted, strict=True))


def test_a_scan_that_begins_with_a_state_goes_on_from_it() -> None:
    given = [*scan_inputs(), mx.random.normal((ROWS, HEADS, WIDTH, STATE))]
    mx.random.seed(4)
    wanted = gradients(scan, given, chunked=False)
    mx.random.seed(4)
    found = gradients(scan, given, chunked=True)
    assert all(relative(a, b) <= TOLERANCE for a, b in zip(found, wanted, strict=True))


def test_masked_rows_are_left_to_mlx_lm() -> None:
    x, dt, b, c, a_log, d, dt_bias = scan_inputs()
    mask = mx.arange(LENGTH)[None] >= mx.array([[0], [9]])
    whole, _ = ssm.ssm_attn(x, a_log, b, c, d, dt, dt_bias, mask=mask)
    with chunked_recurrences():
        found, _ = ssm.ssm_attn(x, a_log, b, c, d, dt, dt_bias, mask=mask)
    assert mx.array_equal(found, whole)


def test_the_functions_of_mlx_lm_are_back_afterwards() -> None:
    before = ssm.ssm_attn, gated_delta.gated_delta_ops
    with chunked_recurrences():
        assert ssm.ssm_attn is not before[0]
    assert (ssm.ssm_attn, gated_delta.gated_delta_ops) == before


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_recurrent_layer_needs_a_third_of_the_memory_at_most(kind: str) -> None:
    model, batch = adapted(kind), random_batch(length=256)
    peaks = []
    for chunks in (nullcontext(), chunked_recurrences()):
        with chunks:
            tape = Tape(model, batch.tokens)
            tape.tail(batch.targets.reshape(-1), batch.weights.reshape(-1), 16)
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            tape.backward()
            peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 3


@pytest.mark.parametrize("length", [1, 100, 5000, 10**6])
def test_chunks_are_powers_of_two_within_mlx_lm_own(length: int) -> None:
    for chunk in (scan_chunk(length, 64 * 128), delta_chunk(length)):
        assert chunk & (chunk - 1) == 0
        assert SHORTEST <= chunk <= LONGEST
