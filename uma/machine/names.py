"""What a machine's name means: ``mac-studio-m3-ultra-512``, ``M4 Max 128GB``, ``2x h100``.

A name means the row of the catalog that has all its words and as few others as possible. Sizes
are memory as sold; years, brands and form factors may be left out.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from uma import catalog
from uma.catalog import Chip, Gpu, Mac, UnifiedMachine, words
from uma.errors import UnknownName, UsageError
from uma.frozen import dataclass

_SIZE = re.compile(r"(\d+)\s*(?:gib|gb)\b|(?<![a-z\d])(\d+)g\b")  # not the G of A10G
_CORES = re.compile(r"(\d+)[\s-]*(?:gpu[\s-]*)?(?:cores?|c)\b")
_MEMORY_TYPES = re.compile(r"\b(?:hbm|gddr|lpddr)\w*")
_ASIDES = re.compile(r"\(.*?\)")
# "2xh100", "2 x h100", "h100 x2"; "7900 XT" is none.
_COUNT = re.compile(
    r"^(?:(\d{1,3})(?:[x\u00d7*]\s*|\s+[x\u00d7*]\s+)|(dual)\s+)(.+)$|^(.+?)\s[x\u00d7*]\s*(\d{1,3})$"
)
_TOO_MANY = re.compile(r"\s*\d{5,}\s*[x\u00d7*]")  # four digits begin names of cards
_MACOS = re.compile(r"\bmacos\s*(\d+)?[\d.]*")
_SHORT = {
    "mbp": "macbook pro",
    "mba": "macbook air",
    "dgxspark": "dgx spark",
    "mobile": "laptop",
}
# fmt: off
_IGNORED = frozenset({
    "amd", "apple", "card", "chip", "edition", "geforce", "generation", "gpu", "graphics", "in",
    "inch", "instinct", "intel", "memory", "nvidia", "quadro", "radeon", "ram", "tesla", "the",
    "unified", "vram", "with",
})
# fmt: on
# Words of a row that a name may leave out: families, and the shapes a card comes in.
_OPTIONAL = frozenset(
    {"arc", "blackwell", "nvl", "pcie", "per", "rtx", "rx", "server", "sxm", "workstation"}
)
_WITH_A_SECOND_TIER = "GH200 96GB"  # the whole machine is in unified.csv

Row = Chip | Mac | Gpu | UnifiedMachine


class Entry(NamedTuple):
    """A row, the memory it is sold with, and the words that name it.

    ``needed`` are those that tell it from others; ``allowed`` may also be said.
    """

    name: str
    row: Row
    memory_gib: int | None
    sizes: frozenset[int]
    needed: tuple[str, ...]
    allowed: tuple[str, ...]

    @property
    def apple(self) -> bool:
        return isinstance(self.row, Chip | Mac)


@dataclass(frozen=True, slots=True)
class Found:
    """What a name means: rows that are one machine, the first of them its description.

    ``others`` are the names of rows that it could mean as well.
    """

    entries: tuple[Entry, ...]
    number: int = 1
    memory_gib: int | None = None
    cores: int | None = None
    macos: int | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Query:
    words: tuple[str, ...]
    sizes: tuple[int, ...]
    cores: int | None
    macos: int | None


def find(name: str) -> Found:
    """The rows that ``name`` means.

    Raises:
        UnknownName: If nothing is called that, with the three nearest names, or several things.
        UsageError: If it counts machines that cannot be counted together.
    """
    count, one = _counted(name)
    query = _query(one)
    matches = _matching(query)
    if not matches:
        raise UnknownName(_unknown(name, query))
    least = min(_left_out(entry, query) for entry in matches)
    best = [entry for entry in matches if _left_out(entry, query) == least]
    meant, others = _one(name, _by_last_number(best, query))
    if count > 1 and not isinstance(meant[0].row, Gpu):
        raise UsageError(f"{name!r}: only graphics cards are counted, as in 2xh100")
    memory = meant[0].memory_gib or next(iter(query.sizes), None)
    return Found(meant, count, memory, query.cores, query.macos, others)


@cache
def machine_names() -> tuple[str, ...]:
    """Every name of the catalog, as this module writes it, each once."""
    return tuple(dict.fromkeys(entry.name for entry in (*_apple(), *_others())))


def sold_machines() -> list[tuple[Entry, ...]]:
    """Macs, other machines of one memory, and cards; rows of one name together."""
    by_name: dict[str, list[Entry]] = {}
    for entry in (*_mac_entries(), *_others()):
        by_name.setdefault(entry.name, []).append(entry)
    return [tuple(entries) for entries in by_name.values()]


def _counted(name: str) -> tuple[int, str]:
    match = _COUNT.match(name.strip().lower())
    if match is None:
        if _TOO_MANY.match(name):
            raise UsageError(f"{name!r:.80} is no machine: at most 999 cards are counted")
        return 1, name
    number, dual, after, before, last = match.groups()
    count = 2 if dual else int(number or last)
    if count < 1:
        raise UsageError(f"{name!r} is no machine: it counts {count} cards")
    return count, after or before


def _query(text: str) -> _Query:
    """The words of a name, and apart from them its sizes in GB, GPU cores and macOS version."""
    rest = _MEMORY_TYPES.sub(" ", text.lower())
    macos = _MACOS.search(rest)
    rest = _MACOS.sub(" ", rest)
    sizes = _sizes(rest)
    rest = _SIZE.sub(" ", rest)
    cores = _CORES.findall(rest)
    found: list[str] = []
    for word in words(_CORES.sub(" ", rest)):
        found.extend(_SHORT.get(word, word).split())
    return _Query(
        words=tuple(word for word in found if word not in _IGNORED),
        sizes=sizes,
        cores=int(cores[-1]) if cores else None,
        macos=int(macos[1]) if macos and macos[1] else None,
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(first or second) for first, second in _SIZE.findall(text))


def _matching(query: _Query) -> list[Entry]:
    """The rows with all words of the query; files and lines that need not be read are not."""
    if len("".join(query.words)) < 2:
        return []
    apple = re.match(r"i?mac|m\d|a18", "".join(query.words)) or "mac" in query.words
    for entries in (_apple, _others) if apple else (_others, _apple):
        found = [entry for entry in entries(*query.words) if _matches(entry, query)]
        if found:
            return found
    return []


def _matches(entry: Entry, query: _Query) -> bool:
    if not query.words or not all(
        entry.memory_gib is None or s in entry.sizes for s in query.sizes
    ):
        return False
    if query.cores is not None and not _has_cores(entry, query.cores):
        return False
    said = (*entry.needed, *entry.allowed)
    return all(said.count(word) >= query.words.count(word) for word in query.words)


def _has_cores(entry: Entry, cores: int) -> bool:
    if isinstance(entry.row, Mac):
        return cores in (*entry.row.gpu_cores, *entry.row.cpu_cores)
    return isinstance(entry.row, Chip) and cores in (entry.row.gpu_cores, entry.row.cpu_cores)


def _left_out(entry: Entry, query: _Query) -> int:
    left = list(entry.needed)
    for word in query.words:
        if word in left:
            left.remove(word)
    return len(left)


def _by_last_number(best: list[Entry], query: _Query) -> list[Entry]:
    """Those whose memory is the number that ends the name, if any: "iMac 24" may be inches."""
    last = query.words[-1]
    sold = [e for e in best if not query.sizes and last == str(e.memory_gib)]
    return sold or best


def _one(name: str, best: list[Entry]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Of equally good entries those that are one machine, and the names of others like it.

    Raises:
        UnknownName: If their memory differs, or their chips.
    """
    # GH200 is a whole machine, and a card only in name; a bare H100 is the SXM one.
    shared = [entry for entry in best if isinstance(entry.row, UnifiedMachine)] or best
    usual = [entry for entry in shared if "sxm" in entry.allowed] or shared
    for tried in (shared, usual):
        if len({(_chip(entry), entry.memory_gib) for entry in tried}) == 1:
            if tried[0].apple:
                return tuple(tried), ()
            first = next(entry for entry in usual if entry in tried)
            return (first,), tuple(entry.name for entry in shared if entry is not first)
    known = ", ".join(list(dict.fromkeys(entry.name for entry in best))[:8])
    raise UnknownName(f"{name!r} may be {known}; say which")


def _chip(entry: Entry) -> str | None:
    return entry.row.chip if isinstance(entry.row, Chip | Mac) else None


def _unknown(name: str, query: _Query) -> str:
    """Why there is no such machine: it was sold with other memory, or is not known at all."""
    if not query.sizes and query.words and query.words[-1].isdecimal():
        query = replace(query, words=query.words[:-1], sizes=(int(query.words[-1]),))
    other = replace(query, sizes=())
    entries = [entry for entry in _matching(other) if not _left_out(entry, other)]
    known = sorted({e.memory_gib for e in entries if e.memory_gib})
    if query.sizes and known:
        option = "--vram" if isinstance(entries[0].row, Gpu) else "--ram"
        listed = ", ".join(map(str, known))
        return f"no {name!r} is known, only with {listed} GB; {option} describes another"
    close = ", ".join(catalog.nearest("-".join(words(name)), machine_names()))
    return f"no machine is called {name!r}; nearest: {close}. uma machines lists all"


@cache
def _apple(*with_words: str) -> tuple[Entry, ...]:
    return (*_chip_entries(*with_words), *_mac_entries(*with_words))


@cache
def _others(*with_words: str) -> tuple[Entry, ...]:
    return (*_unified_entries(*with_words), *_gpu_entries(*with_words))


def _chip_entries(*with_words: str) -> Iterator[Entry]:
    for row in catalog.chips(*with_words):
        needed = words(row.chip)
        for memory in row.memory_gib:
            name = "-".join((*row.chip.lower().split(), str(memory)))
            yield Entry(name, row, memory, frozenset({memory}), needed, (str(memory),))


def _mac_entries(*with_words: str) -> Iterator[Entry]:
    for row in catalog.macs(*with_words):
        family = re.match(r"[A-Za-z ]+", row.model)
        assert family is not None
        kind = family[0].strip().lower()
        rest = words(row.model[family.end() :])
        name = "-".join((*kind.split(), *row.chip.lower().split(), str(row.memory_gib)))
        needed = (*words(kind), *words(row.chip))
        memory = row.memory_gib
        yield Entry(name, row, memory, frozenset({memory}), needed, (str(memory), *rest))


def _gpu_entries(*with_words: str) -> Iterator[Entry]:
    for row in catalog.gpus(*with_words):
        if row.name == _WITH_A_SECOND_TIER:
            continue
        plain = _SIZE.sub(" ", _ASIDES.sub(" ", row.name.lower()))
        split = [word for word in words(plain) if word not in _IGNORED]
        needed = tuple(w for w in split if w not in _OPTIONAL)
        optional = tuple(w for w in split if w in _OPTIONAL)
        if "sxm" in split:  # SXM4 is said as SXM, SXM4 or not at all
            needed = needed[: split.index("sxm")]
            optional = tuple(split[len(needed) :])
        name = re.sub(r"[\s-]+", "-", _ASIDES.sub("", row.name).strip().lower())
        name = re.sub(r"^(?:geforce|tesla)-", "", name)
        allowed = (*optional, str(row.memory_gb))
        yield Entry(name, row, row.memory_gb, frozenset({row.memory_gb}), needed, allowed)


def _unified_entries(*with_words: str) -> Iterator[Entry]:
    for row in catalog.unified_machines(*with_words):
        plain = _ASIDES.sub(" ", row.name.lower())
        split = [word for word in words(_SIZE.sub(" ", plain)) if word not in _IGNORED]
        sizes = {*_sizes(row.name.lower()), row.memory_gib or 0}
        aside = " ".join(_ASIDES.findall(row.name))
        allowed = (*words(_SIZE.sub(" ", f"{aside} {row.chip}".lower())), *map(str, sizes))
        name = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        name = re.sub(r"^(?:nvidia|amd|intel)-", "", name)
        yield Entry(name, row, row.memory_gib, frozenset(sizes), tuple(split), allowed)
