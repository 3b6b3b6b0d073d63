"""A comparison of machines as a table."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from uma.plan.compare import YOURS, Comparison, HostProfile, Plan, Price, Row
from uma.plan.compare.choice import spent_usd
from uma.plan.compare.costs import tokens_per_joule
from uma.plan.compare.plans import NO_ROOM, first_token_s
from uma.plan.compare.subject import Subject
from uma.report.compare_notes import notes_text, several_of
from uma.report.text import table
from uma.speed.rate import NotKnown, Rate
from uma.units import GB, GIB, format_gib

BAR_WIDTH = 10
FEW_ROWS = 4  # up to so many, every plan that was not taken is told, else the best of them
REASONS = 2
FRONT = 8


class _Column(NamedTuple):
    title: str
    side: str
    cell: Callable[[Row, Plan], str]


def compare_text(found: Comparison, model_name: str, host: HostProfile) -> str:
    """A line a machine, what is best of them all, and why better plans were not taken."""
    lines = [*_header(found, model_name, host), "", _table(found), ""]
    return "\n".join(
        [*lines, *_verdicts(found), *_costs(found), *_reasons(found), *notes_text(found)]
    )


def _header(found: Comparison, model_name: str, host: HostProfile) -> Iterator[str]:
    wanted = found.wanted
    fast = f" and {wanted.min_tps:g} tokens/s" if wanted.min_tps else ""
    yield (
        f"{model_name} {_asked(found)}; at least {wanted.min_bits} bits{fast}, --prefer "
        f"{wanted.prefer}"
    )
    if any(row.candidate.host for row in found.rows):
        yield (
            f"cards are taken to be in a host with {format_gib(host.memory_bytes)} at "
            f"{host.bandwidth_bytes_per_s / GB:g} GB/s: --host-ram, --host-bandwidth"
        )


def _asked(found: Comparison) -> str:
    subject = found.subject
    if not isinstance(subject, Subject):
        rank, rows = subject.workload.rank, subject.workload.batch_size
        of = "all its weights" if subject.kind == "full" else f"adapters of rank {rank}"
        length = f"{subject.workload.max_seq_length:,} tokens"
        each = "a row" if rows == 1 else f"{rows} rows"
        return f"trained ({subject.kind}, {of}), {each} of {length} at once on each device"
    work, requests = subject.workload, "one request at a time"
    if work.batch_size > 1:
        requests = f"{work.batch_size} requests at once, tokens/s of each"
    if work.kv_bits is not None:
        requests += f", KV cache in {work.kv_bits} bits"
    return f"at {subject.tokens:,} tokens of context{_room(found)}, {requests}"


def _room(found: Comparison) -> str:
    """What is kept beside the tokens at which the speed is looked at."""
    subject = found.subject
    if not isinstance(subject, Subject) or subject.tokens == subject.workload.context_tokens:
        return ""
    return f" with room for {subject.workload.context_tokens:,}"


def _table(found: Comparison) -> str:
    columns = list(_columns(found))
    rows = [[column.title for column in columns]]
    for row in found.rows:
        if row.plan is None:
            missing = {0: row.candidate.name, 2: row.reason or "", 4: "unknown"}
            rows.append([missing.get(place, "") for place in range(len(columns))])
        else:
            rows.append([column.cell(row, row.plan) for column in columns])
    return table(rows, "".join(column.side for column in columns))


def _columns(found: Comparison) -> Iterator[_Column]:
    subject = found.subject
    number = subject.workload.batch_size if isinstance(subject, Subject) else 1
    fastest = max((row.decode_tps or 0.0 for row in found.rows), default=0.0)

    def bar(row: Row, plan: Plan) -> str:
        return "#" * round(BAR_WIDTH * (row.decode_tps or 0) / fastest) if fastest else ""

    yield _Column("machine", "<", lambda row, plan: row.candidate.name)
    yield _Column("weights", "<", lambda row, plan: plan.format)
    yield _Column("how", "<", lambda row, plan: f"{plan.technique}, {_program(plan)}")
    yield _Column("GiB of", ">", lambda row, plan: _memory(plan))
    yield _Column("verdict", "<", lambda row, plan: plan.verdict)
    yield _Column("tokens/s", ">", lambda row, plan: _rate(speed_of(plan), number))
    yield _Column("", "<", bar)
    if isinstance(subject, Subject):
        yield _Column("prompt/s", ">", lambda row, plan: _rate(plan.prompt, 1, interval=False))
    if number > 1:
        yield _Column("all/s", ">", lambda row, plan: _rate(plan.decode, 1, interval=False))
        yield _Column("first token", ">", lambda row, plan: _first(plan, subject))
        yield _Column("cache GiB", ">", lambda row, plan: f"{(plan.cache_bytes or 0) / GIB:.1f}")
    yield _Column("US$", ">", lambda row, plan: _offer(row))


def speed_of(plan: Plan) -> Rate | NotKnown:
    """A training that does not fit has none; what streams from a disk has one."""
    return NO_ROOM if plan.recipe is not None and not plan.runs else plan.decode


def _program(plan: Plan) -> str:
    if plan.recipe is None:
        return plan.engine
    return "mlx" if plan.engine == "mlx" else "torch"


def _first(plan: Plan, subject: object) -> str:
    assert isinstance(subject, Subject)
    found = first_token_s(plan, subject.tokens)
    return "?" if isinstance(found, NotKnown) else f"{found.best:,.1f} s"


def _memory(plan: Plan) -> str:
    held = f"{plan.device_bytes / GIB:.1f} of {plan.budget_bytes / GIB:.1f}"
    beside = [f"{plan.host_bytes / GIB:.1f} host"] if plan.host_bytes else []
    beside += [f"{plan.disk_bytes / GIB:.1f} disk"] if plan.disk_bytes else []
    return " + ".join([held, *beside])


def _rate(rate: Rate | NotKnown, number: int, *, interval: bool = True) -> str:
    """A rate of each of ``number`` requests, with what eight in ten measurements are within."""
    if isinstance(rate, NotKnown):
        return "?"
    low, best, high = (value / number for value in (rate.low, rate.best, rate.high))
    digits = 0 if best >= 100 else 1 if best >= 1 else 2
    shown = f"{best:.{digits}f}"
    return f"{shown} ({low:.{digits}f} to {high:.{digits}f})" if interval else shown


def _offer(row: Row) -> str:
    """What it can be had for: bought, or rented by the hour."""
    rent = row.candidate.rent_usd_per_h
    if rent is None:
        return _price(row.candidate.price) or _parts(row)
    bought = _price(row.candidate.price)
    return f"{rent:g}/h rent" + (f", {bought}" if bought else "")


def _price(price: Price | None) -> str:
    if price is None:
        return ""
    return f"{price.usd:,} {price.kind}" + (f" {price.date}" if price.date else "")


def _parts(row: Row) -> str:
    parts = row.candidate.parts_price
    if row.candidate.price_reason == YOURS:
        return "yours"
    return "?" if parts is None else f"{_price(parts)} + host"


def _verdicts(found: Comparison) -> Iterator[str]:
    if found.cheapest is None:
        yield f"cheapest: {found.cheapest_reason}"
    else:
        yield _cheapest(found, found.cheapest)
    for reason, names in _grouped(found.left_out).items():
        yield f"{several_of(names)} {reason}"
    if len(found.front) > 1:
        names = [_marked(row, found) for row in found.front[:FRONT]]
        more = f" and {len(found.front) - FRONT} more" if len(found.front) > FRONT else ""
        virtues = "price, bits, speed and memory to spare at once"
        yield f"beaten by none in {virtues}: {', '.join(names)}{more}"
    if found.hidden:
        yield f"{found.hidden} more are sold and not shown: --machine NAME, or --all"


def _cheapest(found: Comparison, one: Row) -> str:
    wanted = found.wanted
    fast = f" with {wanted.min_tps:g} tokens/s" if wanted.min_tps else ""
    fast += _room(found).replace(" with", " and" if fast else " with")
    spent = _offer(one)
    if wanted.use.hours is not None:
        spent = f"{spent_usd(one, wanted):,.0f} in {wanted.use.years:g} years"
    priced = "" if wanted.launch_prices else " of today"
    tight = " (tight)" if one.plan is not None and one.plan.verdict == "tight" else ""
    name = one.candidate.name
    return f"cheapest{fast}, of those with a price{priced}: {name}{tight}, US$ {spent}"


def _marked(row: Row, found: Comparison) -> str:
    """A machine with what speaks against it: that it is tight, or has no price of today."""
    candidate, marks = row.candidate, []
    if row.plan is not None and row.plan.verdict == "tight":
        marks.append("tight")
    if not candidate.price_of_today and candidate.price is not None:
        date = f" {candidate.price.date}" if candidate.price.date else ""
        marks.append(f"{candidate.price.kind}{date}" if candidate.sold else "not sold now")
    return candidate.name + (f" ({', '.join(marks)})" if marks else "")


def _grouped(left_out: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in left_out:
        found.setdefault(reason, []).append(name)
    return found


def _costs(found: Comparison) -> Iterator[str]:
    """What each machine costs over its use, where that was asked."""
    use = found.wanted.use
    if use == type(use)() and found.rented is None:
        return
    hours = "" if use.hours is None else f" over {use.hours:,.0f} hours of work"
    energy = "" if use.usd_per_kwh is None else f", {use.usd_per_kwh:g} US$/kWh at full power"
    yield f"costs in US${hours}{energy}:"
    rows = [("machine", "bought", "of it electricity", "rented", "pays from", "tokens/J")]
    reasons: dict[str, list[str]] = {}
    for row in (one for one in found.rows if one.runs):
        cost, plan = found.cost(row), row.plan
        assert plan is not None
        total = None if isinstance(plan.decode, NotKnown) else plan.decode.best
        yielded, why = tokens_per_joule(row.candidate, total)
        even = None if cost.break_even_h is None else f"{cost.break_even_h:,.0f} h"
        rows.append(
            (
                row.candidate.name,
                _usd(cost.owned_usd),
                _usd(cost.energy_usd),
                _usd(cost.rented_usd),
                even or "?",
                "?" if yielded is None else f"{yielded:.3g}",
            )
        )
        bought = row.candidate.rent_usd_per_h is None or cost.owned_usd is not None
        told = (cost.reason, cost.break_even_reason, why) if bought else (why,)
        for reason in dict.fromkeys(told):
            if reason is not None:
                reasons.setdefault(reason, []).append(row.candidate.name)
    yield table(rows, "<>>>>>")
    for reason, names in reasons.items():
        yield f"?: {several_of(names)}: {reason}"


def _usd(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _reasons(found: Comparison) -> Iterator[str]:
    """Of each format the plan that came closest; in a long table those of the nearest formats."""
    told = [row for row in found.rows if row.rejected or (row.plan and not row.runs)]
    if told:
        pool = " (too much even without torch's pool of freed blocks)"
        training = any(row.plan and row.plan.engine == "transformers" for row in told)
        training = training and not isinstance(found.subject, Subject)
        yield f"why nothing better{pool if training else ''}:"
    for row in told:
        closest = {
            (plan.bits, plan.quality): (plan, why)
            for plan, why in reversed(_by_distance(row, found))
        }
        reasons = [f"{plan.format} {plan.technique}: {why}" for plan, why in closest.values()]
        if len(found.rows) > FEW_ROWS:
            yield f"  {row.candidate.name}: {'; '.join(reasons[:REASONS])}"
        else:
            yield from (f"  {row.candidate.name}: {reason}" for reason in reasons)


def _by_distance(row: Row, found: Comparison) -> list[tuple[Plan, str]]:
    """All that is no answer, the widest format first, and of each what came closest first."""
    assert row.plan is not None
    own = row.plan.shortcoming(found.wanted.min_tps)
    rejected = list(row.rejected) if own is None else [*row.rejected, (row.plan, own)]
    return sorted(
        rejected,
        key=lambda one: (-one[0].bits, -one[0].quality, not one[0].runs, one[0].short_bytes),
    )


def sweep_text(found: Sequence[Comparison], model_name: str, host: HostProfile) -> str:
    """A line a machine, a column a context: the weights' format and tokens per second."""
    contexts = [_tokens(one) for one in found]
    rows = [["machine", *(f"{tokens:,}" for tokens in contexts)]]
    cells = [{row.candidate.name: row for row in one.rows} for one in found]
    names = list(dict.fromkeys(name for column in reversed(cells) for name in column))
    rows += [[name, *(_swept(column.get(name), found[0]) for column in cells)] for name in names]
    lines = [*_header(found[-1], model_name, host)]
    lines[0] = lines[0].replace(
        f"{contexts[-1]:,} tokens of context", f"{len(contexts)} lengths of context", 1
    )
    lines += ["", table(rows, "<" + ">" * len(contexts)), ""]
    for tokens, one in zip(contexts, found, strict=True):
        lines += [f"{tokens:,}: {line}" for line in _verdicts(one)]
    costs = list(_costs(found[0]))
    lines += [f"{contexts[0]:,}: {costs[0]}", *costs[1:]] if costs else []
    for name in names:
        lines += _ends(name, [(t, one.get(name)) for t, one in zip(contexts, cells, strict=True)])
    several = ", each / all together, first token of the last" if _requests(found[0]) > 1 else ""
    return "\n".join([*lines, f"format and tokens/s{several}; ~ is tight, - does not fit"])


def _ends(name: str, rows: Sequence[tuple[int, Row | None]]) -> Iterator[str]:
    """Why a machine runs the shorter contexts alone, or none."""
    for tokens, row in rows:
        if row is not None and not row.runs:
            why = row.reason
            if row.plan is not None:
                why = f"{row.plan.format} {row.plan.technique}: {row.plan.shortcoming(0)}"
            yield f"{name}, {tokens:,}: {why}"
            return


def _tokens(found: Comparison) -> int:
    assert isinstance(found.subject, Subject)
    return found.subject.tokens


def _requests(found: Comparison) -> int:
    return found.subject.workload.batch_size


def _swept(row: Row | None, found: Comparison) -> str:
    if row is None:
        return ""
    plan = row.plan
    if plan is None or not plan.runs:
        return "-"
    near = "~" if plan.verdict == "tight" else ""
    cell = f"{near}{plan.format} {_rate(plan.decode, plan.sequences, interval=False)}"
    if _requests(found) > 1:
        whole = _rate(plan.decode, 1, interval=False)
        cell += f" / {whole}, {_first(plan, found.subject)}"
    return cell
