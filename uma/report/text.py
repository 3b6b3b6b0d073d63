"""Plain-text tables: aligned columns that survive pipes, files and any console encoding."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """``rows`` in aligned columns; ``align`` has one of ``<`` or ``>`` for each column.

    >>> print(table([["weights", "5 B"], ["kv", "12 B"]], "<>"))
    weights   5 B
    kv       12 B
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    lines = (
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def percent(part: float) -> str:
    """A signed percentage with one decimal.

    >>> percent(0.0123), percent(-0.00001)
    ('+1.2 %', '0.0 %')
    """
    text = f"{100 * part:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text
