"""The inverses of a training estimate: the largest batch, length and rank that fit, each alone."""

from collections.abc import Callable

from uma.dataset.batches import SMALLEST, padded_length
from uma.memory.adapters import adapters
from uma.memory.term import MemoryTerm
from uma.plan.training.case import SHORT, Needs, TrainingCase
from uma.plan.training.places import on_host

MOST = {"batch_size": 4096, "max_seq_length": 1 << 20, "rank": 4096}  # looked for, not allowed
TRIES = 12
FAR = 1 << 60
CLOSE = 64  # a value is the largest when one more in 64 does not fit
COPIES = 8  # of what a rank accounts for, more than are alive at once in any step
SURELY = 1.25  # times the room: what needs more does not fit, however it is rounded

Needed = Callable[[int], int]


def largest(
    case: TrainingCase, terms: tuple[MemoryTerm, ...], needs: Needs
) -> dict[str, int | None]:
    """The largest batch, length and rank that fit, each alone; ``None`` where 1 does not."""
    held = sum(t.size_bytes for t in terms if t.phase == "always")
    room, workload = case.budget_bytes, case.workload
    host = on_host(case)
    if held > room or host.excess_bytes:
        return dict.fromkeys(_fields(case))
    found = _own_shapes(case, held, needs) if case.trainer == "uma" else _shapes(case, held, needs)
    if workload.method != "full":
        names = ("adapters", "optimizer_states")
        by_rank = sum(t.size_bytes for t in terms if t.phase == "always" and t.name in names)
        needed = _along(case, needs, "rank")
        hopeless = needs(case) - COPIES * (by_rank + _ranked_bytes(case)) > room
        found["rank"] = None if hopeless else _largest_rank(needed, workload.rank, by_rank, room)
        if found["rank"] and host.held_bytes and host.room_bytes is not None:
            on_hosts = _largest_rank(
                lambda rank: on_host(case.changed(rank=rank)).held_bytes,
                workload.rank,
                host.held_bytes,
                host.room_bytes,
            )
            found["rank"] = min(found["rank"], on_hosts or 1)
    return found


def _shapes(case: TrainingCase, held_bytes: int, needs: Needs) -> dict[str, int | None]:
    workload, room = case.workload, case.budget_bytes
    workers = workload.sharding.data if case.engine == "mlx" else 1
    asked = workload.batch_size // workers
    rows, most = None, MOST["batch_size"]
    if (above := needs(case) - held_bytes) > room - held_bytes:
        # The phase that binds is at least a line over the batch, from what is held.
        most = min(most, int(asked * (SURELY * room - held_bytes) / above))
    if most:
        needed = _along(case, needs, "batch_size", workers)
        rows = _largest(needed, asked, held_bytes, room, most)
    needed, most = _along(case, needs, "max_seq_length"), MOST["max_seq_length"]
    length = _largest(needed, workload.max_seq_length, held_bytes, room, most)
    return {"batch_size": rows and rows * workers, "max_seq_length": length}


def _ranked_bytes(case: TrainingCase) -> int:
    """What adapters compute between their two factors, in float32."""
    count = sum(adapter.count for adapter in adapters(case.architecture, case.workload))
    return 4 * count * case.workload.rank * case.workload.tokens


def _own_shapes(case: TrainingCase, held_bytes: int, needs: Needs) -> dict[str, int | None]:
    """Our own trainer needs what all positions of a batch need, however long their rows are."""
    batch, length = case.workload.batch_size, case.workload.max_seq_length

    def needed(rows: int) -> int:
        return needs(case.changed(batch_size=rows, max_seq_length=SHORT + 1))

    asked = max(1, batch * length // SHORT)
    rows = _largest(needed, asked, held_bytes, case.budget_bytes, MOST["max_seq_length"])
    positions = (rows or 0) * SHORT
    return {
        "batch_size": min(positions // padded_length(max(1, length - 1)), MOST["batch_size"])
        or None,
        "max_seq_length": min(_longest_row(positions // batch), MOST["max_seq_length"]) or None,
    }


def _longest_row(positions: int) -> int:
    """Tokens of the longest row that is padded to at most ``positions``; 0 where none is.

    >>> _longest_row(6463), padded_length(6144), padded_length(6145)
    (6145, 6144, 7168)
    """
    if positions < padded_length(1):
        return 0
    step = max(SMALLEST, (1 << positions.bit_length()) >> 3)
    return positions - positions % step + 1  # the last token is only a target


def _fields(case: TrainingCase) -> tuple[str, ...]:
    return ("batch_size", "max_seq_length", *(("rank",) if case.workload.method != "full" else ()))


def _along(case: TrainingCase, needs: Needs, field: str, step: int = 1) -> Needed:
    return lambda count: needs(case.changed(**{field: count * step}))


def _largest(needed: Needed, asked: int, held_bytes: int, room_bytes: int, most: int) -> int | None:
    """The largest number that needs at most ``room_bytes``, within one in ``CLOSE``.

    What is needed never falls, and rises as a line or a parabola from about ``held_bytes`` at 0,
    with a corner where another phase begins to bind.

    >>> _largest(lambda n: 100 + 3 * n, 10, 100, 1000, 4096)  # 300 would fit too
    299
    """
    points = {0: held_bytes, asked: needed(asked)}
    for _ in range(TRIES):
        low = max(n for n, size in points.items() if size <= room_bytes)
        high = min([most + 1, *(n for n, size in points.items() if size > room_bytes)])
        near = max(1, low // CLOSE)
        if min(high - low, _at_most(points, room_bytes) - low) <= near:
            break
        guess = _reached(points, room_bytes)
        guess = max(guess - guess // (4 * CLOSE), low + near)
        if guess >= high:  # the parabola is none of what lies between
            guess = most if high > most else (low + high) // 2
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


def _largest_rank(needed: Needed, asked: int, by_rank_bytes: int, room_bytes: int) -> int | None:
    """The largest rank: what is needed is a line over it, or two that rise ever faster.

    So what lies between two points is at most the line between them. ``by_rank_bytes`` are the
    part of what is needed that the ``asked`` rank is known to account for.
    """
    at_asked, low, most = needed(asked), asked, MOST["rank"]
    if at_asked > room_bytes:
        low, high = 1, asked
        if asked == 1 or needed(1) > room_bytes:
            return None
    else:
        high = asked + (room_bytes - at_asked) * asked // max(1, by_rank_bytes) + 1
        high = max(min(high, most), asked)
        # One more than the most is the width of no model, and so laid out as other ranks are.
        if (high == most and needed(most + 1) <= room_bytes) or needed(high) <= room_bytes:
            return high
    at_low, at_high = needed(low), needed(high)
    return low + (room_bytes - at_low) * (high - low) // (at_high - at_low)


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
