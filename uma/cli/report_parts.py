"""What ``uma report`` is asked for, made and written."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uma.cli import options as opt
from uma.cli.progress import say
from uma.errors import DataError, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from uma.plan.capacity.report import Chosen, Named, Scope
    from uma.plan.compare import Candidate, HostProfile, Wanted

HERE = "this machine"
NO_RUNS = "no run of this machine is on record: uma run keeps one"
ELSEWHERE = "runs are measured on the machine that they ran on: report it without --machine"


class Refined(NamedTuple):
    """What is asked beside machines and models."""

    decision: bool
    min_bits: int
    min_tps: float
    prices: tuple[str, ...]
    host_price: int | None
    diff: Path | None
    since: str | None


class Asked(NamedTuple):
    """The options of one report."""

    models: tuple[str, ...]
    machines: tuple[str, ...]
    fleet: Path | None
    macos: int | None
    contexts: tuple[int, ...]
    filter: str
    budget: str | None
    reserve: str | None
    refined: Refined


def written(
    asked: Asked, form: str, output: Path | None, plots: Path | None, *, force: bool
) -> None:
    """Make the report and write it: files whole, and over none that exists without ``force``.

    Raises:
        UsageError: If a file exists, or the options contradict each other.
    """
    from uma.report.capacity.files import require_new, write_files

    _check(asked, plots)
    if form == "html" and output is None and sys.stdout.isatty():
        raise UsageError("a page is no text for a terminal: give it a file with -o report.html")
    require_new([] if output is None else [output], force=force)
    before = None if asked.refined.diff is None else _old_report(asked.refined.diff)
    found = _decision(asked) if asked.refined.decision else _document(asked, before)
    files: dict[Path, bytes] = {}
    content = _shown(found, form)
    if output is not None:
        files[output] = content.encode("utf-8")
    if plots is not None:
        files |= _pictures(found, plots)
    write_files(files, force=force)
    if output is None:
        sys.stdout.write(content)
    for path in files:
        say(f"written: {path}")


def _check(asked: Asked, plots: Path | None) -> None:
    refined = asked.refined
    if asked.fleet is not None and asked.machines:
        raise UsageError("--fleet names the machines: leave out --machine")
    if asked.macos is not None and not asked.machines and asked.fleet is None:
        raise UsageError("--macos is for a machine that is named: give --machine")
    if refined.since is not None and not _is_day(refined.since):
        raise UsageError(f"--since {refined.since!r} is no day; write it as 2026-11-30")
    if not refined.decision:
        return
    if len(asked.models) != 1:
        raise UsageError("--decision is about one model: uma report MODEL --decision")
    if len(asked.contexts) > 1:
        raise UsageError("--decision is about one --context")
    if plots is not None or refined.diff is not None or refined.since is not None:
        raise UsageError("--decision is one page: leave out --plots, --diff and --since")


def _is_day(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return False
    try:
        time.strptime(text, "%Y-%m-%d")
    except ValueError:
        return False
    return True


def _shown(found: Mapping[str, Any], form: str) -> str:
    from uma.report.capacity import decision
    from uma.report.capacity.markdown import markdown

    if form == "json":
        return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    if found["kind"] == decision.KIND:
        shown = decision.decision_markdown if form == "md" else decision.decision_page
        return shown(found)
    if form == "md":
        return markdown(found)
    from uma.report.capacity.page import page

    return page(found)


def _pictures(found: Mapping[str, Any], folder: Path) -> dict[Path, bytes]:
    from uma.report.capacity.plots import pictures

    folder.mkdir(parents=True, exist_ok=True)
    return {
        folder / f"{name}.{kind}": content
        for kind in ("svg", "png")
        for name, content in pictures(found, kind).items()
    }


def _document(asked: Asked, before: Mapping[str, Any] | None) -> dict[str, Any]:
    from uma.plan.capacity.facts import WIDTHS
    from uma.plan.capacity.report import machine_reports, plans_of
    from uma.report.capacity.document import Parts, catalog_date, document

    machines = _machines(asked)
    scope = _scope(asked)
    reports = tuple(machine_reports(machines, scope))
    host, wanted = _host(asked), _wanted(asked)
    context = asked.contexts[0] if asked.contexts else scope.contexts[0]
    plans = plans_of(scope.chosen, _candidates(asked, machines, host), context, wanted)
    runs, note = _measured(asked)
    found = document(
        Parts(
            date=today(),
            contexts=scope.contexts,
            widths=WIDTHS,
            listed=scope.listed,
            chosen=tuple(source.name for source, _ in scope.chosen),
            machines=reports,
            plans=plans,
            plans_context_tokens=context,
            measured=runs,
            measured_note=note,
            since=asked.refined.since,
            catalog_date=catalog_date(),
        )
    )
    return found | {"changes": _changes(asked, before, found)}


def _scope(asked: Asked) -> "Scope":
    from uma.catalog.listed import listed_models
    from uma.plan.capacity.facts import CONTEXTS
    from uma.plan.capacity.report import DEFAULT_MODELS, Scope

    default = () if asked.fleet is not None else DEFAULT_MODELS
    return Scope(
        listed=tuple(listed_models(asked.filter)),
        chosen=tuple(_chosen(name) for name in asked.models or default),
        contexts=tuple(sorted(asked.contexts)) or CONTEXTS,
        budget_bytes=opt.size_option(asked.budget, "--budget"),
        reserve_bytes=opt.size_option(asked.reserve, "--reserve"),
    )


def today() -> str:
    """The day, or that of SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y-%m-%d", time.gmtime(int(epoch) if epoch.isdigit() else None))


def _machines(asked: Asked) -> "list[Named]":
    from uma.machine.here import machine_of
    from uma.plan.capacity.report import Named

    if asked.fleet is not None:
        from uma.report.capacity.fleet import fleet

        return fleet(asked.fleet, asked.macos)
    if asked.machines:
        return [Named(name, machine_of(name, macos=asked.macos)) for name in asked.machines]
    from uma.cli.calibrated import calibrated

    return [Named(HERE, calibrated(machine_of()))]


def _chosen(name: str) -> "Chosen":
    from uma.architecture import architecture_from_config
    from uma.cli.options import RunOptions
    from uma.cli.plan import described, located

    chosen = RunOptions(model=name)
    source = described(chosen, located(chosen))
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    return source, architecture_from_config(source.config)


def _host(asked: Asked) -> "HostProfile":
    from uma.plan.compare import HostProfile, Price

    price = asked.refined.host_price
    return HostProfile(price=None if price is None else Price(price, "user"))


def _wanted(asked: Asked) -> "Wanted":
    from uma.plan.compare import Wanted

    return Wanted(min_bits=asked.refined.min_bits, min_tps=asked.refined.min_tps)


def _candidates(
    asked: Asked, machines: "Sequence[Named]", host: "HostProfile"
) -> "list[Candidate]":
    """The reported machines, and the cards that they are held against unless it is a fleet."""
    from dataclasses import replace

    from uma.plan.capacity.cards import CARDS
    from uma.plan.compare import candidates, this_candidate
    from uma.plan.compare.prices import user_prices

    prices = user_prices(list(asked.refined.prices))
    found: list[Candidate] = []
    for one in machines:
        if one.name in asked.machines:
            found += candidates([one.name], host, prices, asked.macos)
        else:
            found.append(replace(this_candidate(one.machine, host), name=one.name))
    if asked.fleet is not None or (asked.refined.decision and asked.machines):
        return found
    held = {one.name for one in found}
    return found + candidates([card for card in CARDS if card not in held], host, prices)


def _measured(asked: Asked) -> tuple[tuple[dict[str, Any], ...], str | None]:
    if asked.machines or asked.fleet is not None:
        return (), ELSEWHERE
    from uma.paths import records_folder
    from uma.records import read_records
    from uma.report.capacity.runs import measured_rows

    runs = tuple(measured_rows(read_records(records_folder()), asked.refined.since))
    return runs, None if runs else NO_RUNS


def _changes(
    asked: Asked, before: Mapping[str, Any] | None, found: Mapping[str, Any]
) -> dict[str, Any] | None:
    from uma.plan.capacity.diff import changes, since

    path = asked.refined.diff
    told = None
    if before is not None:
        try:
            told = changes(before, found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"--diff {path}: lacks what a report has: {error!r}") from None
    if asked.refined.since is None:
        return told
    return since(asked.refined.since, found, told)


def _old_report(path: Path) -> Mapping[str, Any]:
    """
    Raises:
        DataError: If it is no report, or one of another schema.
    """
    from uma.report import SCHEMA_VERSION
    from uma.report.capacity.document import KIND

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"--diff {path}: cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise DataError(f"--diff {path}: is no report: uma report --format json makes one")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"--diff {path}: has schema version {found.get('schema_version')}, not {SCHEMA_VERSION}"
        )
    return found


def _decision(asked: Asked) -> dict[str, Any]:
    from uma.plan.capacity.decision import Question, decision
    from uma.report.capacity.decision import decision_document
    from uma.workload import Inference

    source, architecture = _chosen(asked.models[0])
    host = _host(asked)
    question = Question(
        source,
        architecture,
        asked.contexts[0] if asked.contexts else Inference().context_tokens,
        tuple(_candidates(asked, _machines(asked), host)),
        _wanted(asked),
    )
    return decision_document(decision(question), today(), host)
