"""The largest model of the catalog that a training fits."""

from dataclasses import replace

from uma.architecture import architecture_from_config
from uma.catalog import find_model, model_config
from uma.catalog.listed import ListedModel, listed_models
from uma.errors import UmaError
from uma.memory.weights import weight_bytes
from uma.plan.training.case import TrainingCase
from uma.plan.training.checks import check
from uma.plan.training.verdict import Needs
from uma.quantization import quantization_for

NEARBY = 24  # of as many smaller ones, and a quarter as many larger ones, the largest that fits


def largest_model(case: TrainingCase) -> ListedModel | None:
    """The model with most parameters that trains as ``case`` does; ``None`` where none fits.

    Memory grows with the parameters, but not strictly, and some models are not laid out: the
    search halves the list, then looks down from a few larger ones.
    """
    models = [model for model in listed_models() if model.parameters]
    low, high = 0, len(models)
    while low < high:
        middle = (low + high) // 2
        if _fits(case, models[middle]):
            low = middle + 1
        else:
            high = middle
    nearby = models[max(0, low - NEARBY) : low + NEARBY // 4]
    return next((model for model in reversed(nearby) if _fits(case, model)), None)


def _fits(case: TrainingCase, model: ListedModel) -> bool:
    try:
        found = _with_model(case, model)
        check(found)
        return Needs().fits(found)
    except UmaError:
        return False


def _with_model(case: TrainingCase, model: ListedModel) -> TrainingCase:
    row = find_model(model.hf_id)
    assert row is not None
    architecture = architecture_from_config(model_config(row).values)
    layers = case.workload.num_layers
    workload = replace(
        case.workload, num_layers=None if layers is None else min(layers, len(architecture.layers))
    )
    if case.engine == "torch":
        return replace(case, architecture=architecture, workload=workload)
    weights = weight_bytes(architecture, quantization_for(case.mlx_bits))
    return replace(case, architecture=architecture, workload=workload, weights=weights)
