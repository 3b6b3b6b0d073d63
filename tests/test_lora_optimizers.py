"""Optimizers and schedules by name: MLX's own, mlx_lm's schedules, and AdamW in bytes."""

import math
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import build_schedule

from uma.errors import UsageError
from uma.memory.optimizer_states import mlx_states
from uma.runtime.lora import adam8bit
from uma.runtime.lora.optimizer import Name, make_optimizer

SHAPE = (96, 64)


def descended(name: str, steps: int, **settings: Any) -> tuple[float, Any]:
    """How far from its goal a matrix is after so many noisy steps, of how far it was."""
    rng = np.random.default_rng(0)
    goal = mx.array(rng.standard_normal(SHAPE).astype(np.float32))
    model = nn.Linear(*SHAPE[::-1], bias=False)
    model.weight = mx.zeros(SHAPE)
    optimizer = make_optimizer(name, 0.02, settings=settings)
    for _ in range(steps):
        noise = mx.array(rng.standard_normal(SHAPE).astype(np.float32))
        gradient = (model.weight - goal) * (1 + 0.5 * noise)
        optimizer.update(model, {"weight": gradient})
        mx.eval(model.parameters(), optimizer.state)
    left: Any = mx.linalg.norm(model.weight - goal) / mx.linalg.norm(goal)
    return float(left.item()), optimizer


@pytest.mark.parametrize("name", get_args(Name))
def test_every_optimizer_descends(name: str) -> None:
    settings = {"weight_decay": 0.0} if name not in ("adam", "sgd") else {}
    left, _ = descended(name, 60, **settings)
    assert left < {"sgd": 0.5, "muon": 0.95}.get(name, 0.6)


def test_adamw_in_bytes_goes_where_adamw_goes() -> None:
    for steps in (30, 150):
        whole, _ = descended("adamw", steps)
        bytes_, _ = descended("adamw8bit", steps)
        assert bytes_ == pytest.approx(whole, rel=0.05, abs=0.01)


def test_its_states_take_a_byte_and_a_scale_for_256() -> None:
    _, optimizer = descended("adamw8bit", 1)
    arrays = [v for k, v in tree_flatten(optimizer.state) if k.startswith("weight.")]
    found = sum(value.nbytes for value in arrays)
    elements = math.prod(SHAPE)
    assert found == 2 * elements + 2 * 4 * elements // 256
    assert found == mlx_states("adamw-8bit", SHAPE, 4).device_bytes
    assert found < 0.26 * mlx_states("adamw", SHAPE, 4).device_bytes


def test_small_arrays_keep_float32_and_are_adamw_exactly() -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.update(one.parameters())
    gradients = {"weight": mx.ones((8, 8)) * 0.3, "bias": mx.ones(8)}
    for model, name in ((one, "adamw"), (other, "adamw8bit")):
        make_optimizer(name, 0.1).update(model, gradients)
    assert mx.array_equal(one.weight, other.weight)
    assert mlx_states("adamw-8bit", (8, 8), 4) == mlx_states("adamw", (8, 8), 4)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_in_the_mean_and_near_each_time(signed: bool) -> None:
    rng = np.random.default_rng(1)
    x = mx.array(np.exp(rng.uniform(-9, 0, (4, 256))).astype(np.float32))
    if signed:
        x = x * mx.array(rng.choice([-1, 1], (4, 256)).astype(np.float32))
    encode = adam8bit.encoded_signed if signed else adam8bit.SECOND.encoded
    decode = adam8bit.decoded_signed if signed else adam8bit.SECOND.decoded
    total = mx.zeros_like(x)
    for n in range(400):
        codes, scale = encode(x, mx.random.key(n))
        found = decode(codes, scale)
        assert (mx.abs(found - x) <= 0.12 * mx.abs(x) + 1e-6).all().item()
        total = total + found
    assert (mx.abs(total / 400 - x) <= 0.012 * mx.abs(x) + 1e-6).all().item()


def test_a_slow_average_still_moves() -> None:
    """Rounded to the nearest code it would stay: each step changes it by a thousandth."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = make_optimizer("adamw8bit", 0.0)
    for size, steps in ((1.0, 1), (0.5, 400)):
        gradient = {"weight": mx.ones((64, 64)) * size}
        for _ in range(steps):
            optimizer.update(model, gradient)
            mx.eval(optimizer.state)
    state = optimizer.state["weight"]
    average: Any = adam8bit.SECOND.decoded(state["v"], state["v_scale"]).mean()
    wanted = 0.25 + (0.001 - 0.25) * 0.999**400
    assert average.item() == pytest.approx(wanted, rel=0.02)


def test_squares_too_small_for_a_code_do_not_become_zero() -> None:
    x = mx.array([[1.0] + [1e-14] * 255])
    codes, _ = adam8bit.SECOND.encoded(x, mx.random.key(0))
    assert codes.min().item() == 1
    codes, _ = adam8bit.SECOND.encoded(mx.zeros((1, 256)), mx.random.key(0))
    assert codes.max().item() == 0


def test_a_resumed_state_goes_on_bit_for_bit() -> None:
    def run(steps: int, model: Any, optimizer: Any) -> None:
        for _ in range(steps):
            optimizer.update(model, {"weight": mx.sin(model.weight * 7) + 0.1})
            mx.eval(model.parameters(), optimizer.state)

    models = [nn.Linear(64, 96, bias=False) for _ in range(2)]
    for model in models:
        model.weight = mx.random.normal(SHAPE, key=mx.random.key(7))
    optimizer = make_optimizer("adamw8bit", 0.01)
    run(9, models[0], optimizer)
    first = make_optimizer("adamw8bit", 0.01)
    run(4, models[1], first)
    second = make_optimizer("adamw8bit", 0.01)
    second.state = tree_unflatten(tree_flatten(first.state))
    mx.random.seed(99)
    run(5, models[1], second)
    assert mx.array_equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine_decay", "arguments": [1e-3, 100, 1e-5], "warmup": 10},
        {"name": "linear_schedule", "arguments": [1e-3, 0.0, 50], "warmup": 5, "warmup_init": 1e-4},
        {"name": "exponential_decay", "arguments": [1e-3, 0.9]},
        {"name": "step_decay", "arguments": [1e-3, 0.5, 10]},
    ],
)
def test_schedules_of_mlx_lm_are_taken(schedule: dict[str, Any]) -> None:
    optimizer, theirs = make_optimizer("adam", 1.0, schedule=schedule), build_schedule(schedule)
    for step in range(1, 40):
        optimizer.update({}, {})
        assert optimizer.learning_rate.item() == pytest.approx(theirs(mx.array(step - 1)).item())


def test_warm_up_and_cosine_end_where_they_say() -> None:
    optimizer = make_optimizer("adam", 1e-3, warmup=4, decay_updates=20)
    rates = []
    for _ in range(21):
        optimizer.update({}, {})
        rates.append(optimizer.learning_rate.item())
    assert rates[0] == 0
    assert max(rates) == pytest.approx(1e-3) == rates[4]
    assert rates[20] == pytest.approx(0, abs=1e-9)


def test_settings_reach_the_optimizer() -> None:
    optimizer = make_optimizer("adamw", 1.0, settings={"weight_decay": 0.5, "betas": [0.8, 0.9]})
    assert (optimizer.weight_decay, optimizer.betas) == (0.5, [0.8, 0.9])


def test_adafactor_takes_the_learning_rate() -> None:
    """MLX's default passes over it, and so does mlx_lm.lora 0.32.2."""
    moved = []
    for rate in (0.01, 0.02):
        model = nn.Linear(8, 8, bias=False)
        model.weight = mx.zeros((8, 8))
        make_optimizer("adafactor", rate).update(model, {"weight": mx.ones((8, 8))})
        moved.append(mx.abs(model.weight).max().item())
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-3)
    plain = optim.Adafactor(learning_rate=0.01)
    assert plain.relative_step


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"name": "adamw9"}, r"unknown optimizer 'adamw9'; known: adam, adamw, adamw8bit"),
        ({"settings": {"beta": 1}}, r"adam has no setting 'beta'; it has betas, eps"),
        ({"schedule": {"name": "cosine"}}, r"unknown schedule 'cosine'; known: cosine_decay"),
        ({"schedule": {"name": "cosine_decay"}}, r"do not fit cosine_decay\(init: float, decay_st"),
        ({"schedule": {"name": "cosine_decay", "arguments": ["x", 1]}}, "do not fit"),
        ({"schedule": {"name": "cosine_decay", "arguments": [math.nan, 9]}}, "is not finite"),
        ({"schedule": {"nam": 1}}, r"a schedule has no 'nam'; it has name, arguments, warmup"),
    ],
)
def test_what_is_unknown_is_named_with_what_is_known(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_optimizer(**{"name": "adam", "learning_rate": 1e-3} | asked)


def test_the_update_in_bytes_holds_few_temporaries() -> None:
    """As one graph it would hold some twenty float32 arrays of every parameter at once."""
    shape = (1024, 2048)
    model = nn.Sequential(*(nn.Linear(*shape[::-1], bias=False) for _ in range(6)))
    gradients = {name: value * 0 + 0.1 for name, value in tree_flatten(model.parameters())}
    mx.eval(model.parameters(), gradients)
    optimizer = make_optimizer("adamw8bit", 1e-3)
    for _ in range(2):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        optimizer.update(model, tree_unflatten(list(gradients.items())))
        mx.eval(model.parameters(), optimizer.state)
    parameters = 4 * 6 * math.prod(shape)
    assert mx.get_peak_memory() - before < parameters + 26 * 4 * adam8bit.SLICE
