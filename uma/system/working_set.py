"""Apple's default GPU limit, by installed memory and macOS version.

Metal calls it ``recommendedMaxWorkingSetSize``. A Mac that can be asked is asked; these rules are
for machines that are only described. They reproduce every default pair of
``uma/data/working_set.csv`` within the rounding of its source, and those known to the byte exactly.
"""

from uma.units import GIB

_PAGE = 16 * 1024  # Apple silicon; the limit is a whole number of pages

# (GiB installed, share of it) under macOS 26: sizes seen on a machine, and no others.
_SHARES_26 = (
    (8, (2, 3)),
    (16, (74, 100)),
    (18, (74, 100)),
    (24, (74, 100)),
    (32, (78, 100)),
    (36, (78, 100)),
    (48, (78, 100)),
    (64, (81, 100)),
    (96, (81, 100)),
    (128, (84, 100)),
    (256, (87, 100)),
)


def working_set_range(memory_bytes: int, macos_major: int | None) -> tuple[int, int]:
    """The lowest and the highest default GPU limit that such a Mac can have, in bytes.

    Both are equal where machines of this size and macOS version were seen. They differ when the
    version is unknown (``None``), and under macOS 26 for a size that nobody reported: then the
    neighboring sizes bound it. Later versions are taken to follow macOS 26.

    >>> working_set_range(16 * GIB, 15), working_set_range(16 * GIB, None)
    ((11453251584, 11453251584), (11453251584, 12713115648))
    """
    before, after = _before_26(memory_bytes), _since_26(memory_bytes)
    if macos_major is None:
        return min(before, after[0]), max(before, after[1])
    return after if macos_major >= 26 else (before, before)


def largest_buffer_bytes(working_set_bytes: int) -> int:
    """Metal's ``maxBufferLength``: 3/4 of the default working set, in whole pages.

    It does not follow a raised ``iogpu.wired_limit_mb``.
    """
    return working_set_bytes * 3 // 4 // _PAGE * _PAGE


def _before_26(memory_bytes: int) -> int:
    if memory_bytes >= 192 * GIB:
        return memory_bytes - 48 * GIB
    return _share(memory_bytes, (2, 3) if memory_bytes < 36 * GIB else (3, 4))


def _since_26(memory_bytes: int) -> tuple[int, int]:
    smaller = [share for size, share in _SHARES_26 if size * GIB <= memory_bytes]
    larger = [share for size, share in _SHARES_26 if size * GIB >= memory_bytes]
    low = _share(memory_bytes, smaller[-1] if smaller else _SHARES_26[0][1])
    high = _share(memory_bytes, larger[0]) if larger else _before_26(memory_bytes)
    return low, max(low, high)


def _share(memory_bytes: int, share: tuple[int, int]) -> int:
    """That share of the memory, rounded up to whole pages."""
    return -(-memory_bytes * share[0] // (share[1] * _PAGE)) * _PAGE
