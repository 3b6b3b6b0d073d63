"""The machines of the catalog, as a list to look through."""

from typing import Literal, NamedTuple, get_args

from uma.catalog import Gpu, UnifiedMachine, has_words
from uma.errors import UnknownName, UsageError
from uma.machine.facts import Machine
from uma.machine.named import machine_of_rows
from uma.machine.names import Entry, Found, sold_machines
from uma.units import GIB

Kind = Literal["mac", "gpu", "unified"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Listed(NamedTuple):
    """A machine under the name that means it; ``machine`` is ``None`` if its memory is unknown."""

    name: str
    kind: Kind
    title: str
    memory_gib: int | None
    machine: Machine | None


def listed_machines(
    text: str = "",
    *,
    kind: str | None = None,
    min_memory_bytes: int = 0,
    chip: str | None = None,
) -> list[Listed]:
    """The machines of that kind, with that chip and at least that memory as sold.

    Their names have the words of ``text``.

    Raises:
        UnknownName: If there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise UnknownName(f"--kind {kind} is no kind of machine; known: {', '.join(KINDS)}")
    return [
        _listed(entries)
        for entries in sold_machines()
        if kind in (None, _kind(entries[0]))
        and (entries[0].memory_gib or 0) * GIB >= min_memory_bytes
        and has_words(_said(entries[0]), text)
        and has_words(_chip(entries[0]), "-".join((chip or "").split()))
    ]


def _listed(entries: tuple[Entry, ...]) -> Listed:
    first = entries[0]
    try:
        machine = machine_of_rows(Found(entries, memory_gib=first.memory_gib))
    except UsageError:
        machine = None
    return Listed(first.name, _kind(first), _title(first), first.memory_gib, machine)


def _kind(entry: Entry) -> Kind:
    if entry.apple:
        return "mac"
    return "gpu" if isinstance(entry.row, Gpu) else "unified"


def _title(entry: Entry) -> str:
    return entry.row.name if isinstance(entry.row, Gpu | UnifiedMachine) else entry.name


def _chip(entry: Entry) -> str:
    return entry.row.name if isinstance(entry.row, Gpu) else entry.row.chip


def _said(entry: Entry) -> str:
    return f"{entry.name} {_title(entry)} {_chip(entry)}"
