"""Of all machines the cheapest that does the work, those that nothing beats, and those to show."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from uma.plan.compare.costs import cost_of

if TYPE_CHECKING:
    from uma.plan.compare.search import Comparison, Row, Wanted


def smallest(rows: "Sequence[Row]", found: "Comparison", shown: int) -> "list[Row]":
    """The cheapest; those that reach the speed, the smallest first; that run; the others."""
    min_tps = found.wanted.min_tps

    def size(row: "Row") -> tuple[float, ...]:
        plan, memory = row.plan, row.candidate.machine.memory_bytes
        kind = 3 if not row.runs else 2 if row.decode_tps is None else not row.reaches(min_tps)
        tight = plan is not None and plan.verdict != "fits"
        return (row is not found.cheapest, kind, tight, memory, row.price_usd or 0)

    pools = [
        sorted((row for row in rows if row.candidate.discrete == discrete), key=size)
        for discrete in (False, True)
    ]
    kept = [pools[0][: shown - min(len(pools[1]), shown // 2)]]
    kept.append(pools[1][: shown - len(kept[0])])
    return [row for pool in kept for row in pool]


def cheapest(
    rows: "Sequence[Row]", able: "Sequence[Row]", wanted: "Wanted"
) -> "tuple[Row | None, str | None]":
    """The cheapest of those that do the work, at a price of today, or why there is none.

    One that fits comes before one that is tight; of the same price the better is taken.
    """
    costs = ((row, spent_usd(row, wanted)) for row in able)
    priced = [(row, usd) for row, usd in costs if usd is not None]
    if priced:
        return min(priced, key=lambda one: _dear(one[0], one[1], wanted))[0], None
    if not able:
        fast = f" at {wanted.min_tps:g} tokens/s" if wanted.min_tps else ""
        unknown = sum(row.runs and row.decode_tps is None for row in rows)
        if unknown:
            return None, f"no machine is known to do it{fast}; of {unknown} the speed is not known"
        return None, f"no machine does it{fast}"
    return None, (
        "no price of today is known of those that reach the speed: give --price NAME=USD, for "
        "cards --host-price USD too, or --launch-prices for what they once cost"
    )


def _dear(row: "Row", usd: float, wanted: "Wanted") -> tuple[float, ...]:
    assert row.plan is not None
    better = [-row.plan.bits, -(row.decode_tps or 0)]
    if wanted.prefer == "speed":
        better.reverse()
    return (row.plan.verdict != "fits", usd, *better)


def left_out(
    able: "Sequence[Row]", best: "Row | None", wanted: "Wanted"
) -> Iterator[tuple[str, str]]:
    """What could be cheaper, and why it is not: it is tight, or has no price of its host."""
    if best is None:
        return
    usd = spent_usd(best, wanted)
    for row in able:
        name, own = row.candidate.name, spent_usd(row, wanted)
        parts = row.candidate.parts_price
        if own is not None and usd is not None and own < usd:
            yield name, f"would be cheaper, US$ {own:,.0f}, but is tight"
        elif own is None and parts is not None and parts.kind == "user" and row.price_usd is None:
            yield name, f"is left out: {row.candidate.price_reason}"


def spent_usd(row: "Row", wanted: "Wanted") -> float | None:
    """What the work costs on a machine, bought at a price of today or rented, whichever is less.

    Over the years of its use where that is told, else the price alone; ``None`` is not known.
    """
    cost = cost_of(row.candidate, wanted.use, None)
    bought = cost.owned_usd if wanted.use.hours is not None else row.price_usd
    if not (wanted.launch_prices or row.candidate.price_of_today):
        bought = None
    return min((usd for usd in (bought, cost.rented_usd) if usd is not None), default=None)


def front_of(able: "Sequence[Row]", parameters: int) -> "tuple[Row, ...]":
    """Of those that do the work and have a price, what no other beats in all its virtues."""
    priced = [row for row in able if row.price_usd is not None]
    front = [row for row in priced if not any(_beats(other, row, parameters) for other in priced)]
    return tuple(sorted(front, key=lambda row: row.price_usd or 0))


def _beats(other: "Row", row: "Row", parameters: int) -> bool:
    """In price, bits, speed and memory to spare at once, in the width of ``row``.

    What is held in more bits would be as much faster in fewer, and smaller; of training, where
    ``parameters`` is 0, nothing is known of that.
    """
    assert other.plan is not None
    assert row.plan is not None
    more_bits = max(0.0, other.plan.bits_per_weight - row.plan.bits_per_weight)
    wide = 1 + more_bits / row.plan.bits_per_weight if parameters else 1.0
    theirs = _virtues(other, wide, more_bits * parameters / 8)
    mine = _virtues(row, 1.0, 0)
    return theirs != mine and all(a >= b for a, b in zip(theirs, mine, strict=True))


def _virtues(row: "Row", wide: float, weights: float) -> tuple[float, ...]:
    assert row.plan is not None
    speed, spare = (row.decode_tps or 0.0) * wide, row.plan.headroom_bytes + weights
    return -(row.price_usd or 0), row.plan.verdict == "fits", row.plan.bits, speed, spare
