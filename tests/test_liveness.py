"""Peaks of graphs written by hand, against arithmetic and against MLX running the same."""

from collections.abc import Iterator

import pytest

from uma.memory.array_layout import effect, rows
from uma.memory.liveness import (
    MAX_ACTIVE_TASKS,
    MAX_WIDTH,
    Graph,
    Operation,
    evaluation,
    evaluation_order,
)
from uma.memory.timeline import DISPATCHES_PER_TASK

MEGABYTE = 1 << 20
SIDE = 512  # a matrix of float32 with so many rows and columns is one megabyte


def chain(*names: str, held: bool = True) -> Graph:
    """Operations one after another, each on the result of the one before."""
    operations = tuple(Operation(name, (i,), (i + 1,)) for i, name in enumerate(names))
    arrays = [rows((SIDE, SIDE), 4)] * (len(names) + 1)
    kept = {0, len(names)} if held else {len(names)}
    return Graph(arrays, operations, (0,), (len(names),), frozenset(kept))


def most(graph: Graph, tasks_ahead: int = 0, dispatched: int = 0) -> int:
    return evaluation(graph, evaluation_order(graph), "cpu").run(tasks_ahead, dispatched).peak


def test_an_elementwise_operation_overwrites_a_dying_input() -> None:
    assert most(chain("Exp", "Sin", "Cos", held=False)) == MEGABYTE
    assert most(chain("Exp", "Sin", "Cos")) == 2 * MEGABYTE


def test_a_view_takes_no_memory() -> None:
    view = Operation("Transpose", (0,), (1,), ((1, 0),))
    graph = Graph([rows((SIDE, SIDE), 4)] * 2, (view,), (0,), (1,), frozenset({0, 1}))
    assert most(graph) == MEGABYTE


def test_a_result_that_is_needed_twice_is_not_overwritten_by_the_first_use() -> None:
    exp, sin = Operation("Exp", (0,), (1,)), Operation("Sin", (1,), (2,))
    both = Operation("Add", (1, 2), (3,))
    arrays = [rows((SIDE, SIDE), 4)] * 4
    graph = Graph(arrays, (exp, sin, both), (0,), (3,), frozenset({0, 3}))
    assert most(graph) == 3 * MEGABYTE


def test_buffers_are_freed_when_the_task_of_ten_dispatches_that_used_them_has_run() -> None:
    """A product is one dispatch and its freeing another, so five products make a task."""
    products = tuple(Operation("Matmul", (i, 0), (i + 1,)) for i in range(30))
    arrays = [rows((SIDE, SIDE), 4)] * 31
    graph = Graph(arrays, products, (0,), (30,), frozenset({0, 30}))
    a_task = DISPATCHES_PER_TASK // 2
    assert most(graph) == (1 + a_task + 1) * MEGABYTE
    assert most(graph, tasks_ahead=2) == (1 + 3 * a_task + 1) * MEGABYTE
    assert most(graph, tasks_ahead=MAX_ACTIVE_TASKS) == 31 * MEGABYTE


def test_an_operation_runs_as_late_as_it_can() -> None:
    first, second = Operation("Exp", (0,), (1,)), Operation("Sin", (0,), (2,))
    later = Operation("Cos", (2,), (3,))
    both = Operation("Add", (1, 3), (4,))
    arrays = [rows((2, 2), 4)] * 5
    graph = Graph(arrays, (first, second, later, both), (0,), (4,), frozenset({0, 4}))
    assert [operation.name for operation in evaluation_order(graph)] == ["Sin", "Cos", "Exp", "Add"]


def test_a_wide_graph_is_ordered_one_branch_at_a_time() -> None:
    wide = 2 * MAX_WIDTH
    leaves = tuple(Operation("Exp", (0,), (1 + i,)) for i in range(wide))
    whole = Operation("Concatenate", tuple(range(1, wide + 1)), (wide + 1,), (0,))
    arrays = [rows((2, 2), 4)] * (wide + 2)
    graph = Graph(arrays, (*leaves, whole), (0,), (wide + 1,), frozenset({0, wide + 1}))
    assert len(evaluation_order(graph)) == wide + 1


def test_a_broadcast_operand_makes_a_result_of_full_size() -> None:
    column, matrix = rows((SIDE, 1), 4), rows((SIDE, SIDE), 4)
    (wide,) = effect("Broadcast", ((SIDE, SIDE),), (column,), (matrix,)).outputs
    assert (wide.strides, wide.spanned, wide.row) == ((1, 0), SIDE, False)
    (out,) = effect("Multiply", (), (wide, wide), (matrix,)).outputs
    assert out.nbytes == MEGABYTE


def test_a_reshape_of_a_transposed_array_copies_and_one_of_whole_rows_does_not() -> None:
    x, flat = rows((4, 6), 4), rows((24,), 4)
    assert effect("Reshape", ((24,),), (x,), (flat,)).shares
    (turned,) = effect("Transpose", ((1, 0),), (x,), (rows((6, 4), 4),)).outputs
    assert not effect("Reshape", ((24,),), (turned,), (flat,)).shares


@pytest.fixture
def serial() -> Iterator[None]:
    """MLX under a limit of one byte, so that it waits for every task, and without compiling."""
    mx = pytest.importorskip("mlx.core")
    former = mx.set_memory_limit(1)
    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.set_memory_limit(former)


@pytest.mark.usefixtures("serial")
@pytest.mark.parametrize("count", [3, 12, 40])
def test_mlx_measures_the_peak_of_a_chain_of_products(count: int) -> None:
    """Whole to the buffer: the worker may free one earlier than the most that can be waiting."""
    mx = pytest.importorskip("mlx.core")
    x = mx.zeros((SIDE, SIDE))
    mx.eval(x)
    mx.synchronize()
    before = mx.get_active_memory() - x.nbytes
    mx.reset_peak_memory()
    y = x
    for _ in range(count):
        y = y @ x
    mx.eval(y)
    mx.synchronize()
    products = tuple(Operation("Matmul", (i, 0), (i + 1,)) for i in range(count))
    arrays = [rows((SIDE, SIDE), 4)] * (count + 1)
    graph = Graph(arrays, products, (0,), (count,), frozenset({0, count}))
    found = max(most(graph, dispatched=start) for start in range(DISPATCHES_PER_TASK))
    measured = mx.get_peak_memory() - before
    assert found - MEGABYTE <= measured <= found
