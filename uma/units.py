"""Units of memory: plain ints of bytes inside, GiB when shown.

Binary units are KiB, MiB, GiB (powers of 1,024); decimal units are kB, MB, GB (powers of 1,000).
"GB" is kept for what vendors quote (bandwidth, file sizes); memory is shown in GiB.
"""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
KB = 10**3
MB = 10**6
GB = 10**9
TB = 10**12

_UNITS = {
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
}
_SIZE = r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*"


def parse_bytes(text: str) -> int:
    """The size in bytes that ``text`` names, such as ``24GiB`` or ``24GB``.

    Raises:
        ValueError: If there is no unit, or it is unknown: a bare number could mean either base.

    >>> parse_bytes("24GiB"), parse_bytes("24 GB"), parse_bytes("1.5MiB")
    (25769803776, 24000000000, 1572864)
    """
    match = re.fullmatch(_SIZE, text, re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it with a unit, such as 24GiB or 24GB")
    from decimal import Decimal

    return int(Decimal(match[1]) * unit)


def format_gib(size_bytes: int) -> str:
    """``size_bytes`` in GiB with two decimals, in MiB below 1 GiB, in KiB below 1 MiB.

    >>> format_gib(39_688_355_840), format_gib(98_362_432), format_gib(2048), format_gib(0)
    ('36.96 GiB', '93.8 MiB', '2.0 KiB', '0 B')
    """
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if size >= GIB:
        return f"{sign}{size / GIB:,.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size} B"


def printable(text: str, kept: str = "\n\t") -> str:
    r"""``text`` with control characters written as ``\x1b``: it may come from a model's file.

    So are those that turn the direction of writing. What is ``kept`` is not: in a name, nothing.

    >>> print(printable("a\x1b[31mb\u202e"), printable("two\nlines", kept=""))
    a\x1b[31mb\u202e two\nlines
    """
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
