"""mlx-lm's cache objects without data: emptied of graphs, counted, and fed with shapes."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from uma.runtime.trace_graph import arrays_of, put_arrays

_zeros = mx.zeros  # not the one that a trace puts in its place
Fed = tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def fresh(caches: list[Any]) -> list[Any]:
    """Copies of the caches with arrays of the same shapes that have no graph behind them."""
    copies = [_copied(cache) for cache in caches]
    put_arrays(copies, (_zeros(a.shape, a.dtype) for c in copies for a in list(arrays_of(c))))
    return copies


def _copied(cache: Any) -> Any:
    if isinstance(cache, (list, tuple)):
        return type(cache)(_copied(part) for part in cache)
    if isinstance(cache, mx.array) or not hasattr(cache, "__dict__"):
        return cache
    new = copy.copy(cache)
    for key, value in vars(cache).items():
        setattr(new, key, _copied(value))
    return new


def parts(caches: list[Any]) -> Iterator[Any]:
    """The caches, those inside a ``CacheList`` one by one."""
    for cache in caches:
        inner = getattr(cache, "caches", None)
        yield from parts(list(inner)) if inner is not None else (cache,)


def bytes_by_kind(caches: list[Any]) -> tuple[int, int]:
    """Bytes of the caches that hold tokens, and of the states that do not grow with them."""
    sizes = [0, 0]
    for part in parts(caches):
        sizes[hasattr(part, "cache")] += part.nbytes
    return sizes[0], sizes[1]


@dataclass(slots=True)
class TokenRecorder:
    """What a call feeds each cache, so that others like it need no model."""

    fed: dict[int, Fed] = field(default_factory=dict)
    watched: list[Any] = field(default_factory=list)
    complete: bool = False

    def watch(self, caches: list[Any]) -> None:
        """Record the next call's updates."""
        self.watched = list(parts(caches))
        for i, part in enumerate(self.watched):
            if hasattr(part, "update_and_fetch"):
                part.update_and_fetch = self._recording(i, part)

    def _recording(self, i: int, part: Any) -> Any:
        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self.fed[i] = ((keys.shape, keys.dtype), (values.shape, values.dtype))
            return type(part).update_and_fetch(part, keys, values)

        return update_and_fetch

    def stop(self) -> None:
        for part in self.watched:
            vars(part).pop("update_and_fetch", None)
        self.complete = all(
            hasattr(part, "cache") or i in self.fed for i, part in enumerate(self.watched)
        )
        self.watched = []

    def replay(self, caches: list[Any], tokens: int) -> bool:
        """Feed the caches ``tokens`` as recorded; ``False`` if they take something else."""
        if not self.complete:
            return False
        done: dict[tuple[Any, ...], dict[str, Any]] = {}
        for i, part in enumerate(parts(caches)):
            if i not in self.fed:
                continue
            key = (type(part), self.fed[i], *_signature(part))
            if key not in done:
                if hasattr(part, "maybe_trim_front"):
                    part.maybe_trim_front()
                part.update_and_fetch(*(_like(x, tokens) for x in self.fed[i]))
                done[key] = vars(part)
            for name, value in done[key].items():
                setattr(part, name, value)
        return True


def _like(fed: tuple[tuple[int, ...], mx.Dtype], tokens: int) -> mx.array:
    shape, dtype = fed
    return _zeros((*shape[:2], tokens, shape[3]), dtype)


def _signature(part: Any) -> Iterator[Any]:
    for name, value in vars(part).items():
        yield name
        if isinstance(value, (int, float, str, bool, type(None))):
            yield value
        yield tuple((a.shape, a.dtype) for a in arrays_of(value))
