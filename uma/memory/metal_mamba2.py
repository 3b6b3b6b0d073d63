"""The operations of a Mamba-2 mixer on Metal (mlx-lm 0.32.2, ``nemotron_h.py``, ``ssm.py``).

``ssm_attn`` computes a block of 256 tokens by the pairs of its tokens, in float32, in some thirty
operations: they fill command buffers much faster than their few large arrays would tell.
"""

from typing import TYPE_CHECKING

from uma.architecture.layers import Recurrent
from uma.memory.activations import SSM_STEP
from uma.quantization import FLOAT32

if TYPE_CHECKING:
    from uma.memory.metal_activations import Tape


def mamba2(tape: "Tape", mixer: Recurrent, hidden_size: int, normed: int) -> int:
    """Projection, convolution, blocks of pairs, gated norm, projection."""
    conv = next(state.shape[-1] for state in mixer.states if "conv" in state.name)
    inner, heads, rows = mixer.inner_size, mixer.num_heads, tape.call.rows
    width = inner + conv + heads
    x = tape.run(width, normed, weights=width * hidden_size)
    x = tape.run(conv, x)  # joined with the former inputs, in two copies
    tape.run(0, in_place=x)
    x = tape.run(conv, x)  # convolved
    tape.run(0, in_place=x)  # silu
    y = _kernel(tape, mixer, x) if tape.call.tokens == 1 else _blocks(tape, mixer, conv, x)
    skipped = tape.run(inner, x)  # x * D
    tape.run(0, skipped, in_place=y)
    for _ in ("gated", "norm", "weight"):
        tape.run(0, elements=rows * inner, in_place=y)
    return tape.run(hidden_size, y, weights=inner * hidden_size)


def _kernel(tape: "Tape", mixer: Recurrent, x: int) -> int:
    """One token: the step size, and one kernel that makes the output and the new state."""
    state = next(s for s in mixer.states if "conv" not in s.name)
    size = tape.call.batch_size
    for dim in state.shape:
        size *= dim
    tape.run(mixer.num_heads, x, dtype_bytes=FLOAT32)
    tape.run(0, x, elements=size, dtype_bytes=FLOAT32)
    return tape.run(mixer.inner_size, x)


def _blocks(tape: "Tape", mixer: Recurrent, conv: int, x: int) -> int:
    heads, inner, tokens = mixer.num_heads, mixer.inner_size, tape.call.tokens
    dt = tape.run(heads, x, dtype_bytes=FLOAT32)
    for _ in ("exp", "negative"):
        tape.run(0, elements=heads, dtype_bytes=FLOAT32)
    dta = tape.run(heads, dt, dtype_bytes=FLOAT32)
    dtx = tape.run(inner, x, dtype_bytes=FLOAT32)
    tape.run(0, dt, in_place=dtx)
    starts = range(0, tokens, SSM_STEP)
    for start in starts:
        block = min(SSM_STEP, tokens - start)
        carried = bool(start or tape.call.cached_tokens)
        y = _block(tape, mixer, conv, block, carried, (x, dta, dtx))
    if len(starts) > 1:
        y = tape.run(inner)  # the blocks joined, a copy of each
        for _ in starts[1:]:
            tape.run(0, in_place=y)
    return y


def _block(
    tape: "Tape", mixer: Recurrent, conv: int, block: int, carried: bool, arrays: tuple[int, ...]
) -> int:
    x, dta, dtx = arrays
    heads, batch = mixer.num_heads, tape.call.batch_size
    width, state = next(s for s in mixer.states if "conv" not in s.name).shape[-2:]
    groups = max(1, (conv - mixer.inner_size) // (2 * state))
    pairs, rows = batch * heads * block**2, batch * block

    def wide(elements: int, *inputs: int) -> int:
        return tape.run(0, *inputs, elements=elements, dtype_bytes=FLOAT32)

    cb = tape.run(0, x, elements=batch * groups * block**2)
    if groups < heads:
        cb = tape.run(0, cb, elements=pairs)  # repeated for the heads
    decay = wide(pairs, dta)  # repeated
    decay = _lower(tape, decay, pairs, block)
    for _ in ("sum", "exp"):
        tape.run(0, in_place=decay)
    scores = wide(pairs, cb)  # in float32
    tape.run(0, decay, in_place=scores)
    scores = _lower(tape, scores, pairs, block)
    y = wide(rows * mixer.inner_size, scores, dtx)
    b = tape.run(0, x, elements=batch * heads * state * block)  # repeated for the heads
    scaled = wide(rows * mixer.inner_size, dtx, decay)
    b = wide(batch * heads * state * block, b)
    new = wide(batch * heads * width * state, scaled, b)
    if carried:
        sums = wide(rows * heads, dta)
        tape.run(0, in_place=sums)
        tape.run(0, wide(batch * heads * width * state, sums), in_place=new)
        before = wide(rows * mixer.inner_size, wide(rows * groups * state, x))
        tape.run(0, sums, in_place=before)
        tape.run(0, before, in_place=y)
    return tape.run(0, y, elements=rows * mixer.inner_size)


def _lower(tape: "Tape", array: int, pairs: int, block: int) -> int:
    """``mx.tril``: two ranges, their comparison, and a choice between the array and zero."""
    for _ in ("rows", "columns"):
        tape.run(0, elements=block)
    mask = tape.run(0, elements=block**2, dtype_bytes=1)
    return tape.run(0, array, mask, elements=pairs, dtype_bytes=FLOAT32)
