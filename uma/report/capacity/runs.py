"""Measured runs beside what was predicted for them, from the records of this machine."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MEASURED_COMMANDS = ("run", "lora train")
INSTRUMENT = "MLX's own counter of its peak (mx.get_peak_memory)"


def measured_rows(
    records: Iterable[Mapping[str, Any]], since: str | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each run whose peak was predicted and measured; ``since`` is a date, or a time.

    ``error`` is (predicted - measured) / measured. ``instrument`` is what measured, and
    ``settings`` what it was asked to do: without both, figures cannot be compared.
    """
    for record in records:
        time, command = str(record.get("time", "")), record.get("command")
        if command not in MEASURED_COMMANDS or (since is not None and time < since):
            continue
        ledger, speeds = _section(record, "ledger"), _section(record, "speeds")
        predicted = ledger.get("predicted_peak_bytes")
        measured = ledger.get("measured_peak_bytes")
        if not isinstance(predicted, int) or not isinstance(measured, int) or measured <= 0:
            continue
        yield {
            "time": time,
            "command": command,
            "model": str(_section(record, "model").get("name")),
            "form": _section(record, "settings").get("form"),
            "context_tokens": _section(record, "settings").get("context_tokens"),
            "predicted_peak_bytes": predicted,
            "measured_peak_bytes": measured,
            "instrument": INSTRUMENT,
            "settings": {
                key: value
                for key, value in _section(record, "settings").items()
                if isinstance(value, str | int | float)
            },
            "error": round((predicted - measured) / measured, 4),
            "terms": [
                {name: term.get(name) for name in TERM_KEYS}
                for term in ledger.get("terms") or ()
                if isinstance(term, Mapping)
            ],
            "prompt_tps": speeds.get("prompt_tps"),
            "generation_tps": speeds.get("generation_tps"),
            "versions": dict(_section(record, "versions")),
        }


TERM_KEYS = ("name", "phase", "predicted_bytes", "measured_bytes", "basis")


def _section(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}
