"""The inverses of a training estimate: the largest batch, length and rank that fit, each alone."""

from bisect import bisect_left
from collections.abc import Callable
from math import isqrt

from uma.dataset.batches import SMALLEST, padded_length
from uma.memory.adapters import adapters
from uma.memory.term import MemoryTerm
from uma.plan.training.case import SHORT, TrainingCase
from uma.plan.training.places import on_host
from uma.plan.training.verdict import Needs
from uma.quantization import FLOAT32

MOST = {"batch_size": 4096, "max_seq_length": 1 << 20, "rank": 4096}  # looked for, not allowed
TRIES = 12  # estimates that one search may make beside the first
FAR = 1 << 60  # beyond all that is looked for
CLOSE = 64  # a value is the largest when one more in 64 does not fit
COPIES = 8  # of what a rank accounts for, more than are alive at once in any step
SURELY = 1.25  # times the room: what needs more does not fit, however it is rounded

Needed = Callable[[int], int]


def largest(
    case: TrainingCase, terms: tuple[MemoryTerm, ...], needs: Needs
) -> dict[str, int | None]:
    """The largest batch, length and rank that fit, each alone; ``None`` where 1 does not."""
    always = [t for t in terms if t.phase == "always" and t.name != "buffer_pool"]
    held = sum(t.size_bytes for t in always)
    held += on_host(case.changed(batch_size=1, max_seq_length=1)).stays_bytes
    found: dict[str, int | None] = {"batch_size": None, "max_seq_length": None}
    if held <= case.budget_bytes:
        shapes = _own_shapes if case.trainer == "uma" else _shapes
        found = shapes(case, held, needs)
    if case.workload.method != "full":
        by_rank = sum(t.size_bytes for t in always if t.name in ("adapters", "optimizer_states"))
        found["rank"] = _rank(case, by_rank, needs)
    return found


def _rank(case: TrainingCase, by_rank_bytes: int, needs: Needs) -> int | None:
    """``by_rank_bytes`` are the part of what is needed that the rank is known to account for."""
    room, most = case.budget_bytes, _most_on_host(case, "rank")
    asked, needed = min(case.workload.rank, most), _along(case, needs, "rank")
    by_rank = by_rank_bytes + _ranked_bytes(case)
    if not most or needs(case) - COPIES * by_rank > room:
        return None
    if case.engine == "mlx":
        lines = 2 if case.trainer == "uma" else 1  # whose ranks take a tenth of the time
        return _largest_rank(needed, asked, by_rank_bytes, room, most, lines)
    # DeepSpeed's buckets grow to a size, bitsandbytes' states are small from a size on.
    base = needs(case) - by_rank_bytes if needs(case) <= room else needed(1)
    return None if base > room else _largest(needed, asked, base, room, most, convex=False)


def _shapes(case: TrainingCase, held_bytes: int, needs: Needs) -> dict[str, int | None]:
    workload, room = case.workload, case.budget_bytes
    workers = workload.sharding.data if case.engine == "mlx" else 1
    rows, most = None, _most_on_host(case, "batch_size")
    asked = min(workload.batch_size // workers, most)
    if asked and (above := needs(case) - held_bytes) > room - held_bytes:
        # The phase that binds is at least a line over the batch, from what is held.
        line = workload.batch_size // workers * (SURELY * room - held_bytes) / above
        most = min(most, int(line))
    if most:
        needed = _along(case, needs, "batch_size", workers)
        rows = _largest(needed, asked, held_bytes, room, most)
    needed, most = _along(case, needs, "max_seq_length"), _most_on_host(case, "max_seq_length")
    length = _largest(needed, min(workload.max_seq_length, most), held_bytes, room, most)
    if length == 1:  # which is no row: its only token is not a target
        length = None
    return {"batch_size": rows and rows * workers, "max_seq_length": length}


def _most_on_host(case: TrainingCase, field: str) -> int:
    """Up to which number the host has room, which costs nothing to know; 0 where for none."""

    def exceeds(count: int) -> bool:
        return on_host(case.changed(**{field: count})).excess_bytes > 0

    most = MOST[field]
    return bisect_left(range(1, most + 1), True, key=exceeds) if exceeds(most) else most


def _ranked_bytes(case: TrainingCase) -> int:
    """What adapters compute between their two factors, in float32."""
    count = sum(adapter.count for adapter in adapters(case.architecture, case.workload))
    return FLOAT32 * count * case.workload.rank * case.workload.tokens


def _own_shapes(case: TrainingCase, held_bytes: int, needs: Needs) -> dict[str, int | None]:
    """Our own trainer needs what all positions of a batch need, however long their rows are."""
    batch, length = case.workload.batch_size, case.workload.max_seq_length

    def needed(rows: int) -> int:
        return needs(case.changed(batch_size=rows, max_seq_length=SHORT + 1))

    asked = max(1, batch * length // SHORT)
    rows = _largest(needed, asked, held_bytes, case.budget_bytes, MOST["max_seq_length"])
    positions = (rows or 0) * SHORT
    found = {
        "batch_size": positions // padded_length(max(1, length - 1)),
        "max_seq_length": _longest_row(positions // batch),
    }
    if needs(case) <= case.budget_bytes:  # where layers recur, it may need less in longer rows
        found = {name: max(value, getattr(case.workload, name)) for name, value in found.items()}
    return {name: min(value, MOST[name]) or None for name, value in found.items()}


def _longest_row(positions: int) -> int:
    """Tokens of the longest row that is padded to at most ``positions``; 0 where none is.

    >>> _longest_row(6463), padded_length(6144), padded_length(6145)
    (6145, 6144, 7168)
    """
    if positions < padded_length(1):
        return 0
    step = max(SMALLEST, (1 << positions.bit_length()) >> 3)
    return positions - positions % step + 1  # the last token is only a target


def _along(case: TrainingCase, needs: Needs, field: str, step: int = 1) -> Needed:
    return lambda count: needs(case.changed(**{field: count * step}))


def _largest(
    needed: Needed,
    asked: int,
    held_bytes: int,
    room_bytes: int,
    most: int,
    *,
    convex: bool = True,
) -> int | None:
    """The largest number that needs at most ``room_bytes``, within one in ``CLOSE``.

    What is needed never falls, and rises as a line or a parabola from about ``held_bytes`` at 0,
    with a corner where another phase begins to bind; less steeply beyond it unless ``convex``.

    >>> _largest(lambda n: 100 + 3 * n, 10, 100, 1000, 4096)  # 300 would fit too
    299
    """
    if not most:
        return None
    points, step = {0: held_bytes, asked: needed(asked)}, 1
    for _ in range(TRIES):
        low = max(n for n, size in points.items() if size <= room_bytes)
        high = min([most + 1, *(n for n, size in points.items() if size > room_bytes)])
        near = max(1, low // CLOSE)
        surely = min(high, _at_most(points, room_bytes)) if convex else high
        if surely - low <= near:
            break
        guess = _reached(points, room_bytes)
        guess -= guess // (4 * CLOSE)
        if guess < low + near:  # in ever longer steps, where it is no parabola
            guess, step = low + near * step, 4 * step
        if guess >= high:  # the parabola is none of what lies between, which may be far apart
            guess = most if high > most else max(low + 1, isqrt(low * high))
        points[guess] = needed(guess)
    return max(n for n, size in points.items() if size <= room_bytes) or None


def _at_most(points: dict[int, int], room_bytes: int) -> int:
    """A number that surely does not fit: the line through the last two that do runs below.

    What is at 0 is no value of what is needed, and lies below it.
    """
    fitting = sorted(point for point in points.items() if point[0] and point[1] <= room_bytes)
    if len(fitting) < 2:
        return FAR
    (x0, y0), (x1, y1) = fitting[-2:]
    return FAR if y1 <= y0 else 1 + int(x1 + (room_bytes - y1) * (x1 - x0) / (y1 - y0))


def _largest_rank(
    needed: Needed, asked: int, by_rank_bytes: int, room_bytes: int, most: int, lines: int
) -> int | None:
    """The largest rank: what is needed is a line over it, or two that rise ever faster.

    So what lies between two points is at most the line between them, and what lies beyond is at
    least that line; ``lines`` are taken, each from where the one before it ends. ``by_rank_bytes``
    are the part of what is needed that the ``asked`` rank is known to account for.
    """
    at_asked, low = needed(asked), asked
    if at_asked > room_bytes:
        low, high = 1, asked
        if asked == 1 or needed(1) > room_bytes:
            return None
    else:
        high = asked + (room_bytes - at_asked) * asked // max(1, by_rank_bytes) + 1
        high = max(min(high, most), asked)
        # One more than the most is the width of no model, and so laid out as other ranks are.
        if high == most and needed(most + 1) <= room_bytes:
            return high
        while needed(high) <= room_bytes:
            points = {low: needed(low), high: needed(high)}
            further = min(most, _at_most(points, room_bytes))
            if further - high <= high // CLOSE:
                return high
            low, high = high, further
    for _ in range(lines):
        at_low, at_high = needed(low), needed(high)
        more = (room_bytes - at_low) * (high - low) // (at_high - at_low)
        low += more + -more // (4 * CLOSE)  # less, as sizes are rounded up here and there
    return low


def _reached(points: dict[int, int], room_bytes: int) -> int:
    """Where the parabola, or the line, through the points nearest to ``room_bytes`` reaches it."""
    near = sorted(points.items(), key=lambda point: abs(point[1] - room_bytes))[:3]
    *earlier, (x0, y0), (x1, y1) = sorted(near)
    slope, curve, below = (y1 - y0) / (x1 - x0), 0.0, room_bytes - y0
    for x, y in earlier:
        curve = max(0.0, (slope - (y0 - y) / (x0 - x)) / (x1 - x))
    slope -= curve * (x1 - x0)
    square = slope * slope + 4 * curve * below
    if max(curve, slope) <= 0 or square < 0:
        return FAR
    # The root that stays exact where the parabola is nearly a line.
    return int(x0 + 2 * below / (slope + square**0.5))
