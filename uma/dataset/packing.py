"""Several short examples in one row of a batch, each blind to the others."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def packs(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the examples of each row, the longest first, each into the fullest row it fits.

    No row holds more than ``row_tokens``; an example longer than that is an error of the caller.
    A new row is begun only where no other has room, so that at most one is half empty.

    >>> packs([5, 1, 3, 4], 6)
    [[0, 1], [3], [2]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what each row has left, and its number, in order
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if lengths[n] > row_tokens:
            raise ValueError(f"an example of {lengths[n]} tokens in a row of {row_tokens}")
        place = bisect_left(room, (lengths[n], -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(n)
        insort(room, (left - lengths[n], row))
    return rows
