"""What --emit writes for PyTorch ran there: tests/data/emitted.json, by check_torch_emitted.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import emitted_cases as cases
import pytest

from uma.engines.transformers import weights_term
from uma.errors import UsageError
from uma.plan.emit.device_map import modules_of, placement
from uma.plan.emit.training import training_configuration
from uma.plan.training.stack import Stack
from uma.workload import Sharding

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data/emitted.json").read_text("utf-8")
)


@pytest.mark.parametrize("case", cases.ACCELERATE)
def test_the_script_that_ran_under_accelerate_is_what_is_written(case: str) -> None:
    assert cases.accelerate_script(case) == RECORDED["accelerate"][case]["text"]


@pytest.mark.parametrize("case", cases.TRAINING)
def test_the_file_that_ran_or_was_accepted_is_what_is_written(case: str) -> None:
    assert training_configuration(*cases.TRAINING[case]) == RECORDED["training"][case]["text"]


@pytest.mark.parametrize("case", cases.ACCELERATE)
def test_each_place_held_the_bytes_that_the_script_tells(case: str) -> None:
    """Parameters as loaded; bitsandbytes' scales are no parameters, rotary frequencies neither."""
    rooms, scheme = cases.ACCELERATE[case]
    told = placement(cases.ARCHITECTURE, rooms, scheme).size_bytes
    held = RECORDED["accelerate"][case]["parameter_bytes"]
    for place, name in ((0, "card"), ("cpu", "cpu"), ("disk", "disk")):
        widths = {key.split()[1]: size for key, size in held.items() if key.startswith(name)}
        assert ("int8" in widths) == (scheme == "int8" and name == "card")
        assert ("uint8" in widths) == (scheme == "nf4" and name == "card")
        assert sum(widths.values()) == pytest.approx(told.get(place, 0), rel=0.07)


def test_modules_on_the_host_stay_in_16_bits_and_the_answers_near() -> None:
    for found in RECORDED["accelerate"].values():
        assert found["printed"]
        assert found["relative_error"] < 0.2
    part = RECORDED["accelerate"]["8 bits on card, host and disk"]["parameter_bytes"]
    assert {"card int8", "cpu bfloat16", "disk bfloat16"} <= part.keys()
    assert not any("float32" in key for key in part)


def test_a_quantized_model_that_fits_the_card_is_placed_as_a_whole() -> None:
    size = weights_term(cases.ARCHITECTURE, "int8").size_bytes
    layer = modules_of(cases.ARCHITECTURE)[0].children[1].children[0].size_bytes
    found = placement(cases.ARCHITECTURE, {0: size + layer, "cpu": 1 << 30}, "int8")
    assert found.device_map == {"": 0}
    assert found.size_bytes[0] == pytest.approx(size, rel=0.001)  # and rotary frequencies


def test_trained_adapters_are_those_that_were_asked_for() -> None:
    """Two arrays a matrix: 7 matrices in each of 6 layers; DoRA has a third, and two matrices."""
    saved = {case: found.get("saved_arrays") for case, found in RECORDED["training"].items()}
    assert saved["LoRA"] == saved["QLoRA"] == 2 * 7 * 6
    assert saved["DoRA of two matrices"] == 3 * 2 * 6
    assert saved["LoRA of an 8-bit base, last layers"] == 2 * 7 * 2
    assert saved["full"] == saved["full, last layers"] == 9 * 6 + 3


def test_deepspeed_read_the_stages_and_places_that_were_planned() -> None:
    for case, (target, training) in cases.TRAINING.items():
        if target != "deepspeed":
            continue
        found, spread = RECORDED["training"][case]["accepted"], training.workload.sharding
        places = {"": None, "host": "cpu", "disk": "nvme"}
        wanted = [places[spread.offload_optimizer], places[spread.offload_parameters]]
        assert found["stage"] == found["stage_by_accelerate"] == spread.zero_stage
        assert found["offload"] == wanted
        assert found["rows"] == 16


def test_accelerate_read_fsdp_as_planned() -> None:
    sharded, hosted = (
        RECORDED["training"][case]["accepted"] for case in ("FSDP", "FSDP, 16 bits, on the host")
    )
    assert sharded["version"] == 2
    assert sharded["processes"] == 8
    assert sharded["reshard_after_forward"]
    assert (sharded["activation_checkpointing"], hosted["activation_checkpointing"]) == (
        True,
        False,
    )
    assert (sharded["offload"], hosted["offload"]) == ("OffloadPolicy", "CPUOffloadPolicy")
    assert (sharded["mixed_precision"], hosted["mixed_precision"]) == ("bf16", "no")
    adapters = RECORDED["training"]["FSDP 1, LoRA"]["accepted"]
    assert (adapters["version"], adapters["processes"]) == (1, 4)
    assert adapters["strategy"] == "FULL_SHARD"


def test_a_script_for_fsdp_in_16_bits_mixes_no_precision() -> None:
    spread = Sharding(data=8, zero_stage=3, fsdp=True)
    pure = cases.training(method="full", sharding=spread)
    mixed = replace(pure, stack=Stack(precision="mixed"))
    assert "bf16=True" not in training_configuration("peft", pure)
    assert "bf16=True" in training_configuration("peft", mixed)


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("deepspeed", {}, "--zero-stage"),
        ("deepspeed", {"sharding": Sharding(data=2, zero_stage=3, fsdp=True)}, "--emit fsdp"),
        ("fsdp", {}, "--devices"),
        (
            "fsdp",
            {"sharding": Sharding(data=4, zero_stage=3, offload_optimizer="host")},
            "deepspeed",
        ),
        ("peft", {"optimizer": "muon"}, "no optimizer 'muon'"),
        ("peft", {"sharding": Sharding(data=2, tensor=2)}, "Trainer"),
        ("peft", {"quantized": "gptq"}, "base in gptq"),
        ("peft", {"grad_checkpoint": 2}, "every layer"),
        ("peft", {"loss": "sliced"}, "slices"),
        ("peft", {"method": "full", "dtype": "float16"}, "GradScaler"),
    ],
)
def test_what_the_programs_cannot_do_is_refused_with_a_way_out(
    target: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        training_configuration(target, cases.training(**changes))


def test_on_one_device_deepspeed_is_told_to_offload_and_split_nothing() -> None:
    spread = Sharding(data=1, zero_stage=3, offload_optimizer="host")
    text = training_configuration("deepspeed", cases.training(method="full", sharding=spread))
    assert "one device: nothing is split" in json.loads(text)["why"]["zero_optimization.stage"]
