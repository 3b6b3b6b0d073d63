"""Several short examples in one row of a batch, each blind to the others."""

from collections.abc import Sequence


def packs(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the examples of each row, by first fit of the longest first.

    No row holds more than ``row_tokens``; an example longer than that is an error of the caller.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if lengths[n] > row_tokens:
            raise ValueError(f"an example of {lengths[n]} tokens in a row of {row_tokens}")
        at = next((at for at, left in enumerate(room) if left >= lengths[n]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[at].append(n)
        room[at] -= lengths[n]
    return rows
