"""A finding: what is the matter, what shows it, and what to do."""

from dataclasses import asdict, dataclass
from typing import Literal

from uma.units import format_gib

Severity = Literal["note", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``name`` is for programs; the rest is for people, each a sentence or more."""

    name: str
    severity: Severity
    text: str
    evidence: tuple[str, ...]
    remedy: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def said(label: str, size_bytes: int | None) -> str:
    """A line of evidence.

    >>> said("swap used", 3 << 30)
    'swap used: 3.00 GiB'
    """
    return f"{label}: {'unknown' if size_bytes is None else format_gib(size_bytes)}"
