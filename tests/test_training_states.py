"""What training keeps, to the byte, against the objects that mlx-lm and MLX make."""

from typing import Any

import pytest

from uma.architecture import architecture_from_config
from uma.engines.mlx_training import optimizer_bytes, trained_arrays
from uma.errors import UsageError
from uma.memory.adapters import adapter_elements
from uma.workload import TrainingWorkload

mx = pytest.importorskip("mlx.core")

import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402
from models import CONFIGS  # noqa: E402
from oracle.build import build  # noqa: E402
from oracle.tiny import TINY  # noqa: E402

RANK = 4
OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
}


def trained_model(config: dict[str, Any], method: str, num_layers: int) -> Any:
    """mlx-lm's model as ``mlx_lm.lora`` prepares it (``lora.py``, ``train_model``)."""
    model = build(config)
    model.freeze()
    if method == "full":
        for layer in model.layers[-num_layers:]:
            layer.unfreeze()
    else:
        parameters = {"rank": RANK, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, num_layers, parameters, use_dora=method == "dora")
    return model


def trained_bytes(model: Any) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.trainable_parameters()))


def workload_of(method: str, **changes: Any) -> TrainingWorkload:
    return TrainingWorkload(method=method, rank=RANK, num_layers=2, dtype="float32", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(TINY))
def test_lora_adapters_are_those_of_mlx_lm_for_every_module(name: str) -> None:
    config = {"model_type": name, **TINY[name]}
    layers = 2
    model = trained_model(config, "lora", layers)
    arrays = trained_arrays(architecture_from_config(config), workload_of("lora"))
    assert sum(a.size_bytes for a in arrays) == trained_bytes(model)


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent", "side_by_side"])
def test_dora_has_a_float32_magnitude_for_every_row(kind: str) -> None:
    config = CONFIGS[kind]
    arrays = trained_arrays(architecture_from_config(config), workload_of("dora"))
    assert sum(a.size_bytes for a in arrays) == trained_bytes(trained_model(config, "dora", 2))


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"chunked"}))
def test_full_fine_tuning_trains_every_array_of_the_last_layers(kind: str) -> None:
    config = CONFIGS[kind]
    model = trained_model(config, "full", 2)
    arrays = trained_arrays(architecture_from_config(config), workload_of("full"))
    assert sum(a.size_bytes for a in arrays) == trained_bytes(model)


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_optimizer_states_are_those_of_mlx(optimizer: str, method: str) -> None:
    config = CONFIGS["full"]
    model = trained_model(config, method, 2)
    real = OPTIMIZERS[optimizer](learning_rate=1e-5)
    real.init(model.trainable_parameters())
    kept = sum(value.nbytes for _, value in tree_flatten(real.state))
    workload = workload_of(method, optimizer=optimizer)
    arrays = trained_arrays(architecture_from_config(config), workload)
    assert optimizer_bytes(workload, arrays) == kept


def test_dora_of_stacked_experts_is_refused_as_mlx_lm_refuses_it() -> None:
    architecture = architecture_from_config(CONFIGS["moe"])
    with pytest.raises(UsageError, match="DoRA has no form"):
        trained_arrays(architecture, workload_of("dora"))
    with pytest.raises(ValueError, match="doesn't support DoRA"):
        trained_model(CONFIGS["moe"], "dora", 2)


def test_more_layers_than_the_model_has_are_refused() -> None:
    architecture = architecture_from_config(CONFIGS["full"])
    with pytest.raises(UsageError, match="the model has 4 layers"):
        adapter_elements(architecture, TrainingWorkload(num_layers=5))


def test_targets_that_no_matrix_has_are_named_with_those_there_are() -> None:
    architecture = architecture_from_config(CONFIGS["full"])
    with pytest.raises(UsageError, match=r"named wqkv; its last 2 layers have .*q_proj"):
        adapter_elements(architecture, TrainingWorkload(num_layers=2, targets=("wqkv",)))
