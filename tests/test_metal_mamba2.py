"""The operations of a Mamba-2 mixer, against the graph of mlx-lm's own ``ssm_attn``."""

from collections import Counter

import mlx.core as mx
import pytest
from mlx_lm.models.ssm import ssm_attn

from uma.architecture.layers import Recurrent, State
from uma.memory.activations import Call
from uma.memory.metal_activations import Tape
from uma.memory.metal_mamba2 import mamba2

HEADS, DIM, GROUPS, WIDTH = 8, 16, 2, 32
INNER = HEADS * DIM
CONV = INNER + 2 * GROUPS * WIDTH
MIXER = Recurrent(
    "mamba2",
    (State("conv", (3, CONV), "model"), State("ssm", (HEADS, DIM, WIDTH), "float32")),
    HEADS,
    DIM,
    INNER,
)
VIEWS = frozenset(
    {"AsStrided", "Broadcast", "ExpandDims", "Slice", "Split", "Squeeze", "Transpose"}
)


def graph_arrays(batch: int, tokens: int, dtype: mx.Dtype) -> Counter[int]:
    """How many operations of ``ssm_attn`` write an array of so many elements.

    Views write none; reshaping what was broadcast (``mx.repeat``) is a copy.
    """
    events: list[dict] = []

    def callback(event: dict) -> None:
        events.append(event)

    def run(x: mx.array, b: mx.array, c: mx.array, dt: mx.array, more: mx.array) -> list[mx.array]:
        y, state = ssm_attn(x, more, b, c, more.astype(x.dtype), dt, more)
        return [y, state]

    mx.export_function(
        callback,
        run,
        mx.zeros((batch, tokens, HEADS, DIM), dtype),
        mx.zeros((batch, tokens, GROUPS, WIDTH), dtype),
        mx.zeros((batch, tokens, GROUPS, WIDTH), dtype),
        mx.zeros((batch, tokens, HEADS), dtype),
        mx.zeros((HEADS,), mx.float32),
    )
    sizes: Counter[int] = Counter()
    for event in events:
        if event["type"] == "primitive" and event["name"] not in VIEWS:
            for _, shape, _ in event["outputs"]:
                elements = 1
                for dim in shape:
                    elements *= dim
                sizes[elements] += 1
    return sizes


def tape_of(batch: int, tokens: int) -> Tape:
    tape = Tape(Call(tokens, 0, batch), 1.0)
    mamba2(tape, MIXER, 64, tape.array(batch * tokens * 64))
    return tape


@pytest.mark.parametrize(("batch", "tokens"), [(1, 100), (3, 64), (1, 256)])
def test_as_many_arrays_span_the_pairs_of_a_block_as_in_mlx_lms_graph(
    batch: int, tokens: int
) -> None:
    pairs = batch * HEADS * tokens**2
    written = sum(touched[-1][1] == pairs for touched, _, _ in tape_of(batch, tokens).operations)
    assert written == graph_arrays(batch, tokens, mx.bfloat16)[pairs]


def test_a_second_block_is_as_many_operations_more() -> None:
    one, two, three = (len(tape_of(1, tokens).operations) for tokens in (256, 512, 768))
    assert three - two == two - one + 1 - 2  # only the first joins the copies of two blocks
    assert len(tape_of(1, 1).operations) < one


def test_what_is_allocated_grows_faster_than_the_tokens_and_slower_than_their_pairs() -> None:
    small, large = (
        sum(size for _, size, _ in tape_of(1, tokens).operations) for tokens in (64, 256)
    )
    assert 8 * small < large < 16 * small
