"""The form that a CPU multiplies fast gives what the layer it replaces gives."""

import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from uma.runtime.forms import to_float32  # noqa: E402


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (1000, 1000), (1000, 3001), (3, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_token_through_a_linear_layer(inputs: int, outputs: int, bias: bool) -> None:
    plain = nn.Linear(inputs, outputs, bias=bias)
    x = mx.random.normal((1, 1, inputs))
    expected = plain(x)
    y = to_float32("layer", plain)(x)
    assert y.shape == expected.shape
    assert mx.allclose(y, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4])
def test_an_embedding_used_as_the_head(tokens: int) -> None:
    plain = nn.Embedding(5003, 576)
    x = mx.random.normal((1, tokens, 576))
    expected = plain.as_linear(x)
    assert mx.allclose(to_float32("head", plain).as_linear(x), expected, atol=1e-5, rtol=1e-4)


def test_the_norm_of_one_token() -> None:
    plain = nn.RMSNorm(576)
    x = mx.random.normal((1, 1, 576))
    expected = plain(x)
    assert mx.allclose(to_float32("norm", plain)(x), expected, atol=1e-5, rtol=1e-4)
