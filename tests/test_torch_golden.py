"""The torch engine against PyTorch's, transformers' and PEFT's own objects (``check_torch.py``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.engines.torch_asked import step
from uma.engines.torch_model import Model, Settings, optimizer_states, trained_elements
from uma.memory.loss import TRANSFORMERS
from uma.workload import TrainingWorkload

GOLDEN = json.loads((Path(__file__).parent / "data/torch_training.json").read_text())
TARGETS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "all": (), "": ()}
PEAK_TOLERANCE = 0.1


def model_of(row: dict[str, Any]) -> Model:
    family = row.get("family", "llama")
    config = {"model_type": family, "rms_norm_eps": 1e-6, "rope_theta": 1e4, **GOLDEN["config"]}
    config |= GOLDEN["experts"].get(family, {})
    workload = TrainingWorkload(
        method=row["method"],
        rank=GOLDEN["rank"],
        targets=TARGETS[row["targets"]],
        num_layers=None,
        batch_size=GOLDEN["batch_size"],
        max_seq_length=GOLDEN["length"],
        grad_checkpoint=int(row["checkpoint"]),
        optimizer="adamw",
        dtype=row["dtype"],
    )
    settings = Settings(
        autocast=False,
        kernel="eager",
        copies=TRANSFORMERS,
        inputs_need_gradients=row["checkpoint"],
        sorted_experts=True,  # integrations/moe.py, grouped_mm_experts_forward
    )
    return Model(architecture_from_config(config), workload, settings)


def named(row: dict[str, Any]) -> str:
    family = row.get("family", "")
    return f"{family} {row['method']} {row['targets']} {row['dtype']} {'ck' * row['checkpoint']}"


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=named)
def test_trained_elements_and_states_are_those_of_the_objects(row: dict[str, Any]) -> None:
    model = model_of(row)
    assert trained_elements(model) == row["trained_elements"]
    assert optimizer_states(model).device_bytes == row["state_bytes"]
    width = row["gradient_bytes"] // row["trained_elements"]
    assert width == (model.weight_width if model.trains_all else model.settings.adapter_width)


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=named)
def test_the_peak_of_a_step_is_that_of_all_storages_alive(row: dict[str, Any]) -> None:
    """CUDA's softmax makes one product more going backward than the CPU's: all pairs in float32."""
    found = step(model_of(row))
    predicted = max(found.forward_bytes, found.backward_bytes)
    heads = GOLDEN["config"]["num_attention_heads"]
    product = 4 * GOLDEN["batch_size"] * heads * GOLDEN["length"] ** 2
    assert predicted > (1 - PEAK_TOLERANCE) * row["peak_bytes"]
    assert predicted - product < (1 + PEAK_TOLERANCE) * row["peak_bytes"]
