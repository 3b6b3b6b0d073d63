"""The machines that are compared: named ones, those sold today, or all of the catalog."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from uma.catalog import Gpu, Mac, UnifiedMachine, bytes_per_s
from uma.errors import UmaError, UnknownName, UsageError
from uma.frozen import dataclass
from uma.machine.facts import Machine
from uma.machine.named import machine_named, machine_of_rows
from uma.machine.names import Entry, Found, find, sold_machines
from uma.plan.compare.prices import TODAY, Price, catalog_price, together
from uma.units import GB, GIB

SOLD_SINCE = 2025
"""The catalog does not say which cards are sold: those that came out in this year or later."""

YOURS = "you have it"
NO_PRICE = "no price of it is known: --price NAME=USD"
NO_HOST_PRICE = "the machine around the cards has a price too: --host-price USD"
NO_POWER = "its power is not in the catalog"
NO_HOST_POWER = "the machine around the cards takes power too: --host-power W"

_COUNTED = re.compile(r"^(\d{1,3})\s*x\s*(.+)$")
_GLOB = re.compile(r"[*?\[]")
MOST_MACS = 4

Owned = Mapping[tuple[str, int], Price]
"""The user's own prices, of so many of a machine or a card together."""


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The machine that cards are in, where it is not known; ``None`` is what nobody said.

    Two channels of DDR5-5600 are 2 x 8 B x 5.6 GT/s = 89.6 GB/s. ``link_bytes_per_s`` is that of
    its slots, of which a card uses what it can. A disk is used where its room is told.
    """

    memory_bytes: int = 64 * GIB
    bandwidth_bytes_per_s: int = 896 * GB // 10
    price: Price | None = None
    power_w: int | None = None
    link_bytes_per_s: int | None = None
    disk_bytes: int | None = None
    disk_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine to be compared, under the name that means it.

    ``price`` and ``power_w``, at full load, are of all of it: of cards with their host; ``None``
    for the reason beside. ``parts_price`` is that of the cards alone. What is known of the
    ``host`` of cards is ``None`` on other machines; ``ssd_bytes_per_s`` is what the disk of one
    memory delivers. ``sold`` says that it can be bought new today. ``alone`` names the single card
    of which this is a pair, where the pair is of interest only if the one is not enough. Of Macs
    ``number`` may be joined by ``thunderbolt``, ``machine`` being each of them.
    """

    name: str
    machine: Machine
    price: Price | None = None
    price_reason: str | None = None
    parts_price: Price | None = None
    sold: bool = False
    host: HostProfile | None = None
    ssd_bytes_per_s: int | None = None
    alone: str | None = None
    power_w: int | None = None
    power_reason: str | None = NO_POWER
    rent_usd_per_h: float | None = None
    number: int = 1
    thunderbolt: str = ""

    @property
    def discrete(self) -> bool:
        return self.machine.kind == "discrete"

    @property
    def host_bandwidth_bytes_per_s(self) -> int | None:
        """Of the memory beside cards; ``None`` is not known."""
        return None if self.host is None else self.host.bandwidth_bytes_per_s

    @property
    def price_of_today(self) -> bool:
        """Whether it can be had for its price: it is sold, and the price is no launch price."""
        own = self.price is not None and self.price.kind == "user"
        return own or (self.sold and self.price is not None and self.price.kind in TODAY)


def candidates(
    names: Iterable[str],
    host: HostProfile,
    prices: Mapping[str, Price],
    macos: int | None = None,
) -> list[Candidate]:
    """The machines of these names or patterns, such as ``mac-studio-*`` and ``2xrtx-*``.

    ``prices`` are the user's own, by names of machines, of one card, or of several as 2xrtx-3090.

    Raises:
        UnknownName: If nothing is called one of them.
        UsageError: If machines are counted that cannot be put together.
    """
    own = _canonical(prices)
    found: dict[Any, Candidate] = {}
    for name in names:
        number, rest = _counted(name)
        if _GLOB.search(rest):
            for one in _matching(name, rest.replace(" ", "-"), number, host, own, macos):
                found.setdefault(_identity(one), one)
            continue
        if number > 1 and isinstance((entries := find(rest).entries)[0].row, Mac):
            joined = _of_entries(entries, number, host, own, macos)
            assert joined is not None
            one = replace(joined, name=name)
        else:
            machine = machine_named(name, macos=macos)
            one = _candidate(name, machine, _parts(name, machine), host, own)
        found.setdefault(_identity(one), one)
    return list(found.values())


def _parts(name: str, machine: Machine) -> list[tuple[Entry, ...]]:
    """The rows of each card, or of what is sold whole."""
    if len({device.name for device in machine.devices}) > 1:
        return [find(device.name).entries for device in machine.devices]
    entries = find(name).entries
    return [entries] * (len(machine.devices) if isinstance(entries[0].row, Gpu) else 1)


def _counted(name: str) -> tuple[int, str]:
    counted = _COUNTED.match(name.strip().lower())
    return (int(counted[1]), counted[2].strip()) if counted else (1, name.strip().lower())


def _identity(one: Candidate) -> tuple[str, int, int]:
    """The same for every way to write a machine."""
    return one.machine.name, one.machine.memory_bytes, one.number


def _matching(
    name: str,
    pattern: str,
    number: int,
    host: HostProfile,
    own: Owned,
    macos: int | None,
) -> list[Candidate]:
    """The machines that a pattern means; of several of each those that can be put together.

    Raises:
        UnknownName: If nothing is called like it.
        UsageError: If none of them can be put together.
    """
    matching = [e for e in sold_machines() if fnmatchcase(e[0].name, pattern)]
    if not matching:
        raise UnknownName(f"no machine of the catalog is called like {name!r}: uma machines")
    if number > 1 and not any(isinstance(e[0].row, Gpu | Mac) for e in matching):
        raise UsageError(f"{name!r}: only graphics cards and Macs are counted, as in 2xrtx-*")
    if number > MOST_MACS and any(isinstance(e[0].row, Gpu) for e in matching):
        matching = [e for e in matching if isinstance(e[0].row, Gpu)]
    tried = [_of_entries(entries, number, host, own, macos) for entries in matching]
    return [one for one in tried if one is not None]


def catalog_candidates(
    host: HostProfile, prices: Mapping[str, Price], *, sold: bool, macos: int | None = None
) -> list[Candidate]:
    """Every machine of the catalog, or those that are sold; cards alone and in pairs."""
    own = _canonical(prices)
    found = []
    for entries in sold_machines():
        if sold and not _is_sold(entries):
            continue
        for number in (1, 2) if isinstance(entries[0].row, Gpu) else (1,):
            one = _of_entries(entries, number, host, own, macos)
            if one is not None:
                found.append(replace(one, alone=entries[0].name) if number > 1 else one)
    return found


def this_candidate(machine: Machine, host: HostProfile) -> Candidate:
    """The machine that is asked on: its owner knows what it cost."""
    beside = host if machine.kind == "discrete" else None
    return Candidate("this machine", machine, price_reason=YOURS, host=beside)


def with_rents(
    found: Iterable[Candidate],
    rents: Mapping[str, float],
    host: HostProfile,
    prices: Mapping[str, Price],
) -> list[Candidate]:
    """``found`` with what machines cost an hour; those that are not among them are added."""
    all_ = list(found)
    for name, usd in rents.items():
        named = {_identity(one): one for one in candidates([name], host, prices)}
        there = {_identity(one) for one in all_}
        all_ += [one for key, one in named.items() if key not in there]
        all_ = [
            replace(one, rent_usd_per_h=usd) if _identity(one) in named else one for one in all_
        ]
    return all_


def _canonical(prices: Mapping[str, Price]) -> dict[tuple[str, int], Price]:
    """By the catalog's own names.

    Raises:
        UsageError: If two prices are of the same machine.
    """
    own: dict[tuple[str, int], Price] = {}
    for text, price in prices.items():
        number, rest = _counted(text)
        key = find(rest).entries[0].name, number
        if own.setdefault(key, price) is not price:
            raise UsageError(f"--price {text!r}: the price of {key[0]} is given twice")
    return own


def _of_entries(
    entries: tuple[Entry, ...],
    number: int,
    host: HostProfile,
    own: Owned,
    macos: int | None,
) -> Candidate | None:
    """``None`` for what is not counted, and where the memory is not known.

    Raises:
        UsageError: If there are more Macs than are planned together.
    """
    first = entries[0]
    mac = isinstance(first.row, Mac)
    if number > 1 and not isinstance(first.row, Gpu | Mac):
        return None
    if mac and number > MOST_MACS:
        raise UsageError(f"{number} Macs: at most {MOST_MACS} are planned together")
    try:
        machine = machine_of_rows(
            Found(entries, 1 if mac else number, first.memory_gib), macos=macos
        )
    except UmaError:
        return None
    name = first.name if number == 1 else f"{number}x{first.name}"
    return _candidate(name, machine, [entries] * number, host, own)


def _candidate(
    name: str,
    machine: Machine,
    parts: Sequence[tuple[Entry, ...]],
    host: HostProfile,
    own: Owned,
) -> Candidate:
    """``parts`` are the rows of each card, or of each machine that is sold whole."""
    prices = [_price(entries, own) for entries in parts]
    known = [price for price in prices if price is not None]
    price = together(known) if len(known) == len(prices) else None
    if len({entries[0].name for entries in parts}) == 1:  # of all of them together
        price = own.get((parts[0][0].name, len(parts)), price)
    powers = [_power_w(entries) for entries in parts]
    power = None if None in powers else sum(one or 0 for one in powers)
    row = parts[0][0].row
    ssd = row.ssd_read_gb_per_s if isinstance(row, Mac) else None
    one = Candidate(
        name,
        machine,
        sold=all(_is_sold(entries) for entries in parts),
        price=price,
        price_reason=None if price else NO_PRICE,
        ssd_bytes_per_s=None if ssd is None else bytes_per_s(ssd),
        power_w=power,
        power_reason=NO_POWER if power is None else None,
        number=len(parts) if isinstance(row, Mac) else 1,
        thunderbolt=row.thunderbolt if isinstance(row, Mac) else "",
    )
    if machine.kind != "discrete" or machine.host_memory_bytes is not None:
        return one  # of one memory, or with its host, as GH200
    return _in_host(one, host)


def _in_host(cards: Candidate, host: HostProfile) -> Candidate:
    """Cards with the machine around them."""
    machine, price, power = cards.machine, cards.price, cards.power_w
    whole = None if price is None or host.price is None else together([price, host.price])
    links = [rate for rate in (machine.link_bytes_per_s, host.link_bytes_per_s) if rate is not None]
    return replace(
        cards,
        machine=replace(
            machine,
            host_memory_bytes=host.memory_bytes,
            link_bytes_per_s=min(links) if machine.link_bytes_per_s is not None else None,
        ),
        price=whole,
        price_reason=cards.price_reason if whole or not price else NO_HOST_PRICE,
        parts_price=price,
        power_w=None if power is None or host.power_w is None else power + host.power_w,
        power_reason=NO_HOST_POWER
        if power is not None and host.power_w is None
        else cards.power_reason,
        host=host,
    )


def _power_w(entries: tuple[Entry, ...]) -> int | None:
    """The most of rows that are one machine: of cards their board's limit."""
    found = [
        row.max_power_w
        if isinstance(row, Mac)
        else row.tdp_w
        if isinstance(row, Gpu)
        else row.power_w
        if isinstance(row, UnifiedMachine)
        else None
        for row in (entry.row for entry in entries)
    ]
    return max((watts for watts in found if watts), default=None)


def _price(entries: tuple[Entry, ...], own: Owned) -> Price | None:
    """The lowest of rows that are one machine, or the user's own."""
    if (entries[0].name, 1) in own:
        return own[entries[0].name, 1]
    rows = [entry.row for entry in entries if isinstance(entry.row, Mac | Gpu | UnifiedMachine)]
    found = [catalog_price(row.price_usd, row.price_kind, str(row.year)) for row in rows]
    return min((one for one in found if one), key=lambda one: one.usd, default=None)


def _is_sold(entries: tuple[Entry, ...]) -> bool:
    """Whether the catalog says so, or the year does where it does not say."""
    return any(_is_new(entry.row) for entry in entries)


def _is_new(row: object) -> bool:
    if isinstance(row, Mac):
        return row.sold_new == "yes"
    if not isinstance(row, Gpu | UnifiedMachine):
        return False
    return row.year >= SOLD_SINCE and row.price_usd is not None
