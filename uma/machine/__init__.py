"""A machine as the memory plan sees it: its pools, the device's limit, the budget within it."""

from uma.machine.facts import (
    Budget,
    Device,
    Machine,
    PoolKind,
    budget_of,
    default_reserve_bytes,
    verdict,
)
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
