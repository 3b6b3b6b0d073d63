"""What a machine costs over the years of its use, bought or rented, and what a joule yields."""

import re
from collections.abc import Iterable

from uma.errors import UsageError
from uma.frozen import dataclass
from uma.plan.compare.candidates import Candidate

DAYS_PER_YEAR = 365
MOST_USD_PER_H = 10**6
NO_USE = "how much it is used is not told: --hours-per-day, --years and --kwh"
NO_RENT = "no machine that does the work is rented: --rent NAME=USD/h"
NEVER = "its electricity alone costs as much as renting"


@dataclass(frozen=True, slots=True)
class Use:
    """How long a machine works, and US$ of a kWh; ``None`` is not told."""

    hours_per_day: float | None = None
    years: float | None = None
    usd_per_kwh: float | None = None

    @property
    def hours(self) -> float | None:
        if self.hours_per_day is None or self.years is None:
            return None
        return self.hours_per_day * DAYS_PER_YEAR * self.years


@dataclass(frozen=True, slots=True)
class Cost:
    """US$ of owning a machine and of renting it, all years together; ``None`` for the ``reason``.

    ``energy_usd`` is part of ``owned_usd``, at full power in all hours: the most it can be.
    ``break_even_h`` are hours of work from which on owning costs less than renting ``rented``.
    """

    owned_usd: float | None
    reason: str | None
    energy_usd: float | None
    rented_usd: float | None
    rented: str | None
    break_even_h: float | None
    break_even_reason: str | None


def cost_of(one: Candidate, use: Use, rented: Candidate | None) -> Cost:
    """What ``one`` costs, against renting it, or else ``rented``.

    >>> from uma.plan.compare import HostProfile, Price, candidates
    >>> mac, = candidates(["mac-studio-m5-ultra-96"], HostProfile(), {})
    >>> cost = cost_of(mac, Use(8, 3, 0.30), None)
    >>> round(cost.energy_usd), round(cost.owned_usd)  # 8,760 h of 385 W; 5,499 at launch
    (1012, 6511)
    """
    hours, hourly = use.hours, _energy_usd_per_h(one, use)
    price = None if one.price is None else one.price.usd
    reason = one.price_reason if price is None else None
    if hours is None or use.usd_per_kwh is None:
        reason = reason or NO_USE
    elif hourly is None:
        reason = reason or f"{one.power_reason}; --kwh 0 leaves electricity out"
    energy = None if hours is None or hourly is None else hours * hourly
    owned = None if reason or price is None or energy is None else price + energy
    against = one if one.rent_usd_per_h is not None else rented
    rent = None if against is None else against.rent_usd_per_h
    own_rent = one.rent_usd_per_h
    even, even_reason = _break_even(price, hourly, rent, reason)
    return Cost(
        owned,
        reason,
        energy,
        None if own_rent is None or hours is None else own_rent * hours,
        None if against is None else against.name,
        even,
        even_reason,
    )


def _energy_usd_per_h(one: Candidate, use: Use) -> float | None:
    if use.usd_per_kwh is None:
        return None
    if use.usd_per_kwh == 0:
        return 0.0
    return None if one.power_w is None else one.power_w / 1000 * use.usd_per_kwh


def _break_even(
    price: int | None, hourly: float | None, rent: float | None, reason: str | None
) -> tuple[float | None, str | None]:
    """Both work the same hours: price and electricity against rent."""
    if rent is None:
        return None, NO_RENT
    if price is None or hourly is None:
        return None, reason
    return (None, NEVER) if hourly >= rent else (price / (rent - hourly), None)


def cheapest_rented(found: Iterable[Candidate]) -> Candidate | None:
    rented = [one for one in found if one.rent_usd_per_h is not None]
    return min(rented, key=lambda one: one.rent_usd_per_h or 0, default=None)


def tokens_per_joule(one: Candidate, tps: float | None) -> tuple[float | None, str | None]:
    """Tokens of all sequences per joule at full power: at least so many; or why it is not known."""
    if one.power_w is None:
        return None, one.power_reason
    if tps is None:
        return None, "its speed is not known"
    return tps / one.power_w, None


def user_rents(texts: list[str]) -> dict[str, float]:
    """Rents given as ``NAME=USD/h``, by name.

    Raises:
        UsageError: If one is not of that form, or a name is given twice.

    >>> user_rents(["2xh100=4.98/h"])
    {'2xh100': 4.98}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, usd = text.rpartition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:/\s*h)?", usd.strip())
        if not name.strip() or match is None:
            raise UsageError(f"--rent {text[:80]!r}: write it as NAME=USD/h, such as h100=2.49/h")
        name = name.strip().lower()
        if (usd_per_h := float(match[1])) > MOST_USD_PER_H:
            raise UsageError(f"--rent {name}: at most {MOST_USD_PER_H:,} US$ an hour are taken")
        if name in found:
            raise UsageError(f"--rent {text!r}: the rent of {name} is given twice")
        found[name] = usd_per_h
    return found
