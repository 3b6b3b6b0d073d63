"""State over devices against DeepSpeed's documented figures and ZeRO's own."""

from typing import Any

import pytest

from uma.memory.sharding import Moved, States, communication_bytes, placed
from uma.units import GIB
from uma.workload import Sharding

T5_3B, T5_LAYER = 2_851_000_000, 32_000_000  # DeepSpeed, docs/source/memory.rst: 8 GPUs


@pytest.mark.parametrize(
    ("stage", "offloaded", "beside_bytes", "device_gib"),
    [
        (2, ("host", ""), 0, 5.31),
        (2, ("", ""), 2 * T5_3B, 15.93),  # it prints whole 16-bit gradients too
        (3, ("host", "host"), 4 * T5_LAYER, 0.12),  # a layer is gathered
        (3, ("host", ""), 4 * T5_LAYER, 0.79),
        (3, ("", ""), 4 * T5_LAYER, 6.10),
    ],
)
def test_parts_of_t5_3b_are_those_that_deepspeed_documents(
    stage: int, offloaded: Any, beside_bytes: int, device_gib: float
) -> None:
    """16-bit weights, float32 gradients, copies and moments."""
    whole = States(2 * T5_3B, 4 * T5_3B, 12 * T5_3B)
    optimizer, parameters = offloaded
    spread = Sharding(
        data=8, zero_stage=stage, offload_optimizer=optimizer, offload_parameters=parameters
    )
    device = placed(whole, spread).device.total_bytes + beside_bytes
    assert device / GIB == pytest.approx(device_gib, abs=0.01)


def test_zero_of_7_5_billion_parameters_on_64_devices_is_that_of_the_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB, with K = 12."""
    parameters = 7_500_000_000
    whole = States(2 * parameters, 2 * parameters, 12 * parameters)
    sizes = [
        placed(whole, Sharding(data=64, zero_stage=stage)).device.total_bytes / 1e9
        for stage in (0, 1, 2, 3)
    ]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)


def sent(spread: Sharding, parameters: int = 100, gradients: int = 100, **more: Any) -> Any:
    return communication_bytes(Moved(States(parameters, gradients, 600), **more), spread)


def test_stage_3_moves_half_as_much_again_as_data_parallelism() -> None:
    plain = sent(Sharding(data=8))
    sharded = sent(Sharding(data=8, zero_stage=3))
    assert sum(sharded.values()) == pytest.approx(1.5 * sum(plain.values()), abs=2)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeeds_stages_1_and_2_move_half_as_much_again(stage: int) -> None:
    """Where ZeRO, section 7.1, has a reduce-scatter, DeepSpeed takes an all-reduce."""
    moved = sent(Sharding(data=10, zero_stage=stage), 1000, 1000)
    assert moved == {"gradients": 2 * 1000 * 9 // 10, "parameters": 1000 * 9 // 10}
    assert sent(Sharding(data=10), 1000, 1000) == {"gradients": 2 * 1000 * 9 // 10}


def test_megatron_reduces_the_stream_four_times_a_layer() -> None:
    """Shoeybi et al. 2019, section 3: two all-reduces forward and two backward."""
    found = sent(Sharding(tensor=2), stream_bytes=100, layers=3)
    assert found == {"tensor": 3 * 4 * 2 * 100 // 2}


def test_a_sequence_on_twice_as_many_devices_is_half_as_much_for_each_to_send() -> None:
    """DeepSpeed-Ulysses, section 3.2: 4 N h / P a layer on P devices."""
    small, large = (
        sent(Sharding(sequence=count), attention_bytes=2 * 4 << 20)["sequence"] for count in (8, 16)
    )
    assert small == 2 * 2 * 4 * (1 << 20) // 8 * 7 // 8
    assert large / small == pytest.approx(0.5 * (15 / 16) / (7 / 8), rel=1e-6)


def test_a_stage_of_a_pipeline_sends_the_stream_once_and_its_gradient_back() -> None:
    found = sent(Sharding(pipeline=4), stream_bytes=100, layers=8, batches=5)
    assert found == {"pipeline": 2 * 5 * 100}


def test_infinity_reads_and_writes_the_states_on_the_disk() -> None:
    spread = Sharding(data=2, zero_stage=3, offload_optimizer="disk", offload_parameters="disk")
    found = sent(spread, float32_gradient_bytes=200)
    states, gradients = 2 * 600 // 2, 2 * 200 // 2
    parameters = 2 * 100 // 2
    assert found["disk"] == states + gradients + parameters + 100 // 2  # and what was trained
    sums, update, trained = 2 * 100 // 2, 200 // 2, 100 // 2
    assert found["host"] == sums + update + trained + parameters


def test_what_comes_back_from_the_host_are_trained_parameters_alone() -> None:
    spread = Sharding(zero_stage=2, offload_optimizer="host")
    found = sent(spread, parameters=1000, gradients=7, float32_gradient_bytes=14)
    assert found == {"host": 14 + 7}


def test_sums_of_offloaded_gradients_come_up_again_for_each_batch_but_the_first() -> None:
    spread = Sharding(zero_stage=2, offload_optimizer="host")
    found = sent(spread, gradients=7, float32_gradient_bytes=14, batches=3)
    assert found == {"host": 14 + 7 + 5 * 7}


def test_fsdp_copies_down_gradients_and_up_the_parameters_of_each_pass() -> None:
    everything = {"offload_optimizer": "host", "offload_parameters": "host"}
    spread = Sharding(data=2, zero_stage=3, fsdp=True, **everything)  # type: ignore[arg-type]
    each = sent(spread, 100, 60, batches=4)
    assert each["host"] == 4 * 60 // 2 + 2 * 4 * 100 // 2
    summed = sent(spread, 100, 60, batches=4, sums_first=True)
    assert summed["host"] == 60 // 2 + 2 * 4 * 100 // 2
    assert (each["gradients"], summed["gradients"]) == (4 * 60 // 2, 60 // 2)


def test_offloading_moves_the_optimizer_and_its_gradients_to_the_host() -> None:
    whole = States(2, 2, 12)
    found = placed(whole, Sharding(data=1, zero_stage=2, offload_optimizer="host"))
    assert (found.device.total_bytes, found.host.total_bytes) == (2, 14)


def test_hybrid_sharding_splits_within_its_group_and_reduces_between_groups() -> None:
    spread = Sharding(data=16, zero_stage=3, shard_group=8)
    assert placed(States(80, 0, 0), spread).device.parameter_bytes == 10
    assert sent(spread, 80, 80)["groups"] == 10
