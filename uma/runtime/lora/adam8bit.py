"""AdamW whose states take a byte each: codes, with a scale for every block of 256.

As bitsandbytes does (Dettmers and others, 8-bit Optimizers via Block-wise Quantization, 2021), with
codes of our own: magnitudes spaced evenly in their logarithm, rounded up or down at random so that
the mean is right. Rounded to the nearest, a slow average would never move: a step of 0.999 changes
less than the distance of two codes.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from uma.memory.optimizer_states import BLOCK, SMALL

SLICE = 1 << 20
"""Elements that are decoded, updated and encoded at once: their float32 temporaries are bounded."""

State = dict[str, mx.array]


@dataclass(frozen=True)
class Codes:
    """``top`` magnitudes over so many powers of ten below a block's largest; code 0 is 0.

    ``floor`` is the least code of what is not 0.
    """

    top: int
    decades: int
    floor: int = 0

    @property
    def ratio(self) -> float:
        """The logarithm of one magnitude over the next below it."""
        return self.decades * math.log(10) / (self.top - 1)

    @cached_property
    def table(self) -> mx.array:
        sizes = [0.0, *(math.exp((n - self.top) * self.ratio) for n in range(1, self.top + 1))]
        return mx.array(sizes)

    def encoded(self, x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
        """Codes of magnitudes ``(blocks, BLOCK)``, and the largest of each block.

        Between two magnitudes the chance of the upper is the place between them, so that the mean
        is right: ``(ratio ** f - 1) / (ratio - 1)`` at the fraction ``f``, by its series.
        """
        scale = x.max(axis=-1, keepdims=True)
        part = x / mx.where(scale > 0, scale, 1)
        place = self.top + mx.log(mx.maximum(part, 1e-30)) / self.ratio
        lower = mx.clip(mx.floor(place), 0, self.top - 1)
        f = (place - lower) * self.ratio
        chance = f * (1 + f * (0.5 + f * (1 / 6 + f / 24))) / math.expm1(self.ratio)
        chance = mx.where(place < 1, part * math.exp((self.top - 1) * self.ratio), chance)
        codes = lower + (mx.random.uniform(shape=x.shape, key=key) < chance)
        if self.floor:
            codes = mx.where(x > 0, mx.maximum(codes, self.floor), 0)
        return codes.astype(mx.uint8), scale

    def decoded(self, codes: mx.array, scale: mx.array) -> mx.array:
        return self.table[codes] * scale


FIRST = Codes(127, 6)
"""Of averages of gradients, whose sign is a bit of its own."""
SECOND = Codes(255, 10, floor=1)
"""Of averages of squares: none but 0 becomes 0, by which the first average would be divided."""


def encoded_signed(x: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    codes, scale = FIRST.encoded(mx.abs(x), key)
    return mx.where(x < 0, codes + 128, codes).astype(mx.uint8), scale


def decoded_signed(codes: mx.array, scale: mx.array) -> mx.array:
    size = FIRST.decoded(codes & 127, scale)
    return mx.where(codes >= 128, -size, size)


class AdamW8bit(optim.AdamW):  # type: ignore[misc]
    """MLX's AdamW, its two averages kept in bytes for arrays of at least ``SMALL`` elements."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """As MLX's; the random numbers of an update follow from its number alone."""
        self._key = int(self.step.item()) << 32
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
        """The update slice by slice, each evaluated before the next."""
        if "m_scale" not in state:
            return super().apply_single(gradient, parameter, state)
        g, p = gradient.reshape(-1), parameter.reshape(-1)
        new: list[mx.array] = []
        parts: list[State] = []
        for start in range(0, g.size, SLICE):
            rows = slice(start // BLOCK, (start + SLICE) // BLOCK)
            here = slice(start, start + SLICE)
            old = {name: value[rows] for name, value in state.items()}
            result, kept = self._updated(g[here], p[here], old)
            mx.eval(result, kept)
            new.append(result)
            parts.append(kept)
        state |= {name: mx.concatenate([one[name] for one in parts]) for name in state}
        result = mx.concatenate(new).reshape(parameter.shape)
        mx.eval(result, state)
        return result

    def _updated(
        self, gradient: mx.array, parameter: mx.array, state: State
    ) -> tuple[mx.array, State]:
        size = gradient.size
        wide = {
            "m": decoded_signed(state["m"], state["m_scale"]).reshape(-1)[:size],
            "v": SECOND.decoded(state["v"], state["v_scale"]).reshape(-1)[:size],
        }
        result = super().apply_single(gradient.astype(mx.float32), parameter, wide)
        m, v = (mx.pad(wide[n], (0, -size % BLOCK)).reshape(-1, BLOCK) for n in ("m", "v"))
        self._key += 2
        kept: State = {}
        kept["m"], kept["m_scale"] = encoded_signed(m, mx.random.key(self._key))
        kept["v"], kept["v_scale"] = SECOND.encoded(v, mx.random.key(self._key + 1))
        return result.astype(parameter.dtype), kept
