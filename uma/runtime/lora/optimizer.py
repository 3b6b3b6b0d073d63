"""MLX's optimizers by name, with a learning rate that may follow a schedule."""

from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.optimizers as optim

from uma.errors import UsageError

Name = Literal["adam", "adamw", "sgd", "lion", "adafactor", "muon"]

_CLASSES = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
    "muon": optim.Muon,
}


def make_optimizer(
    name: str, learning_rate: float, *, warmup: int = 0, decay_updates: int | None = None
) -> Any:
    """An optimizer of MLX with its own defaults.

    ``warmup`` updates rise linearly from 0; with ``decay_updates`` the rate then falls along a
    cosine to 0 at that update.

    Raises:
        UsageError: If the name is unknown.
    """
    if name not in _CLASSES:
        raise UsageError(f"unknown optimizer {name!r}; known: {', '.join(get_args(Name))}")
    rate: Any = learning_rate
    if decay_updates is not None:
        rate = optim.cosine_decay(learning_rate, max(1, decay_updates - warmup))
    if warmup:
        rising = optim.linear_schedule(0.0, learning_rate, warmup)
        rate = optim.join_schedules([rising, rate if callable(rate) else _constant(rate)], [warmup])
    more = {"relative_step": False, "scale_parameter": False} if name == "adafactor" else {}
    return _CLASSES[name](learning_rate=rate, **more)


def _constant(rate: float) -> Any:
    return lambda _: mx.array(rate)
