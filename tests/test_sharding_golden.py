"""State of one device against DeepSpeed's, FSDP's and accelerate's (``check_sharding.py``)."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from uma.architecture.layers import Architecture, Parameter
from uma.engines import torch_deepspeed
from uma.engines.torch_deepspeed import beside_states, deepspeed_terms
from uma.engines.torch_model import Model, Settings
from uma.memory.sharding import Moved, States, communication_bytes, placed
from uma.workload import Sharding, TrainingWorkload

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
    keys = ("model", "stage", "offload", "batches", "devices", "nodes")
    return " ".join(str(row[key]) for key in keys if key in row)


def states_of(row: dict[str, Any]) -> States:
    size = elements(row)
    return States(HALF * size, HALF * size, 3 * FLOAT32 * size)


def spread_of(row: dict[str, Any]) -> Sharding:
    optimizer = "host" if row["offload"] else ""
    parameters = "host" if row["offload"] == "all" else ""
    return Sharding(
        data=row["devices"],
        zero_stage=row["stage"],
        offload_optimizer=optimizer,  # type: ignore[arg-type]
        offload_parameters=parameters,  # type: ignore[arg-type]
    )


def trained(row: dict[str, Any]) -> Model:
    """The two linear layers of ``row`` as a model that is trained in full."""
    shapes = GOLDEN["shapes"][row["model"]]
    parameters = tuple(Parameter("p", tuple(shape), "matrix") for shape in shapes)
    workload = TrainingWorkload(
        method="full",
        num_layers=None,
        sharding=spread_of(row),
        grad_accumulation_steps=row["batches"],
    )
    architecture = Architecture("toy", None, 1, 1, None, False, (), parameters)
    return Model(architecture, workload, Settings(deepspeed=True))


@pytest.mark.parametrize("row", GOLDEN["deepspeed"], ids=named)
def test_zero_splits_weights_and_states_as_deepspeeds_own_objects_do(row: dict[str, Any]) -> None:
    found = placed(states_of(row), spread_of(row))
    states = found.host if row["offload"] else found.device
    weights = found.host if row["offload"] == "all" else found.device
    rounded = padding(row)
    kept = row["master_bytes"] + row["state_bytes"]
    assert 0 <= row["parameter_bytes"] - weights.parameter_bytes <= HALF * rounded
    assert 0 <= kept - states.optimizer_bytes <= 3 * FLOAT32 * rounded


@pytest.mark.parametrize("row", [r for r in GOLDEN["deepspeed"] if r["offload"]], ids=named)
def test_an_offloaded_optimizer_has_float32_gradients_and_16_bit_copies_on_the_host(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 bytes of each parameter, and copies of gradients in stages 1 and 2."""
    monkeypatch.setattr(torch_deepspeed, "_idle", lambda size: 0)  # the CPU pins nothing
    kinds = ["master", "state", "float32_gradient", "gradient_buffer", "weight_copy", "largest"]
    if row["offload"] == "all":
        kinds.append("parameter")
    kept = sum(row[f"{kind}_bytes"] for kind in kinds)
    model = trained(row)
    host, disk = beside_states(model)
    sums = row["stage"] == 2 and row["batches"] > 1
    # Sums are of whole parameters, of which this device has a half on average.
    summed = placed(states_of(row), spread_of(row)).host.gradient_bytes if sums else 0
    assert 0 < row["sum_bytes"] <= HALF * elements(row) if sums else row["sum_bytes"] == 0
    found = placed(states_of(row), spread_of(row)).host.total_bytes + host - summed
    assert 0 <= kept - found <= 22 * padding(row)
    assert disk == 0
    on_device = [t.size_bytes for t in deepspeed_terms(model) if "largest" in t.source]
    assert on_device == [row["largest_on_device_bytes"]]


@pytest.mark.parametrize("row", GOLDEN["deepspeed"], ids=named)
def test_devices_send_what_deepspeed_gives_to_its_collectives(row: dict[str, Any]) -> None:
    """An all-reduce sends twice what it is given, of which one of two devices has a half."""
    moved = Moved(states_of(row), batches=row["batches"])
    found = communication_bytes(moved, spread_of(row))
    given, few = row["sent_bytes"], 16  # norms and flags are reduced too
    gradients = (2 * given["all_reduce"] + given["reduce_scatter"]) // row["devices"]
    gathered = given["all_gather"] // row["devices"]
    passes = 2 * row["batches"]
    assert 0 <= gradients - found["gradients"] <= few + HALF * row["batches"] * padding(row)
    assert 0 <= gathered - found["parameters"] <= HALF * passes * padding(row)


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
