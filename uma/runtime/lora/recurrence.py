"""Recurrent layers in chunks of tokens, forward and backward, with the state carried on.

mlx-lm 0.32.2 keeps what every token or pair of tokens made until the gradient (``ssm.py``,
``ssm_attn``; ``gated_delta.py``, ``gated_delta_ops``). Here the states between chunks are kept, and
each chunk is computed again when its gradient is due. The arithmetic is mlx-lm's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from uma.memory.recurrence import delta_chunk, scan_chunk

Run = Callable[[Sequence[mx.array], Sequence[mx.array], mx.array], tuple[mx.array, mx.array]]
"""``(sequences, constants, state) -> (outputs, state)``; tokens are the second axis."""


Place = tuple[int, int]
"""First token of a chunk and the one after its last."""


@contextmanager
def chunked_recurrences() -> Iterator[None]:
    """Within, mlx-lm's Mamba-2 and gated delta rule work chunk by chunk."""
    from mlx_lm.models import gated_delta, ssm

    scan, delta = ssm.ssm_attn, gated_delta.gated_delta_ops
    ssm.ssm_attn, gated_delta.gated_delta_ops = _scan(scan), _delta(delta)
    try:
        yield
    finally:
        ssm.ssm_attn, gated_delta.gated_delta_ops = scan, delta


def _scan(whole: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        **options: Any,
    ) -> Any:
        rows, length, heads, head_dim = x.shape
        chunk = scan_chunk(length, head_dim * B.shape[-1])
        given = A_log, B, C, D, dt, dt_bias, state, time_step_limit
        if length <= chunk or any(value is not None for value in options.values()):
            return whole(x, *given, **options)

        def run(sequences: Any, constants: Any, state: mx.array) -> Any:
            (x, B, C, dt), (A_log, D, dt_bias) = sequences, constants
            return whole(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit)

        if state is None:
            state = mx.zeros((rows, heads, head_dim, B.shape[-1]), mx.float32)
        return _by_chunks(run, (x, B, C, dt), (A_log, D, dt_bias), state, chunk)

    return scan


def _delta(whole: Callable[..., Any]) -> Callable[..., Any]:
    def delta(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> Any:
        length = q.shape[1]
        chunk = delta_chunk(length)
        if length <= chunk or mask is not None or state is None:
            return whole(q, k, v, g, beta, state, mask)

        def run(sequences: Any, _: Any, state: mx.array) -> Any:
            return whole(*sequences, state)

        return _by_chunks(run, (q, k, v, g, beta), (), state, chunk)

    return delta


def _by_chunks(
    run: Run,
    sequences: Sequence[mx.array],
    constants: Sequence[mx.array],
    state: mx.array,
    chunk: int,
) -> tuple[mx.array, mx.array]:
    """``run`` over all tokens; its backward recomputes one chunk at a time from its first state."""
    count, length = len(sequences), sequences[0].shape[1]
    places = [(at, min(at + chunk, length)) for at in range(0, length, chunk)]

    @mx.custom_function
    def scan(*inputs: mx.array) -> Any:
        return _forward(run, count, places, inputs)

    @scan.vjp
    def _(inputs: Any, cotangents: Any, outputs: Any) -> Any:
        states = [inputs[-1], *outputs[2:]]
        return _backward(run, count, places, inputs, states, cotangents)

    made: Any = scan(*sequences, *constants, state)
    return made[0], made[1]


def _forward(run: Run, count: int, places: list[Place], inputs: Sequence[mx.array]) -> Any:
    """Outputs, the last state, and the states before all chunks but the first."""
    state = inputs[-1]
    outputs: list[mx.array] = []
    states: list[mx.array] = []
    for place in places:
        parts = _cut(_after(outputs[-1:], inputs)[:count], place)
        states.append(state)
        output, state = run(parts, inputs[count:-1], state)
        outputs.append(output)
    return mx.concatenate(outputs, axis=1), state, *states[1:]


def _backward(
    run: Run,
    count: int,
    places: list[Place],
    inputs: Sequence[mx.array],
    states: Sequence[mx.array],
    cotangents: Sequence[mx.array],
) -> tuple[mx.array, ...]:
    """Gradients of all inputs, from the last chunk to the first."""
    by_state = cotangents[1]
    total: list[mx.array] = []
    done: list[mx.array] = []
    found: list[list[mx.array]] = []
    for place, state in zip(reversed(places), reversed(states), strict=True):
        primals = [*_cut(_after(done, inputs)[:count], place), *inputs[count:-1], state]
        given = [*_cut(cotangents[:1], place), by_state]
        *new, by_state = mx.vjp(lambda *x: run(x[:count], x[count:-1], x[-1]), primals, given)[1]
        found.append(new[:count])
        sums = [a + b for a, b in zip(total, new[count:], strict=True)] if total else []
        total = sums or new[count:]
        done = [*new, by_state, *total]
    by_parts = zip(*reversed(found), strict=True)
    joined = [mx.concatenate(list(parts), axis=1) for parts in by_parts]
    return (*joined, *total, by_state)


def _cut(arrays: Sequence[mx.array], place: Place) -> list[mx.array]:
    return [x[:, place[0] : place[1]] for x in arrays]


def _after(done: Sequence[mx.array], inputs: Sequence[mx.array]) -> list[mx.array]:
    """``inputs``, none of which can be read before ``done`` is evaluated."""
    if not done:
        return list(inputs)
    found: list[mx.array] = mx.depends(list(inputs), list(done))
    return found
