"""Published models of the catalog, by the short names that surveys use."""

from functools import cache
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.catalog import aliases, find_model, model_config, words


@cache
def config_of(name: str) -> dict[str, Any]:
    (hf_id,) = aliases()[words(name)]
    model = find_model(hf_id)
    assert model is not None
    return model_config(model).values


@cache
def architecture_of(name: str) -> Architecture:
    return architecture_from_config(config_of(name))
