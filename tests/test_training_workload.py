"""Combinations of training options that mean nothing are explained, not computed."""

from typing import Any

import pytest

from uma.errors import UsageError
from uma.workload import Sharding, TrainingWorkload


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "full", "quantized": "nf4"}, "quantized weights have no gradient"),
        ({"method": "full", "targets": ("q_proj",)}, "full training has none"),
        ({"rank": 0, "optimizer": "adamw-8bit"}, "nothing would be trained"),
        ({"optimizer": "adagrad"}, "known are adam"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"grad_checkpoint": -1}, "0 is none"),
        ({"sharding": Sharding(zero_stage=2)}, "on one device shards nothing"),
        ({"sharding": Sharding(data=2, zero_stage=4)}, "not one of 0, 1, 2, 3"),
        ({"sharding": Sharding(data=2, offload_parameters="host")}, "ZeRO stage 3 only"),
        ({"sharding": Sharding(data=6, zero_stage=3, shard_group=4)}, "that it divides"),
        (
            {
                "optimizer": "paged-adamw",
                "sharding": Sharding(data=2, zero_stage=2, offload_optimizer="host"),
            },
            "offload or page, not both",
        ),
    ],
)
def test_a_meaningless_combination_is_explained(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        TrainingWorkload(**options)


def test_the_defaults_are_those_of_mlx_lm() -> None:
    pytest.importorskip("mlx_lm")
    from mlx_lm.lora import CONFIG_DEFAULTS

    asked = TrainingWorkload()
    assert asked.rank == CONFIG_DEFAULTS["lora_parameters"]["rank"]
    assert asked.num_layers == CONFIG_DEFAULTS["num_layers"]
    assert asked.batch_size == CONFIG_DEFAULTS["batch_size"]
    assert asked.max_seq_length == CONFIG_DEFAULTS["max_seq_length"]
    assert asked.optimizer == CONFIG_DEFAULTS["optimizer"]
    assert bool(asked.grad_checkpoint) == CONFIG_DEFAULTS["grad_checkpoint"]


def test_offloading_on_one_device_is_allowed_as_deepspeed_allows_it() -> None:
    asked = TrainingWorkload(sharding=Sharding(zero_stage=2, offload_optimizer="host"))
    assert asked.sharding.devices == 1
