"""The machines that are compared: named ones, those sold today, or all of the catalog."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

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
NO_HOST_PRICE = "the machine around the cards has a price too: --host-price USD"

_GLOB = re.compile(r"^(?:(\d+)\s*x\s*)?(.*[*?\[].*)$")


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The machine that cards are in, where it is not known; its price ``None`` if nobody said it.

    Two channels of DDR5-5600 are 2 x 8 B x 5.6 GT/s = 89.6 GB/s.
    """

    memory_bytes: int = 64 * GIB
    bandwidth_bytes_per_s: int = 896 * GB // 10
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine to be compared, under the name that means it.

    ``price`` is of all of it: of cards with their host; ``None`` for the ``price_reason``.
    ``parts_price`` is that of the cards alone. ``host_bandwidth_bytes_per_s`` is that of the
    memory beside cards, ``ssd_bytes_per_s`` what the disk delivers; ``None`` is not known.
    ``sold`` says that it can be bought new today. ``alone`` names the single card of which this
    is a pair, where the pair is of interest only if the one is not enough.
    """

    name: str
    machine: Machine
    price: Price | None = None
    price_reason: str | None = None
    parts_price: Price | None = None
    sold: bool = False
    host_bandwidth_bytes_per_s: int | None = None
    ssd_bytes_per_s: int | None = None
    alone: str | None = None

    @property
    def discrete(self) -> bool:
        return self.machine.kind == "discrete"

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

    ``prices`` are the user's own, by names of machines or of one card.

    Raises:
        UnknownName: If nothing is called one of them.
        UsageError: If machines are counted that are no cards.
    """
    own = _canonical(prices)
    found: dict[str, Candidate] = {}
    for name in names:
        glob = _GLOB.match(name.strip().lower())
        if glob is None:
            machine = machine_named(name, macos=macos)
            parts = [find(device.name).entries for device in machine.devices]
            parts = parts or [find(name).entries]
            found.setdefault(name, _candidate(name, machine, parts, host, own))
            continue
        matching = [e for e in sold_machines() if fnmatchcase(e[0].name, glob[2])]
        if not matching:
            raise UnknownName(f"no machine of the catalog is called like {name!r}: uma machines")
        if glob[1] and not any(isinstance(e[0].row, Gpu) for e in matching):
            raise UsageError(f"{name!r}: only graphics cards are counted, as in 2xrtx-*")
        for entries in matching:
            one = _of_entries(entries, int(glob[1] or 1), host, own, macos)
            if one is not None:
                found.setdefault(one.name, one)
    return list(found.values())


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
    bandwidth = host.bandwidth_bytes_per_s if machine.kind == "discrete" else None
    return Candidate(
        "this machine", machine, price_reason=YOURS, host_bandwidth_bytes_per_s=bandwidth
    )


def _canonical(prices: Mapping[str, Price]) -> dict[str, Price]:
    return {find(name).entries[0].name: price for name, price in prices.items()}


def _of_entries(
    entries: tuple[Entry, ...],
    number: int,
    host: HostProfile,
    own: Mapping[str, Price],
    macos: int | None,
) -> Candidate | None:
    """``None`` for what is not counted, and where the memory is not known."""
    first = entries[0]
    if number > 1 and not isinstance(first.row, Gpu):
        return None
    try:
        machine = machine_of_rows(Found(entries, number, first.memory_gib), macos=macos)
    except UmaError:
        return None
    name = first.name if number == 1 else f"{number}x{first.name}"
    return _candidate(name, machine, [entries] * number, host, own)


def _candidate(
    name: str,
    machine: Machine,
    parts: Sequence[tuple[Entry, ...]],
    host: HostProfile,
    own: Mapping[str, Price],
) -> Candidate:
    """``parts`` are the rows of each card, or of a machine that is sold whole."""
    prices = [_price(entries, own) for entries in parts]
    known = [price for price in prices if price is not None]
    price = together(known) if len(known) == len(prices) else None
    ssd = next((e.row.ssd_read_gb_per_s for e in parts[0] if isinstance(e.row, Mac)), None)
    one = Candidate(
        name,
        machine,
        sold=all(_is_sold(entries) for entries in parts),
        price=price,
        price_reason="no price of it is known: --price NAME=USD" if price is None else None,
        ssd_bytes_per_s=None if ssd is None else bytes_per_s(ssd),
    )
    if machine.kind != "discrete" or machine.host_memory_bytes is not None:
        return one  # of one memory, or with its host, as GH200
    whole = None if price is None or host.price is None else together([price, host.price])
    return replace(
        one,
        machine=replace(machine, host_memory_bytes=host.memory_bytes),
        price=whole,
        price_reason=one.price_reason if whole or not price else NO_HOST_PRICE,
        parts_price=price,
        host_bandwidth_bytes_per_s=host.bandwidth_bytes_per_s,
    )


def _price(entries: tuple[Entry, ...], own: Mapping[str, Price]) -> Price | None:
    """The lowest of rows that are one machine, or the user's own."""
    if entries[0].name in own:
        return own[entries[0].name]
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
