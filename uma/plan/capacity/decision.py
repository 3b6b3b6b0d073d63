"""One question, a row for each machine, and which to take: by ``uma compare``, asked many times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource
from uma.frozen import dataclass
from uma.plan.capacity.cards import comparison, plan_row
from uma.plan.capacity.facts import PlanRow
from uma.plan.compare import Candidate, Comparison, Row, Wanted
from uma.plan.compare.search import Preference

USERS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
PREFERENCES: dict[Preference, str] = {
    "quality": "most bits",
    "speed": "most tokens per second",
    "context": "most memory to spare",
    "price": "lowest price",
}


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A machine's plan; ``does`` says that it does the work asked.

    ``users`` is the largest of ``USERS`` that it serves at once as is asked, each with the whole
    context, ``largest_context_tokens`` the largest of ``CONTEXTS`` for one; ``None`` for none.
    """

    plan: PlanRow
    does: bool
    users: int | None
    largest_context_tokens: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    """``recommended`` is ``None`` where no machine does the work. ``texts`` tell why.

    ``flips`` are what would make it another one.
    """

    model: str
    context_tokens: int
    min_bits: int
    min_tps: float
    rows: tuple[DecisionRow, ...]
    recommended: str | None
    why: str
    flips: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every machine."""

    source: ModelSource
    architecture: Architecture
    context_tokens: int
    candidates: tuple[Candidate, ...]
    wanted: Wanted

    def compared(
        self, *, context_tokens: int | None = None, users: int = 1, prefer: Preference = "quality"
    ) -> Comparison:
        return comparison(
            self.source,
            self.architecture,
            context_tokens or self.context_tokens,
            self.candidates,
            replace(self.wanted, prefer=prefer),
            batch_size=users,
        )

    def does(self, row: Row) -> bool:
        return row.plan is not None and row.reaches(self.wanted.min_tps)


def decision(question: Question) -> Decision:
    """The rows in the order of the candidates, the recommendation, and what would flip it."""
    first = question.compared()
    users = _most(question, {n: question.compared(users=n) for n in USERS})
    longest = _most(question, {n: question.compared(context_tokens=n) for n in _contexts(question)})
    by_name = {row.candidate.name: row for row in first.rows}
    rows = tuple(
        DecisionRow(
            plan_row(question.source.name, by_name[one.name]),
            question.does(by_name[one.name]),
            users.get(one.name),
            longest.get(one.name),
        )
        for one in question.candidates
    )
    chosen, why = _recommended(question, first)
    return Decision(
        question.source.name,
        question.context_tokens,
        question.wanted.min_bits,
        question.wanted.min_tps,
        rows,
        None if chosen is None else chosen.candidate.name,
        why,
        tuple(_flips(question, chosen, rows)),
    )


def _contexts(question: Question) -> list[int]:
    longest = question.architecture.max_position_embeddings
    return [n for n in CONTEXTS if longest is None or n <= longest]


def _most(question: Question, found: Mapping[int, Comparison]) -> dict[str, int]:
    """The largest number with which each machine still does the work, by name."""
    most: dict[str, int] = {}
    for number in sorted(found):
        for row in found[number].rows:
            if question.does(row):
                most[row.candidate.name] = number
    return most


def _recommended(question: Question, first: Comparison) -> tuple[Row | None, str]:
    able = [row for row in first.rows if question.does(row)]
    if not able:
        return None, f"no machine reaches {question.wanted.min_tps:g} tokens/s"
    if len(able) == 1:
        return able[0], "it is the only one that does the work"
    if first.cheapest is not None:
        return first.cheapest, "it is the cheapest that does the work at a price of today"
    best = next(row for row in first.rows if question.does(row))
    return best, (
        "of those that do the work it runs the model in the most bits, and fastest of those; "
        "prices of today are not known for all: give --price NAME=USD"
    )


def _flips(question: Question, chosen: Row | None, rows: Sequence[DecisionRow]) -> Iterator[str]:
    if chosen is None:
        return
    name = chosen.candidate.name
    own = next(row for row in rows if row.plan.machine == name)
    for prefer, words in PREFERENCES.items():
        found = question.compared(prefer=prefer)
        best = next((row for row in found.rows if question.does(row)), None)
        if best is not None and best.candidate.name != name:
            yield f"{words} instead: {best.candidate.name}"
    others = [row for row in rows if row.does and row.plan.machine != name]
    yield from _beyond("requests at once", own.users, [(r.plan.machine, r.users) for r in others])
    yield from _beyond(
        "tokens of context",
        own.largest_context_tokens,
        [(r.plan.machine, r.largest_context_tokens) for r in others],
    )
    yield from _prices(chosen, others)


def _beyond(what: str, own: int | None, others: Sequence[tuple[str, int | None]]) -> Iterator[str]:
    more = [(name, number) for name, number in others if (number or 0) > (own or 0)]
    if more:
        name, number = max(more, key=lambda one: one[1] or 0)
        yield f"more than {own or 0:,} {what}: {name} does {number:,}"


def _prices(chosen: Row, others: Sequence[DecisionRow]) -> Iterator[str]:
    price = chosen.price_usd
    if price is None:
        return
    for row in others:
        other = row.plan.price_usd if row.plan.price_note is None else None
        if other is not None and other > price:
            yield f"{row.plan.machine} for less than US$ {price:,} (now {other:,})"
