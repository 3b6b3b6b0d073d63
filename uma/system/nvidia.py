"""NVIDIA cards, as the driver's own tool lists them."""

import re
from dataclasses import dataclass

from uma.units import MIB


@dataclass(frozen=True, slots=True)
class Card:
    """A card and its memory; ``None`` where it shares the machine's memory (GB10)."""

    name: str
    memory_bytes: int | None


def read_cards() -> tuple[Card, ...]:
    """The cards of this machine; none, at no cost, where there is no driver."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_cards(done.stdout) if done.returncode == 0 else ()


def parse_cards(text: str) -> tuple[Card, ...]:
    """Lines of ``name, memory.total``.

    >>> parse_cards("NVIDIA GB10, [N/A]\\n")
    (Card(name='NVIDIA GB10', memory_bytes=None),)
    """
    cards = []
    for line in text.splitlines():
        name, comma, memory = line.rpartition(",")
        if comma:
            size = re.fullmatch(r"(\d+) MiB", memory.strip())
            cards.append(Card(name.strip(), int(size[1]) * MIB if size else None))
    return tuple(cards)
