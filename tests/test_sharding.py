"""State over devices against DeepSpeed's printed estimates and ZeRO's own figures."""

import pytest

from uma.memory.sharding import States, communication_bytes, deepspeed_estimate, placed
from uma.units import GIB
from uma.workload import Sharding

T5_3B, T5_LAYER = 2_851_000_000, 32_000_000  # DeepSpeed docs/memory.rst: 2851M, 32M, 8 GPUs


@pytest.mark.parametrize(
    ("stage", "offload", "device_gib", "host_gib"),
    [
        (2, "optimizer", 5.31, 127.48),
        (2, "", 15.93, None),
        (3, "all", 0.12, 127.48),
        (3, "optimizer", 0.79, 127.48),
        (3, "", 6.10, None),
    ],
)
def test_deepspeed_prints_these_for_t5_3b(
    stage: int, offload: str, device_gib: float, host_gib: float | None
) -> None:
    device, host = deepspeed_estimate(T5_3B, T5_LAYER, 8, stage=stage, offload=offload)  # type: ignore[arg-type]
    assert device / GIB == pytest.approx(device_gib, abs=0.01)
    if host_gib is not None:
        assert host / GIB == pytest.approx(host_gib, rel=0.002)


def test_zero_of_7_5_billion_parameters_on_64_devices_is_that_of_the_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB, with K = 12."""
    parameters = 7_500_000_000
    whole = States(2 * parameters, 2 * parameters, 12 * parameters)
    sizes = [
        placed(whole, Sharding(data=64, zero_stage=stage)).device.total_bytes / 1e9
        for stage in (0, 1, 2, 3)
    ]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)


def test_stage_3_moves_half_as_much_again_as_data_parallelism() -> None:
    plain = communication_bytes(100, 100, 0, Sharding(data=8))
    sharded = communication_bytes(100, 100, 0, Sharding(data=8, zero_stage=3))
    assert sum(sharded.values()) == pytest.approx(1.5 * sum(plain.values()), abs=2)


def test_offloading_moves_the_optimizer_and_its_gradients_to_the_host() -> None:
    whole = States(2, 2, 12)
    found = placed(whole, Sharding(data=1, zero_stage=2, offload_optimizer="host"))
    assert (found.device.total_bytes, found.host.total_bytes) == (2, 14)


def test_hybrid_sharding_splits_within_its_group_and_reduces_between_groups() -> None:
    spread = Sharding(data=16, zero_stage=3, shard_group=8)
    assert placed(States(80, 0, 0), spread).device.parameter_bytes == 10
    assert communication_bytes(80, 80, 0, spread)["groups"] == 10
