"""The shipped configurations of real models."""

import json
from pathlib import Path
from typing import Any

import uma
from uma.architecture import architecture_from_config

MODELS = Path(uma.__file__).parent / "data" / "models"


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def supported() -> list[str]:
    """Names of the shipped configurations that mlx-lm has a module for."""
    names = [path.stem for path in sorted(MODELS.glob("*.json"))]
    return [name for name in names if architecture_from_config(config_of(name)).module]
