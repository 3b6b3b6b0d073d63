"""Attention within segments: examples that share a row do not see each other.

The masks that a model makes for its layers are narrowed to blocks on the diagonal. Rotary positions
need no reset: scores depend on the distance of two tokens alone. Where that is not all a layer
knows of its place (learned positions, a recurrence), packing is refused, by comparing.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from uma.errors import UnsupportedModel


class Blocks:
    """The masks of one batch, each made once."""

    def __init__(self, segments: np.ndarray) -> None:
        self.length = segments.shape[1]
        number = mx.array(segments)
        self.same = (number[:, :, None] == number[:, None, :])[:, None]
        self._made: dict[Any, tuple[Any, mx.array]] = {}

    def masked(self, arguments: Any) -> Any:
        """The arguments of a layer, each mask among them narrowed to the blocks.

        Raises:
            UnsupportedModel: If there is none: the layer does not attend, or makes its own.
        """
        found = False

        def narrowed(leaf: Any) -> Any:
            nonlocal found
            if not self._is_mask(leaf):
                return leaf
            found = True
            key = leaf if isinstance(leaf, str) else id(leaf)
            if key not in self._made:
                self._made[key] = leaf, self._narrowed(leaf)
            return self._made[key][1]

        arguments = tree_map(narrowed, arguments)
        if not found and self.length > 1:
            raise UnsupportedModel(
                "examples cannot be packed for this model: a layer of it is given no attention "
                "mask; leave out --packing"
            )
        return arguments

    def _is_mask(self, leaf: Any) -> bool:
        if isinstance(leaf, mx.array):
            return leaf.dtype == mx.bool_ and leaf.shape[-2:] == (self.length, self.length)
        return bool(leaf == "causal")

    def _narrowed(self, mask: str | mx.array) -> mx.array:
        if isinstance(mask, str):
            places = mx.arange(self.length)
            mask = places[:, None] >= places[None]
        narrowed = self.same & mask
        mx.eval(narrowed)
        return narrowed
