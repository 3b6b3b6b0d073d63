"""Operations laid out on paper against the graphs that MLX makes of the same functions."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from uma.engines.mlx_attention import gelu_tanh, rms_norm, rotary, whole_attention
from uma.memory.compile_fuse import fused, simplified
from uma.memory.mlx_plan import family_of
from uma.memory.mlx_program import Program, Value
from uma.memory.mlx_sample import Sample

ROWS, HEADS, GROUPS, LENGTH, WIDTH = 2, 4, 2, 16, 8
STREAM = (ROWS, LENGTH, HEADS * WIDTH)
Q, K = (ROWS, HEADS, LENGTH, WIDTH), (ROWS, GROUPS, LENGTH, WIDTH)
UNSEEN = {"Copy", "StopGradient"}  # views that an export leaves out

Function = tuple[Sequence[tuple[int, ...]], Callable[..., Any], Callable[..., Value]]

FUNCTIONS: dict[str, Function] = {
    "norm": (
        [STREAM, STREAM[2:]],
        lambda x, w: mx.fast.rms_norm(x, w, 1e-5),
        lambda p, x, w: rms_norm(p, x, w),
    ),
    "rotation": (
        [Q],
        lambda x: mx.fast.rope(x, WIDTH, traditional=False, base=1e4, scale=1.0, offset=0),
        lambda p, x: rotary(p, x, pairs=False),
    ),
    "rotation of neighbours": (
        [Q],
        lambda x: mx.fast.rope(x, WIDTH, traditional=True, base=1e4, scale=1.0, offset=0),
        lambda p, x: rotary(p, x, pairs=True),
    ),
    "causal attention": (
        [Q, K, K],
        lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal"),
        lambda p, q, k, v: whole_attention(p, q, k, v, None, causal=True),
    ),
    "gelu": ([STREAM], nn.gelu_approx, gelu_tanh),
    "low rank": (
        [STREAM, (HEADS * WIDTH, 3), (3, 24)],
        lambda x, a, b: 2.0 * ((x @ a) @ b),
        lambda p, x, a, b: p.scaled(p.matmul(p.matmul(x, a), b)),
    ),
    "parts": (
        [STREAM],
        lambda x: mx.concatenate([mx.split(x, [5], axis=-1)[0], x[..., 4:9]], axis=-1),
        lambda p, x: p.concatenate(
            [p.split(x, 2, (5, HEADS * WIDTH - 5))[0], p.slice(x, 2, 4, 9)], 2
        ),
    ),
}


def laid_out(name: str) -> tuple[Program, list[Value]]:
    """The gradients of a function on paper."""
    shapes, _, function = FUNCTIONS[name]
    p = Program()
    primals = [p.primal(p.source(*shape, width=4)) for shape in shapes]
    out = function(p, *primals)
    return p, p.vjp([(out, p.source(*out.shape, width=4))], primals)


def gradients(name: str) -> tuple[Callable[..., list[mx.array]], list[mx.array]]:
    """The same as MLX's own function of arrays."""
    shapes, function, _ = FUNCTIONS[name]
    given = [mx.random.normal(shape) for shape in shapes]
    out = function(*given)

    def run(*arrays: mx.array) -> list[mx.array]:
        *primals, cotangent = arrays
        return list(mx.vjp(lambda *x: [function(*x)], primals, [cotangent])[1])

    return run, [*given, mx.zeros_like(out)]


def needed(p: Program, roots: Sequence[Value]) -> list[Any]:
    """The operations that the roots need."""
    wanted = {x.number for x in roots}
    found = []
    for operation in reversed(p.operations):
        if wanted.intersection(operation.outputs):
            wanted.update(operation.inputs)
            found.append(operation)
    return found[::-1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_made_of_the_operations_of_mlx(name: str) -> None:
    run, inputs = gradients(name)
    events: list[dict[str, Any]] = []
    mx.disable_compile()
    try:
        mx.export_function(events.append, run, *inputs)
    finally:
        mx.enable_compile()
    theirs = Counter(
        (e["name"], tuple(e["outputs"][0][1]))
        for e in events
        if e["type"] == "primitive" and not (e["name"] == "Broadcast" and not e["inputs"][0][1])
    )
    p, roots = laid_out(name)
    kept, numbers = simplified(needed(p, roots), p.arrays, [x.number for x in roots])
    shapes = [list(p.shapes)[number] for number, _ in p.arrays]
    ours = Counter(
        (o.name, shapes[o.outputs[0]])
        for o in kept
        if not (o.name == "Broadcast" and not shapes[o.inputs[0]])
    )
    views = {"Reshape", "Flatten", "Unflatten"}  # which of them reshapes is the same to memory
    assert alike(ours, views) == alike(theirs, views)
    assert len(numbers) == len(roots)


def alike(found: Counter[Any], views: set[str]) -> Counter[Any]:
    """Names and shapes of operations that make arrays or views, but for how views are named."""
    result: Counter[Any] = Counter()
    for (name, shape), count in found.items():
        if name in UNSEEN or not shape:
            continue
        result["reshape" if name in views else name, shape] += count
    return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_kernels_are_made_as_by_mx_compile(name: str, tmp_path: Path) -> None:
    run, inputs = gradients(name)
    compiled: Any = mx.compile(run)
    mx.export_to_dot(str(tmp_path / "graph.dot"), *compiled(*inputs))
    labels = [
        line.split('"')[1]
        for line in (tmp_path / "graph.dot").read_text().splitlines()
        if "label" in line
    ]
    p, roots = laid_out(name)
    kept, numbers = simplified(needed(p, roots), p.arrays, [x.number for x in roots])
    made = fused(kept, p.arrays, numbers)
    ours = Counter("Compiled" if o.name == "Compiled" else "other" for o in made)
    theirs = Counter("Compiled" if x.startswith("Compiled") else "other" for x in labels)
    assert ours["Compiled"] == theirs["Compiled"]


def test_a_plan_serves_programs_of_other_sizes() -> None:
    found = []
    for length in (LENGTH, 2 * LENGTH):
        p = Program()
        x = p.primal(p.source(ROWS, length, WIDTH, width=4))
        out = rms_norm(p, x, p.source(WIDTH, width=4))
        roots = p.vjp([(out, p.source(*out.shape, width=4))], [x])
        found.append((family_of(p.structure(roots)), p.above(roots, "cpu", compiled=True)))
    assert found[0][0] is found[1][0]
    assert len(found[0][0].plans) == len(found[0][0].courses) == 1
    assert found[1][1] == pytest.approx(2 * found[0][1], rel=0.1)


def product(p: Program, rows: int, *, longer: bool = False) -> list[Value]:
    x = p.source(rows, WIDTH, width=4)
    x = p.multiply(x, p.source(rows, WIDTH, width=4))
    x = p.matmul(x, p.swapped(x))
    return [p.unary("Exp", x) if longer else x]


def sample_of(rows: int, *, by_chance: bool = False) -> Sample[int]:
    return Sample(product, rows, 23, "metal", by_chance=by_chance)


def test_programs_of_one_structure_follow_what_another_has_added() -> None:
    cases = [(sample_of(rows), rows) for rows in (LENGTH, 4096)]
    assert cases[0][0].family is cases[1][0].family
    for longer in (False, True):
        for sample, rows in cases:
            p = Program()
            alone = p.above(product(p, rows, longer=longer), "metal")
            assert sample.above(longer, partial(product, longer=longer)) == alone


@pytest.mark.parametrize("first", [WIDTH, LENGTH])
def test_sizes_that_are_equal_by_chance_have_the_plans_of_others(first: int) -> None:
    """As many rows as columns give one shape, where there are three of other sizes."""
    samples = {rows: sample_of(rows, by_chance=True) for rows in (first, WIDTH, LENGTH)}
    assert samples[WIDTH].family is samples[LENGTH].family
    for rows, sample in samples.items():
        p = Program()
        alone = p.above(product(p, rows, longer=True), "metal")
        assert sample.above("longer", partial(product, longer=True)) == alone


def test_operations_that_are_equal_by_chance_alone_make_another_family() -> None:
    """Two broadcasts of one array are one where ``mx.compile`` finds them equal."""

    def lay_out(p: Program, rows: int) -> list[Value]:
        x = p.source(1, 1, width=4)
        wide = [p.unary("Exp", p.broadcast_to(x, (n, WIDTH))) for n in (rows, LENGTH)]
        return [p.matmul(y, p.swapped(y)) for y in wide]

    apart, equal = (Sample(lay_out, n, 23, "cpu", by_chance=True) for n in (5, LENGTH))
    assert apart.family is not equal.family
    p = Program()
    alone = p.above(lay_out(p, LENGTH), "cpu", compiled=True)
    assert equal.above("compiled", lay_out, compiled=True) == alone
