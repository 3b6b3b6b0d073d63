"""Optimizers by name, with a learning rate that may follow a schedule."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.optimizers as optim

from uma.errors import UsageError
from uma.runtime.lora.adam8bit import AdamW8bit

Name = Literal["adam", "adamw", "adamw8bit", "adafactor", "lion", "muon", "sgd"]

_CLASSES: dict[str, Any] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": optim.Adafactor,
    "lion": optim.Lion,
    "muon": optim.Muon,
    "sgd": optim.SGD,
}
_OWN = {"adafactor": {"relative_step": False, "scale_parameter": False}}
"""Where MLX's default would pass over the learning rate."""

SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")


def make_optimizer(
    name: str,
    learning_rate: float,
    *,
    warmup: int = 0,
    decay_updates: int | None = None,
    schedule: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """An optimizer with MLX's own defaults, but for ``settings``.

    ``warmup`` updates rise linearly from 0; with ``decay_updates`` the rate then falls along a
    cosine to 0 at that update. A ``schedule`` of mlx_lm.lora's form takes the place of all three.

    Raises:
        UsageError: If a name is unknown, or an argument does not fit.
    """
    if name not in _CLASSES:
        raise UsageError(f"unknown optimizer {name!r}; known: {', '.join(get_args(Name))}")
    given = _OWN.get(name, {}) | dict(settings or {})
    known = [*inspect.signature(_CLASSES[name].__init__).parameters][2:]
    if wrong := [key for key in given if key not in known]:
        raise UsageError(f"{name} has no setting {wrong[0]!r}; it has {', '.join(known)}")
    rate = _rate(learning_rate, warmup, decay_updates) if schedule is None else _schedule(schedule)
    try:
        return _CLASSES[name](learning_rate=rate, **given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"settings of {name}: {error}") from None


def _rate(learning_rate: float, warmup: int, decay_updates: int | None) -> Any:
    rate: Any = learning_rate
    if decay_updates is not None:
        rate = optim.cosine_decay(learning_rate, max(1, decay_updates - warmup))
    if warmup:
        rising = optim.linear_schedule(0.0, learning_rate, warmup)
        rate = optim.join_schedules([rising, rate if callable(rate) else _constant(rate)], [warmup])
    return rate


def _constant(rate: float) -> Any:
    return lambda _: mx.array(rate)


def _schedule(asked: Mapping[str, Any]) -> Any:
    """What ``mlx_lm.tuner.utils.build_schedule`` makes of it.

    Raises:
        UsageError: If the name is unknown, or the arguments do not fit.
    """
    from mlx_lm.tuner.utils import build_schedule

    known = ("name", "arguments", "warmup", "warmup_init")
    if wrong := [key for key in asked if key not in known]:
        raise UsageError(f"a schedule has no {wrong[0]!r}; it has {', '.join(known)}")
    name, arguments = asked.get("name"), asked.get("arguments")
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    expected = inspect.signature(getattr(optim, name))
    try:
        expected.bind(*(arguments or ()))
        rate = build_schedule(dict(asked))
        if not math.isfinite(float(rate(mx.array(0)).item())):
            raise ValueError("the rate is not finite")
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UsageError(
            f"arguments {arguments!r} of {name} do not fit {name}{expected}: {error}"
        ) from None
    return rate
