"""A process in a list of all of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """Who a process is and which started it; ``resident_bytes`` only ranks it."""

    pid: int
    parent: int
    name: str
    resident_bytes: int
