"""What every run ends with: its JSON document, the ledger and the process, a record."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from uma.cli.options import RunOptions
from uma.cli.plan import model_json
from uma.cli.progress import say
from uma.cli.session import Ready
from uma.errors import UmaError

if TYPE_CHECKING:
    from uma.ledger import Ledger
    from uma.measurement.process import ProcessMemory
    from uma.runtime.generate import Settings


def run_json(have: Ready, settings: "Settings", ledger: "Ledger") -> dict[str, Any]:
    """What the JSON of any run ends with: model, machine, settings, ledger, process."""
    from uma.report.plan import plan_json
    from uma.runtime.session import settings_record

    document = plan_json(have.planned.plan, model_json(have.planned.source))
    document["settings"] |= settings_record(settings) | {"blas": have.blas}
    memory = process_memory()
    return (
        {"load_s": round(have.session.load_s, 3)}
        | document
        | {"ledger": ledger.to_json(), "process": None if memory is None else asdict(memory)}
    )


def process_memory() -> "ProcessMemory | None":
    """Memory of this process, or ``None`` where the system does not tell."""
    from uma.measurement.process import read_process_memory

    try:
        return read_process_memory()
    except UmaError:
        return None


def ledger_lines(have: Ready, ledger: "Ledger", report: dict[str, Any]) -> list[str]:
    """A measured ledger, and below it the process as the ``report`` of the run has it."""
    from uma.report.answer import process_text
    from uma.report.ledger import ledger_text

    lines = ["", ledger_text(ledger, have.planned.plan.budget.winner)]
    memory = report["process"]
    return lines if memory is None else [*lines, process_text(memory)]


def keep(chosen: RunOptions, have: Ready, report: dict[str, Any]) -> None:
    """Record a run on this machine, if that is wanted; a failure is only noted."""
    note = _record(have, report) if chosen.record else None
    if note is not None:
        say(f"note: {note}", chosen.quiet)


def _record(have: Ready, report: dict[str, Any]) -> str | None:
    """Keep one run on this machine; a note if that failed."""
    from uma.paths import records_folder
    from uma.records import model_name, write_record
    from uma.runtime.versions import versions

    source = have.planned.source
    name = model_name(source.name, local=source.repo is None)
    speeds = {
        key: value for key, value in report.items() if key.endswith(("_tps", "_s", "_tokens"))
    }
    kept = {
        "command": "run",
        "model": report["model"] | {"name": name, "repo": None},
        "machine": report["machine"],
        "versions": versions(),
        "settings": report["settings"],
        "ledger": report["ledger"] | {"process": report["process"]},
        "speeds": speeds | {"decode_read_bytes": _read_bytes(have, report)},
    }
    return write_record(kept, records_folder()).note


def _read_bytes(have: Ready, report: dict[str, Any]) -> int:
    """What each token of decode read, as the run ended: the part that decode's bandwidth needs."""
    from uma.measurement.decode import decode_read_bytes

    caches = [
        term["measured_bytes"] or 0
        for term in report["ledger"]["terms"]
        if (term["name"], term["phase"]) in (("kv_cache", "decode"), ("recurrent_state", "always"))
    ]
    return decode_read_bytes(have.planned.plan, sum(caches))
