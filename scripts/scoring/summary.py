"""Errors of a group, summed up."""

import re
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .rows import ENGINE, FORMAT


@dataclass(slots=True)
class Group:
    """One group of rows: errors as fractions of the measured value, verdicts, rows left out.

    ``parts`` are errors of single terms where the source tells them apart; ``sources`` says who
    published a row.
    """

    quantity: str
    engine: str
    kind: str
    errors: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    confusion: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def scored(self) -> int:
        return len(self.errors) + self.confusion.total()

    @property
    def rows(self) -> int:
        return self.scored + len(self.skipped)

    @property
    def eligible(self) -> int:
        """Rows of an engine and a format that we claim."""
        left_out = sum(reason in (ENGINE, FORMAT) for reason in self.skipped.values())
        return self.rows - left_out

    def to_json(self, ids: bool) -> dict[str, Any]:
        """The group as the contract of ``--json`` has it; with ``ids`` the rows themselves."""
        found: dict[str, Any] = {
            "quantity": self.quantity,
            "engine": self.engine,
            "kind": self.kind,
            "rows": self.rows,
            "scored": self.scored,
            "eligible": self.eligible,
            "skipped": dict(sorted(Counter(self.skipped.values()).items())),
            **statistics(self.errors),
            "confusion": None,
        }
        if self.quantity == "fit":
            names = ("true_fits", "true_exceeds", "false_fits", "false_exceeds")
            found["confusion"] = {name: self.confusion[name] for name in names}
        if self.parts:
            found["parts"] = {
                name: {"scored": len(errors), **statistics(errors)}
                for name, errors in sorted(self.parts.items())
            }
        if len(set(self.sources.values())) > 1:
            found["by_source"] = self._by_source()
        if ids:
            found["skipped_rows"] = self.skipped
            found["errors"] = {**self.errors, **self.wrong}
        return found

    def _by_source(self) -> dict[str, dict[str, Any]]:
        """Errors of each source's rows, and of all the others without it."""
        found = {}
        for source in sorted(set(self.sources.values())):
            own = {i: e for i, e in self.errors.items() if self.sources.get(i) == source}
            rest = {i: e for i, e in self.errors.items() if i not in own}
            if own:
                left_out = statistics(rest)
                found[source] = {"scored": len(own), **statistics(own), "without_it": left_out}
        return found


def source_of(address: str) -> str:
    """The site or repository of an address, without the page.

    >>> source_of("https://github.com/QwenLM/Qwen2.5/blob/main/docs/x.md @ 1a2b")
    'github.com/QwenLM/Qwen2.5'
    """
    return "/".join(re.sub(r"^https?://|[ @].*", "", address).split("/")[:3]) or "not told"


def statistics(errors: dict[str, float]) -> dict[str, float | None]:
    """Median and 90th percentile of the absolute errors, and the median error with its sign."""
    if not errors:
        return {"median_abs_error": None, "p90_abs_error": None, "bias": None}
    sizes = sorted(abs(error) for error in errors.values())
    return {
        "median_abs_error": median(sizes),
        "p90_abs_error": percentile(sizes, 0.9),
        "bias": median(errors.values()),
    }


def percentile(ordered: list[float], share: float) -> float:
    """The value at ``share`` of the way through ``ordered``, between two where it falls so.

    >>> percentile([0.0, 1.0, 2.0], 0.75)
    1.5
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
