"""Values of an architecture that are asked for again and again, kept for the last ones asked."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from uma.architecture.layers import Architecture

P = ParamSpec("P")
T = TypeVar("T")
MOST = 64  # values of one function: those of a model in all its formats and contexts


def remembered(
    function: Callable[Concatenate[Architecture, P], T],
) -> Callable[Concatenate[Architecture, P], T]:
    """``function``, whose values are kept by the identity of the architecture.

    ``functools.cache`` would hash the architecture, all its parameters, at every call.
    """
    known: dict[tuple[Any, ...], tuple[Architecture, T]] = {}

    @wraps(function)
    def kept(architecture: Architecture, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (id(architecture), *args, *kwargs.items())
        found = known.get(key)
        if found is None or found[0] is not architecture:
            if len(known) >= MOST:
                known.clear()
            found = known[key] = architecture, function(architecture, *args, **kwargs)
        return found[1]

    return kept  # type: ignore[return-value]  # of a positional argument
