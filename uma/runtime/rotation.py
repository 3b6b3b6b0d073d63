"""One token's rotary embedding as one matrix product, the matrix shared by the layers.

MLX's CPU backend composes ``mx.fast.rope`` of some 25 operations (mlx 0.32.4, ``fast.cpp``, the
fallback of ``rope``), for queries and keys of every layer: 1,500 of the 3,300 operations of a
token of SmolLM2-135M. A rotation is linear, so rotating the rows of the identity gives its matrix.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

ROTARY = (nn.RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE)


@dataclass(slots=True)
class Rotation:
    """The matrix ``[head_dim, head_dim]`` of the offset that was asked for last."""

    offset: int = -1
    matrix: Any = None

    def at(self, offset: int, head_dim: int, rotate: Callable[..., Any]) -> Any:
        if self.offset != offset or self.matrix.shape[0] != head_dim:
            rows = mx.eye(head_dim).reshape(1, head_dim, 1, head_dim)
            self.matrix = rotate(rows, offset).reshape(head_dim, head_dim)
            self.offset = offset
        return self.matrix


def share_rotations(model: nn.Module) -> None:
    """Let equal rotary embeddings of a float32 model share one matrix for each token."""
    shared: dict[str, Rotation] = {}
    for module in model.modules():
        if type(module) in ROTARY:
            module.rotation = shared.setdefault(_settings(module), Rotation())
            module.__class__ = _SHARING[type(module)]


def _settings(module: Any) -> str:
    """What a rotation follows from: its class, its numbers and its frequencies."""
    arrays = {k: v.tolist() for k, v in module.items() if isinstance(v, mx.array)}
    values = {k: v for k, v in vars(module).items() if isinstance(v, int | float | bool)}
    return repr((type(module), values, arrays))


def _sharing(kind: Any) -> type:
    def call(self: Any, x: Any, offset: Any = 0) -> Any:
        rotate = functools.partial(kind.__call__, self)
        if x.shape[-2] != 1 or not isinstance(offset, int):
            return rotate(x, offset)
        return x @ self.rotation.at(offset, x.shape[-1], rotate)

    return type(f"Shared{kind.__name__}", (kind,), {"__call__": call})


_SHARING = {kind: _sharing(kind) for kind in ROTARY}
