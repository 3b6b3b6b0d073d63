"""What changed between two reports: budgets, verdicts, memory, speeds, prices, versions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from uma.units import format_gib

Doc = Mapping[str, Any]
MEMORY_CHANGE = 0.01  # of the total: less is told by no line
SPEED_CHANGE = 0.02
SHOWN = 12


def changes(before: Doc, after: Doc) -> dict[str, Any]:
    """``texts`` for a reader, ``rows`` for a program: every verdict, total and speed that changed.

    Raises:
        KeyError, TypeError: If ``before`` is no report of this schema.
    """
    rows = list(_rows(before, after))
    texts = [*_versions(before, after), *_machines(before, after), *_told(rows)]
    return {
        "from": str(before["date"]),
        "uma_version": before["uma_version"],
        "texts": texts,
        "rows": rows,
    }


def _versions(before: Doc, after: Doc) -> Iterator[str]:
    for name, word in (("uma_version", "uma"), ("catalog_date", "the catalog")):
        if before[name] != after[name]:
            yield f"{word} was {before[name]}, is {after[name]}"
    known = {model["name"] for model in before["models"]}
    new = [model["name"] for model in after["models"] if model["name"] not in known]
    gone = known - {model["name"] for model in after["models"]}
    if new:
        yield f"{len(new)} models are new: {_some(new)}"
    if gone:
        yield f"{len(gone)} models are gone: {_some(sorted(gone))}"


def _machines(before: Doc, after: Doc) -> Iterator[str]:
    old, new = _by_name(before["machines"]), _by_name(after["machines"])
    for name in new.keys() - old.keys():
        yield f"{name} is new in this report"
    for name in old.keys() - new.keys():
        yield f"{name} is no longer in this report"
    for name in (name for name in new if name in old):
        yield from _one(name, old[name], new[name])


def _one(name: str, old: Doc, new: Doc) -> Iterator[str]:
    for key, word in (("budget_bytes", "budget"), ("limit_bytes", "limit")):
        was, now = old["budget"][key], new["budget"][key]
        if was != now:
            yield f"{name}: the {word} was {format_gib(was)}, is {format_gib(now)}"
    if old["calibration"] != new["calibration"]:
        yield f"{name}: {new['calibration'] or 'no longer calibrated'}"
    largest = {(b["context_tokens"], b["limit"]): b["model"] for b in old["best"]}
    for best in new["best"]:
        at = (best["context_tokens"], best["limit"])
        if best["limit"] == 0 and at in largest and largest[at] != best["model"]:
            yield (
                f"{name}: the largest model that fits at {at[0]:,} tokens was {largest[at]}, is "
                f"{best['model']}"
            )


def _rows(before: Doc, after: Doc) -> Iterator[dict[str, Any]]:
    old_machines = _by_name(before["machines"])
    for machine in after["machines"]:
        old = old_machines.get(machine["name"])
        if old is None:
            continue
        held = dict(_cells(old))
        for key, at in _cells(machine):
            if key in held:
                yield from _changed(machine["name"], key, held[key], at)
    yield from _plans(before, after)


def _cells(machine: Doc) -> Iterator[tuple[tuple[str, int, int], Doc]]:
    for row in machine["rows"]:
        for cell in row["cells"]:
            for at in cell["at"]:
                yield (row["model"], cell["bits"], at["context_tokens"]), at


def _changed(
    machine: str, key: tuple[str, int, int], old: Doc, new: Doc
) -> Iterator[dict[str, Any]]:
    where = dict(zip(("model", "bits", "context_tokens"), key, strict=True))
    for name, least in (
        ("verdict", 0.0),
        ("total_bytes", MEMORY_CHANGE),
        ("decode_tps", SPEED_CHANGE),
    ):
        was, now = old[name], new[name]
        if was != now and not _near(was, now, least):
            yield {"machine": machine, **where, "what": name, "before": was, "after": now}


def _plans(before: Doc, after: Doc) -> Iterator[dict[str, Any]]:
    old = {(plan["model"], plan["machine"]): plan for plan in before["plans"]}
    for plan in after["plans"]:
        was = old.get((plan["model"], plan["machine"]))
        if was is None:
            continue
        for name, least in (("technique", 0.0), ("price_usd", 0.0), ("decode_tps", SPEED_CHANGE)):
            if was[name] != plan[name] and not _near(was[name], plan[name], least):
                yield {
                    "machine": plan["machine"],
                    "model": plan["model"],
                    "bits": plan["bits"],
                    "context_tokens": None,
                    "what": name,
                    "before": was[name],
                    "after": plan[name],
                }


def _near(was: Any, now: Any, least: float) -> bool:
    numbers = isinstance(was, int | float) and isinstance(now, int | float)
    return numbers and abs(now - was) <= least * abs(was)


def _told(rows: list[dict[str, Any]]) -> Iterator[str]:
    verdicts = [row for row in rows if row["what"] == "verdict"]
    for (was, now), count in sorted(Counter((r["before"], r["after"]) for r in verdicts).items()):
        yield f"{count} verdicts were {was}, are {now}"
    for row in verdicts[:SHOWN]:
        yield f"{_where(row)}: was {row['before']}, is {row['after']}"
    sizes = [row for row in rows if row["what"] == "total_bytes"]
    if sizes:
        yield f"{len(sizes)} totals changed by more than 1 %"
    for row in sizes[:SHOWN]:
        was, now = format_gib(row["before"]), format_gib(row["after"])
        yield f"{_where(row)}: needed {was}, needs {now}"
    others = [row for row in rows if row["what"] not in ("verdict", "total_bytes")]
    if others:
        yield f"{len(others)} speeds, prices or techniques changed"
    for row in others[:SHOWN]:
        yield f"{_where(row)}: {row['what']} was {row['before']}, is {row['after']}"


def _where(row: Mapping[str, Any]) -> str:
    parts = [row["machine"], row["model"]]
    parts += [f"{row['bits']} bits"] if row["bits"] else []
    parts += [f"{row['context_tokens']:,} tokens"] if row["context_tokens"] else []
    return ", ".join(parts)


def _by_name(rows: Any) -> dict[str, Doc]:
    return {row["name"]: row for row in rows}


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def since(day: str, found: Doc, told: dict[str, Any] | None) -> dict[str, Any]:
    """``told``, or nothing yet, with the models that came out from ``day`` on and the runs."""
    texts = [] if told is None else list(told["texts"])
    new = [m["name"] for m in found["models"] if (m["release_date"] or "") >= day]
    if new:
        texts.append(f"{len(new)} models of the catalog came out since {day}: {_some(new)}")
    runs = len(found["measured"]["runs"])
    if runs:
        texts.append(f"{runs} runs were measured since {day}")
    start = {"from": day, "uma_version": found["uma_version"], "rows": []}
    return (start if told is None else told) | {"texts": texts}
