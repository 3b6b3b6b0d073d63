"""A machine as the memory plan sees it: its pools, the device's limit, the budget within it."""

from typing import TYPE_CHECKING, Any

from uma.machine.facts import (
    Budget,
    Device,
    Machine,
    PoolKind,
    budget_of,
    default_reserve_bytes,
    verdict,
)

if TYPE_CHECKING:
    from uma.machine.live import linux_of, mac_of, read_machine

__all__ = [
    "Budget",
    "Device",
    "Machine",
    "PoolKind",
    "budget_of",
    "default_reserve_bytes",
    "linux_of",
    "mac_of",
    "read_machine",
    "verdict",
]


def __getattr__(name: str) -> Any:
    """What reads this machine, imported when it is asked for: a named one needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uma.machine import live

    return getattr(live, name)
