"""AdamW whose states take a byte each: codes, with a scale for every block of 256.

As bitsandbytes does (Dettmers and others, 8-bit Optimizers via Block-wise Quantization, 2021), with
codes of our own: magnitudes spaced evenly in their logarithm, rounded up or down at random so that
the mean is right. Rounded to the nearest, a slow average would never move: a step of 0.999 changes
less than the distance of two codes.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from uma.memory.optimizer_states import BLOCK, SMALL

_DECADES = {"m": 6, "v": 10}
"""Powers of ten from a block's scale to the smallest code: gradients, and their squares."""

State = dict[str, mx.array]


class AdamW8bit(optim.AdamW):  # type: ignore[misc]
    """MLX's AdamW, its two averages kept in bytes for arrays of at least ``SMALL`` elements."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """As MLX's; the random numbers of an update follow from its number alone."""
        self._key = int(self.step.item()) << 20
        return super().apply_gradients(gradients, parameters)

    def init_single(self, parameter: mx.array, state: State) -> None:
        if parameter.size < SMALL:
            super().init_single(parameter, state)
            return
        blocks = -(-parameter.size // BLOCK)
        for name in ("m", "v"):
            state[name] = mx.zeros((blocks, BLOCK), mx.uint8)
            state[f"{name}_scale"] = mx.zeros((blocks, 1))

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> Any:
        if "m_scale" not in state:
            return super().apply_single(gradient, parameter, state)
        wide = {
            "m": _decoded_signed(state["m"], state["m_scale"]),
            "v": _decoded(state["v"], state["v_scale"], 255, _DECADES["v"]),
        }
        wide = {name: _whole(value, gradient.shape) for name, value in wide.items()}
        result = super().apply_single(gradient.astype(mx.float32), parameter, wide)
        for name, encode in (("m", _encoded_signed), ("v", _encoded_squares)):
            self._key += 1
            state[name], state[f"{name}_scale"] = encode(
                _blocks(wide[name]), mx.random.key(self._key)
            )
        return result.astype(parameter.dtype)


def _blocks(x: mx.array) -> mx.array:
    flat = x.reshape(-1)
    return mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _whole(blocks: mx.array, shape: tuple[int, ...]) -> mx.array:
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)


def _encoded_signed(x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """A sign bit and 127 magnitudes."""
    codes, scale = _encoded(mx.abs(x), 127, _DECADES["m"], key)
    return codes + 128 * (x < 0).astype(mx.uint8), scale


def _decoded_signed(codes: mx.array, scale: mx.array) -> mx.array:
    size = _decoded(codes & 127, scale, 127, _DECADES["m"])
    return mx.where(codes >= 128, -size, size)


def _encoded_squares(x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """255 magnitudes; none but 0 becomes 0, by which the first average would be divided."""
    codes, scale = _encoded(x, 255, _DECADES["v"], key)
    return mx.maximum(codes, (x > 0).astype(mx.uint8)), scale


def _encoded(x: mx.array, top: int, decades: int, key: mx.array) -> tuple[mx.array, mx.array]:
    """Codes of magnitudes in blocks, and the largest of each block.

    Code ``top`` is the largest, each one below a constant factor smaller, code 0 is 0.
    """
    scale = x.max(axis=-1, keepdims=True)
    part = x / mx.where(scale > 0, scale, 1)
    place = top + mx.log10(mx.maximum(part, 1e-30)) * ((top - 1) / decades)
    lower = mx.clip(mx.floor(place), 0, top - 1)
    low, high = (_magnitude(code, top, decades) for code in (lower, lower + 1))
    up = mx.random.uniform(shape=x.shape, key=key) < (part - low) / (high - low)
    return (lower + up).astype(mx.uint8), scale


def _decoded(codes: mx.array, scale: mx.array, top: int, decades: int) -> mx.array:
    return _magnitude(codes.astype(mx.float32), top, decades) * scale


def _magnitude(code: mx.array, top: int, decades: int) -> mx.array:
    size = mx.exp((code - top) * (decades * math.log(10) / (top - 1)))
    return mx.where(code > 0, size, 0)
