"""A model's own ``__call__`` with its layers out of the way: recorded, or replaced by stand-ins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

Hook = Callable[..., Any]
"""Called as ``hook(layer, *args, **kwargs)`` in place of the layer."""


@contextmanager
def intercepted(layers: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    """Call ``hook`` instead of each of ``layers``; outside the block they are as they were.

    The class of the instance is changed, not the class, and attributes stay readable (models ask
    a layer whether it is recurrent, or slides).
    """
    unique = {id(layer): layer for layer in layers}.values()
    former = [(layer, type(layer)) for layer in unique]
    _HOOKS.append(hook)
    try:
        for layer, own in former:
            layer.__class__ = _hooked(own)  # type: ignore[arg-type]
        yield
    finally:
        for layer, own in former:
            layer.__class__ = own
        _HOOKS.pop()


_HOOKS: list[Hook] = []


@cache
def _hooked(own: type) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _HOOKS[-1](self, *args, **kwargs)

    return type(own.__name__, (own,), {"__call__": call})


def own_call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call an intercepted layer itself."""
    return type(layer).__mro__[1].__call__(layer, *args, **kwargs)


def arrays(tree: Any) -> list[mx.array]:
    """The arrays of nested lists, tuples and dicts, in a fixed order."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def differentiable(tree: Any) -> list[mx.array]:
    """The distinct floating-point arrays of ``tree``."""
    found = {id(a): a for a in arrays(tree) if mx.issubdtype(a.dtype, mx.floating)}
    return list(found.values())


def substituted(tree: Any, old: Sequence[mx.array], new: Sequence[mx.array]) -> Any:
    """``tree`` with each array of ``old`` replaced by the one of ``new`` at its place."""
    places = {id(a): b for a, b in zip(old, new, strict=True)}
    return tree_map(lambda leaf: places.get(id(leaf), leaf), tree)
