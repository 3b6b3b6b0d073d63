"""State of one device against DeepSpeed's, FSDP's and accelerate's (``check_sharding.py``)."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from uma.memory.sharding import States, deepspeed_estimate, placed
from uma.workload import Sharding

GOLDEN = json.loads((Path(__file__).parent / "data/torch_sharding.json").read_text())
FLOAT32, HALF = 4, 2


def elements(row: dict[str, Any]) -> int:
    return sum(prod(shape) for shape in GOLDEN["shapes"][row["model"]])


def padding(row: dict[str, Any]) -> int:
    """Elements that each array may be rounded up by, on one device."""
    return 0 if row["model"] == "even" else len(GOLDEN["shapes"][row["model"]])


def is_spread(row: dict[str, Any]) -> bool:
    return not row["offload"] and row["devices"] * row["nodes"] > 1


def named(row: dict[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("model", "stage", "devices", "nodes") if key in row)


@pytest.mark.parametrize("row", GOLDEN["deepspeed"], ids=named)
def test_zero_leaves_on_one_device_what_deepspeeds_own_objects_keep(row: dict[str, Any]) -> None:
    size = elements(row)
    whole = States(HALF * size, HALF * size, 3 * FLOAT32 * size)
    spread = Sharding(data=row["devices"], zero_stage=row["stage"])
    found = placed(whole, spread).device
    rounded = padding(row)
    kept = row["master_bytes"] + row["state_bytes"]
    assert 0 <= row["parameter_bytes"] - found.parameter_bytes <= HALF * rounded
    assert 0 <= kept - found.optimizer_bytes <= 3 * FLOAT32 * rounded


@pytest.mark.parametrize("row", GOLDEN["fsdp"], ids=named)
def test_a_fully_sharded_model_keeps_an_equal_part_of_everything(row: dict[str, Any]) -> None:
    """``fully_shard`` splits rows: the first device has up to one row of each array more."""
    size = elements(row)
    whole = States(HALF * size, HALF * size, 2 * HALF * size)
    found = placed(whole, Sharding(data=row["devices"], zero_stage=3, fsdp=True)).device
    shapes = GOLDEN["shapes"][row["model"]]
    rounded = sum(prod(shape[1:]) for shape in shapes) if padding(row) else 0
    assert 0 <= row["parameter_bytes"] - found.parameter_bytes <= HALF * rounded
    assert 0 <= row["gradient_bytes"] - found.gradient_bytes <= HALF * rounded
    assert 0 <= row["state_bytes"] - found.optimizer_bytes <= 2 * HALF * rounded


@pytest.mark.parametrize("row", GOLDEN["estimates"], ids=named)
def test_deepspeeds_estimators_print_the_same_bytes(row: dict[str, Any]) -> None:
    sizes = (row[key] for key in ("parameters", "largest_layer", "devices", "nodes"))
    device, host = deepspeed_estimate(*sizes, stage=row["stage"], offload=row["offload"])
    assert abs(device - row["device_bytes"]) <= 1
    assert abs(host - row["host_bytes"]) <= 1


@pytest.mark.parametrize("row", [row for row in GOLDEN["estimates"] if is_spread(row)], ids=named)
def test_the_partition_of_states_is_that_of_the_estimators(row: dict[str, Any]) -> None:
    """16-bit weights, float32 gradients, weights and two moments; stage 2 16-bit gradients too."""
    size, devices = row["parameters"], row["devices"] * row["nodes"]
    gradients = FLOAT32 + (HALF if row["stage"] == 2 else 0)
    whole = States(HALF * size, gradients * size, 3 * FLOAT32 * size)
    found = placed(whole, Sharding(data=devices, zero_stage=row["stage"])).device
    gathered = 4 * row["largest_layer"] if row["stage"] == 3 else 0
    assert abs(found.total_bytes + gathered - row["device_bytes"]) <= 3


def test_accelerate_counts_the_same_states_in_float32() -> None:
    told = GOLDEN["accelerate"]
    size = told["bytes"] // FLOAT32
    whole = States(FLOAT32 * size, FLOAT32 * size, 2 * FLOAT32 * size)
    assert placed(whole, Sharding()).device == States(
        told["model"], told["gradients"], told["optimizer"]
    )
    assert placed(whole, Sharding()).device.total_bytes == told["step"]
