"""MLX's three memory limits, set for a while and always put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def device_facts() -> dict[str, Any]:
    """What MLX says of its default device; keys differ by backend (the CPU has no memory keys)."""
    return dict(mx.device_info())


@contextmanager
def memory_limits(
    *, wired: int | None = None, cache: int | None = None, memory: int | None = None
) -> Iterator[None]:
    """Set the wired, cache (pool) and memory limits in bytes; ``None`` leaves one alone.

    The wired limit only exists on Metal: elsewhere setting it does nothing and returns 0 (mlx
    0.32.4), and it may not change while work is queued, hence the synchronization.
    """
    setters = (
        (mx.set_memory_limit, memory),
        (mx.set_cache_limit, cache),
        (mx.set_wired_limit, wired),
    )
    former: list[tuple[Any, int]] = []
    try:
        for setter, limit in setters:
            if limit is not None:
                former.append((setter, setter(limit)))
        yield
    finally:
        mx.synchronize()
        for setter, limit in reversed(former):
            setter(limit)
