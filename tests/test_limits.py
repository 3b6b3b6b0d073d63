"""MLX's limits: in force inside the block, the former ones back after it, whatever happens."""

import subprocess
import sys

import pytest

mx = pytest.importorskip("mlx.core")

from uma.runtime.backend import backend  # noqa: E402
from uma.runtime.limits import device_facts, memory_limits  # noqa: E402
from uma.runtime.measure import PhaseMeter  # noqa: E402

MIB = 1 << 20


def limits_now() -> tuple[int, int]:
    """The cache and memory limits, read by setting them, for MLX has no getter."""
    cache = mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    memory = mx.set_memory_limit(0)
    mx.set_memory_limit(memory)
    return cache, memory


def test_limits_hold_inside_the_block_and_are_put_back() -> None:
    former = limits_now()
    with memory_limits(wired=MIB, cache=3 * MIB, memory=50 * MIB):
        assert limits_now() == (3 * MIB, 50 * MIB)
        with memory_limits(cache=MIB):
            assert limits_now() == (MIB, 50 * MIB)
        assert limits_now() == (3 * MIB, 50 * MIB)
    assert limits_now() == former


def test_limits_are_put_back_after_an_error() -> None:
    former = limits_now()
    with pytest.raises(KeyboardInterrupt), memory_limits(cache=MIB, memory=MIB):
        raise KeyboardInterrupt
    assert limits_now() == former


def test_a_limit_that_cannot_be_set_leaves_the_others_as_they_were() -> None:
    former = limits_now()
    with pytest.raises(TypeError), memory_limits(memory=50 * MIB, cache=-1):
        pass
    assert limits_now() == former


def test_the_pool_obeys_the_cache_limit() -> None:
    with memory_limits(cache=MIB):
        mx.eval(mx.zeros((8 * MIB,), mx.uint8))
        assert mx.get_cache_memory() <= MIB


def test_the_cpu_has_no_wired_limit_and_no_working_set() -> None:
    if backend() == "metal":
        pytest.skip("this is about the CPU")
    assert mx.set_wired_limit(MIB) == 0
    assert mx.set_wired_limit(MIB) == 0
    assert "max_recommended_working_set_size" not in device_facts()


def test_a_memory_limit_makes_evaluation_wait_and_changes_no_value() -> None:
    """Many independent large steps run ahead of their frees; not under a limit."""
    program = """
import mlx.core as mx
from uma.runtime.limits import memory_limits
import sys
with memory_limits(memory=int(sys.argv[1]), cache=0):
    x = mx.ones((1 << 20,))
    mx.eval(x)
    mx.reset_peak_memory()
    total = mx.zeros(())
    for i in range(60):
        total = total + mx.sin(x * i).sum()
    mx.eval(total)
    print(mx.get_peak_memory(), total.item())
"""
    free, held = (
        subprocess.run(
            [sys.executable, "-c", program, str(limit)], capture_output=True, text=True, check=True
        ).stdout.split()
        for limit in (1 << 40, 1)
    )
    assert free[1] == held[1]
    assert int(held[0]) < 0.5 * int(free[0])


def test_the_meter_gives_each_phase_its_own_peak() -> None:
    meter = PhaseMeter()
    before = mx.get_active_memory()
    meter.enter("prefill")
    mx.eval(mx.zeros((40 * MIB,), mx.uint8))
    meter.enter("decode")
    kept = mx.zeros((10 * MIB,), mx.uint8)
    mx.eval(kept)
    meter.finish()
    assert meter.peaks["prefill"] - before == pytest.approx(40 * MIB, abs=MIB)
    assert meter.peaks["decode"] - before == pytest.approx(10 * MIB, abs=30 * MIB)
    assert meter.peak_bytes == meter.peaks["prefill"]
    assert meter.active_and_pool_bytes >= meter.peaks["decode"]


def test_the_meter_sees_buffers_in_the_pool() -> None:
    mx.clear_cache()
    meter = PhaseMeter()
    meter.enter("prefill")
    with memory_limits(cache=100 * MIB):
        mx.eval(mx.zeros((40 * MIB,), mx.uint8))
        meter.finish()
    assert meter.pool_bytes >= 40 * MIB
    mx.clear_cache()
