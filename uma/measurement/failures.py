"""What a failure's text means: one cause, one remedy (``uma/data/failures.csv``)."""

import re
from dataclasses import dataclass, replace

from uma.catalog.observed import failures
from uma.system.llama_log import working_set_mb
from uma.units import MIB, format_gib

_SWAPPED = 256 * MIB  # growth of swap from which a timeout is a lack of memory: our judgment


@dataclass(frozen=True, slots=True)
class Explanation:
    """``cause`` is one of the table's; ``quote`` the line of the text that shows it."""

    cause: str
    text: str
    remedy: str
    quote: str
    source: str
    notes: tuple[str, ...] = ()


def explain(text: str, *, swap_growth_bytes: int = 0) -> Explanation | None:
    """What the first failure that ``text`` shows is, or ``None`` where none is known.

    Where several causes match, the more particular stands first in the table. A timeout while
    swap grew by ``swap_growth_bytes`` is a lack of memory: the GPU waited for the disk.
    """
    for row in failures():
        match = re.search(row.pattern, text)
        if match is None:
            continue
        found = Explanation(
            row.cause, row.text, row.remedy, _line(text, match.start()), row.source, _notes(text)
        )
        if row.cause == "timeout" and swap_growth_bytes >= _SWAPPED:
            return _short_of_memory(found, swap_growth_bytes)
        return found
    return None


def _short_of_memory(found: Explanation, grown: int) -> Explanation:
    return replace(
        found,
        cause="memory_pressure",
        text="A command waited so long for memory on the disk that the GPU's watchdog stopped it: "
        f"swap grew by {format_gib(grown)} meanwhile.",
        remedy="Ask for less memory: fewer bits, a shorter context, a smaller prompt cache; or end "
        "other programs.",
    )


def _line(text: str, position: int) -> str:
    """The line around a position, shortened."""
    begin = text.rfind("\n", 0, position) + 1
    return text[begin:].partition("\n")[0].strip()[:200]


def _notes(text: str) -> tuple[str, ...]:
    limit = working_set_mb(text)
    if limit is not None:
        return (f"llama.cpp saw a GPU limit of {limit:,.2f} MB in this log",)
    if "libc++abi: terminating" in text and "[METAL]" in text:
        return (
            "MLX ended the process because it could not raise the error: versions from before "
            "June 2026 (pull request 3523) do that. Update mlx.",
        )
    return ()
