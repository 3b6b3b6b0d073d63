"""What a machine costs, and what kind of price that is: few of them are asked for today."""

import re
from typing import Literal

from uma.errors import UsageError
from uma.frozen import dataclass

PriceKind = Literal["list", "launch", "street", "user"]
TODAY: tuple[PriceKind, ...] = ("list", "user")
"""Kinds that a machine can be had for today: those that may be the cheapest."""

_DATE = re.compile(r"\b(?:20\d\d-\d\d-\d\d|(?:Sept|March) 20\d\d|20\d\d)\b")  # not A2000
_USD = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
MOST_USD = 10**9
_MONTHS = {"Sept": "09", "March": "03"}


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars, without tax; ``date`` as ``2026-06-25``, ``2026-09`` or ``2026``."""

    usd: int
    kind: PriceKind
    date: str | None = None


def catalog_price(usd: int | None, words: str, year: str) -> Price | None:
    """The price of a row of the catalog, whose kind is told in ``words`` (``price_kind``).

    A price of which no source says that it is today's is the one at launch, in ``year``, or where
    it is called a street price, of a day that is not known.

    >>> catalog_price(1959, "Sept 2026 list", "2025")
    Price(usd=1959, kind='list', date='2026-09')
    >>> catalog_price(1599, "launch MSRP (Wikipedia)", "2022")
    Price(usd=1599, kind='launch', date='2022')
    """
    if usd is None:
        return None
    today = re.search(r"Sept 2026|after the 2026|raised 2026|price 2026", words)
    if today is not None:
        return Price(usd, "list", _date(words[today.start() :]))
    kind: PriceKind = "street" if "street" in words else "launch"
    return Price(usd, kind, _date(words) or (year[:4] if kind == "launch" else None))


def _date(words: str) -> str | None:
    found = _DATE.search(words)
    if found is None:
        return None
    month, _, year = found[0].rpartition(" ")
    return f"{year}-{_MONTHS[month]}" if month else found[0]


def user_prices(texts: list[str]) -> dict[str, Price]:
    """Prices given as ``NAME=USD``, by name.

    Raises:
        UsageError: If one is not of that form, or a name is given twice.

    >>> user_prices(["rtx-4090=1,799.50"])
    {'rtx-4090': Price(usd=1800, kind='user', date=None)}
    """
    found: dict[str, Price] = {}
    for text in texts:
        name, _, usd = text.rpartition("=")
        name, usd = name.strip().lower(), usd.strip()
        if not name or not _USD.fullmatch(usd):
            raise UsageError(f"--price {text[:80]!r}: write it as NAME=USD, such as rtx-4090=1800")
        if (value := float(usd.replace(",", ""))) > MOST_USD:
            raise UsageError(f"--price {name}: at most {MOST_USD:,} US$ are taken")
        if name in found:
            raise UsageError(f"--price {text!r}: the price of {name} is given twice")
        found[name] = Price(round(value), "user")
    return found


def together(parts: list[Price]) -> Price:
    """The price of several things: of the kind that says least, at the oldest date."""
    worst = max((part.kind for part in parts), key=("user", "list", "street", "launch").index)
    dates = [part.date for part in parts if part.date is not None and part.kind == worst]
    return Price(sum(part.usd for part in parts), worst, min(dates, default=None))
