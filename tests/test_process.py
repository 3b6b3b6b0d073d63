"""Memory of this process, and the highest sum of two counters."""

import itertools
import sys
import time

import pytest

from uma.measurement.process import Sampler, read_process_memory
from uma.units import MIB


def test_this_process_holds_memory_and_its_peak_is_no_lower() -> None:
    memory = read_process_memory()
    assert memory.current_bytes > 5 * MIB
    assert memory.kind == ("footprint" if sys.platform == "darwin" else "resident")
    assert memory.peak_bytes is not None
    assert memory.peak_bytes >= memory.current_bytes


def test_the_highest_sum_is_not_the_sum_of_the_highest() -> None:
    values = itertools.chain([(5, 0), (3, 4), (0, 6)], itertools.repeat((1, 1)))
    with Sampler(lambda: next(values), interval_s=0.001) as sampler:
        while sampler.samples < 4:
            time.sleep(0.001)
    assert (sampler.max_active_bytes, sampler.max_pool_bytes) == (5, 6)
    assert sampler.max_total_bytes == 7


def test_a_block_shorter_than_the_interval_is_still_sampled_at_both_ends() -> None:
    held = [1]
    with Sampler(lambda: (held[0], 0), interval_s=60) as sampler:
        while not sampler.samples:
            time.sleep(0.001)
        held[0] = 9
    assert sampler.max_total_bytes == 9
    assert sampler.samples == 2


def test_an_error_of_the_counters_is_raised_at_the_end() -> None:
    def read() -> tuple[int, int]:
        raise RuntimeError("no counters")

    with pytest.raises(RuntimeError, match="no counters"), Sampler(read):
        pass


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_counters() -> None:
    def read() -> tuple[int, int]:
        raise RuntimeError("no counters")

    with pytest.raises(KeyError), Sampler(read):
        raise KeyError


def test_counters_of_mlx_show_an_array_and_then_its_buffer_in_the_pool() -> None:
    mx = pytest.importorskip("mlx.core")
    mx.clear_cache()
    before = mx.get_active_memory()
    former = mx.set_cache_limit(32 * MIB)
    with Sampler(lambda: (mx.get_active_memory(), mx.get_cache_memory()), 0.001) as sampler:
        array = mx.zeros((4 * MIB,))
        mx.eval(array)
        time.sleep(0.05)
        del array
        time.sleep(0.05)
    mx.clear_cache()
    mx.set_cache_limit(former)
    assert sampler.max_active_bytes - before == pytest.approx(16 * MIB, abs=64 * 1024)
    assert sampler.max_pool_bytes == pytest.approx(16 * MIB, abs=64 * 1024)
    assert sampler.max_total_bytes - before < 20 * MIB
