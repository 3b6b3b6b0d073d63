"""One token on the CPU: rotation and norm as products, against MLX's own."""

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE  # noqa: E402
from models import CONFIGS, build_model  # noqa: E402

from uma.runtime.forms import ProductRMSNorm, to_float32  # noqa: E402
from uma.runtime.rotation import ROTARY, share_rotations  # noqa: E402

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
KINDS = {
    "plain": lambda: nn.RoPE(32, base=1e6),
    "traditional": lambda: nn.RoPE(32, traditional=True),
    "of half the head": lambda: nn.RoPE(16),
    "llama3": lambda: Llama3RoPE(32, 4096, scaling_config=LLAMA3),
    "yarn": lambda: YarnRoPE(32, scaling_factor=4.0),
    "longrope": lambda: SuScaledRoPE(32, long_factor=[1.0 + i / 8 for i in range(16)]),
}


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self, *ropes: Any) -> None:
        super().__init__()
        self.layers = list(ropes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_rotated_as_mlx_rotates_it(kind: str) -> None:
    x = mx.random.normal((1, 3, 1, 32))
    model = Layers(KINDS[kind]())
    share_rotations(model)
    for offset in (0, 7, 7, 3000):
        expected = KINDS[kind]()(x + 0, offset=offset)
        assert mx.allclose(model.layers[0](x + 0, offset=offset), expected, atol=1e-5, rtol=0)


def test_a_prompt_is_rotated_by_mlx_itself() -> None:
    x = mx.random.normal((1, 3, 5, 32))
    model = Layers(nn.RoPE(32))
    share_rotations(model)
    assert mx.array_equal(model.layers[0](x, offset=9), nn.RoPE(32)(x, offset=9))


def test_only_equal_rotations_share_a_matrix() -> None:
    model = Layers(nn.RoPE(32), nn.RoPE(32), nn.RoPE(32, base=5e5))
    share_rotations(model)
    first, same, other = (layer.rotation for layer in model.layers)
    assert first is same
    assert first is not other


@pytest.mark.parametrize("kind", ["full", "sliding", "moe"])
def test_logits_of_a_model_stay_the_same(kind: str) -> None:
    def logits(shared: bool) -> Any:
        model = build_model(CONFIGS[kind])
        if shared:
            share_rotations(model)
            assert not any(type(module) in ROTARY for module in model.modules())
        cache = make_prompt_cache(model)
        model(mx.arange(1, 50)[None], cache=cache)
        return mx.concatenate([model(mx.array([[token]]), cache=cache) for token in (5, 6, 7)])

    assert mx.allclose(logits(True), logits(False), atol=1e-4, rtol=0)


def test_the_norm_of_a_token_is_that_of_mlx() -> None:
    x = 3 * mx.random.normal((1, 1, 64))
    norm = nn.RMSNorm(64, eps=1e-3)
    norm.weight = mx.random.normal((64,))
    expected = norm(x), norm(0 * x)
    ours = to_float32("norm", norm)
    assert isinstance(ours, ProductRMSNorm)
    assert mx.allclose(ours(x), expected[0], atol=1e-5, rtol=1e-5)
    assert mx.array_equal(ours(0 * x), expected[1])
    assert [name for name, _ in tree_flatten(ours.parameters())] == ["weight"]
