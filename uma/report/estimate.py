"""An estimate as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from uma.ledger import Ledger, peak
from uma.memory.term import MemoryTerm
from uma.plan.estimate import Estimate, phases
from uma.plan.findings import Findings, Paging
from uma.report import SCHEMA_VERSION
from uma.report.ledger import ledger_text
from uma.units import GIB, format_gib, printable

if TYPE_CHECKING:
    from uma.plan.advice import Advice
    from uma.plan.speeds import Speeds
    from uma.speed.rate import NotKnown, Rate

BAR_WIDTH = 40


def estimate_text(found: Findings, model_name: str) -> str:
    """The verdict with all it rests on in a line, the terms against the budget, what would fit."""
    estimate = found.estimate
    lines = [
        f"{one_line(model_name)} on {one_line(estimate.machine.name)}",
        verdict_line(estimate),
        *bar_lines(estimate.ledger, estimate.budget.budget_bytes),
        "",
        ledger_text(estimate.ledger, estimate.budget.winner),
        phase_line(estimate.ledger),
        basis_line(estimate.ledger),
    ]
    if estimate.largest_buffer_bytes is not None:
        lines.append(f"largest single buffer: {format_gib(estimate.largest_buffer_bytes)}")
    lines += [inverses_line(found), *advice_lines(found)]
    if found.paging is not None:
        lines.append(paging_line(found.paging))
    if found.traced is not None:
        lines += traced_lines(found.traced)
    notes = (*estimate.notes, *estimate.machine.notes)
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def one_line(name: str) -> str:
    r"""``name`` for a terminal: it may be a folder's, which can hold anything.

    >>> print(one_line("a\n\x1b[2Jb"))
    a\n\x1b[2Jb
    """
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def verdict_line(estimate: Estimate) -> str:
    """Verdict, context, batch, sizes, formats, and the engine's own options."""
    workload, ledger = estimate.workload, estimate.ledger
    stored = "" if estimate.stored in ("", estimate.format) else f"{estimate.stored}, "
    return (
        f"{ledger.verdict} at {workload.context_tokens:,} tokens of context, batch "
        f"{workload.batch_size}: {format_gib(ledger.predicted_peak_bytes)} of "
        f"{format_gib(estimate.budget.budget_bytes)}; weights {estimate.format} "
        f"({stored}{estimate.bits_per_weight:.2f} bits), KV cache {estimate.cache_type}; "
        f"{estimate.engine} {' '.join(estimate.settings)}"
    )


def bar_lines(ledger: Ledger, budget_bytes: int) -> list[str]:
    """The terms of the phase that needs most as a bar within the budget, and what they are."""
    phase = peak(ledger.terms)[0]
    held = [t for t in ledger.terms if t.phase in ("always", phase) and t.size_bytes]
    held.sort(key=lambda term: -term.size_bytes)
    marks = dict(zip(held, _marks(held), strict=True))
    legend = ", ".join(f"{marks[t]} {t.name} {format_gib(t.size_bytes)}" for t in held)
    return [bar([(marks[t], t.size_bytes) for t in held], budget_bytes), legend]


def _marks(terms: list[MemoryTerm]) -> Iterator[str]:
    """A letter for each term: the first of its name that none before it has."""
    taken: set[str] = set()
    for term in terms:
        mark = next((c for c in term.name if c.isalpha() and c not in taken), "#")
        taken.add(mark)
        yield mark


def bar(parts: list[tuple[str, int]], budget_bytes: int) -> str:
    """Letters for what each part takes of the budget, ``.`` for what is left, ``>`` beyond it.

    >>> bar([("w", 1), ("k", 1)], 4), bar([("w", 9)], 4)[-1]
    ('[wwwwwwwwwwkkkkkkkkkk....................]', '>')
    """
    line, held = "", 0
    for mark, size_bytes in parts:
        held += size_bytes
        end = min(BAR_WIDTH, held * BAR_WIDTH // max(1, budget_bytes))
        line += mark * (end - len(line))
    if held > budget_bytes:
        return f"[{line}>"
    return f"[{line:.<{BAR_WIDTH}}]"


def phase_line(ledger: Ledger) -> str:
    """The peak of each phase, and which of them binds."""
    binding = peak(ledger.terms)[0]
    totals = phases(ledger.terms)
    if len(set(totals.values())) == 1:
        return f"peak by phase: {format_gib(totals['load'])} from the start to the end"
    parts = (
        f"{phase} {format_gib(size)}{' (binds)' if phase == binding else ''}"
        for phase, size in totals.items()
    )
    return "peak by phase: " + ", ".join(parts)


def basis_line(ledger: Ledger) -> str:
    """How much of the peak is exact, bound and fitted."""
    parts = (f"{format_gib(size)} {basis}" for basis, size in bases(ledger).items() if size)
    return "of the peak: " + ", ".join(parts)


def bases(ledger: Ledger) -> dict[str, int]:
    """Bytes of the peak by how sure they are."""
    phase = peak(ledger.terms)[0]
    sizes = {"exact": 0, "bound": 0, "fitted": 0}
    for term in ledger.terms:
        if term.phase in ("always", phase):
            sizes[term.basis] += term.size_bytes
    return sizes


def inverses_line(found: Findings) -> str:
    """The largest context, the largest batch and the best format within the budget."""
    longest = found.estimate.architecture.max_position_embeddings
    context = context_words(found.max_context_tokens, found.tight_context_tokens, longest)
    batch = "none" if found.max_batch_size is None else f"{found.max_batch_size:,}"
    return (
        f"largest context that fits: {context}; largest batch: {batch}; best format: "
        f"{found.best_format or 'none'}"
    )


def context_words(fits: int | None, tight: int | None, longest: int | None = None) -> str:
    """The largest context within the budget, and the one within the limit where that is told.

    >>> context_words(None, 8192)
    'none (tight up to 8,192)'
    """
    words = "none" if fits is None else f"{fits:,}"
    if fits is not None and fits == longest:
        words += " (the model's maximum)"
    return words if tight is None else f"{words} (tight up to {tight:,})"


def advice_lines(found: Findings) -> list[str]:
    """What to change, each line tried; on a card what to leave on the host."""
    lines = ["what would help, each tried:"] if found.advice else []
    lines += [f"  {one.text}" for one in found.advice]
    if found.estimate.ledger.verdict == "exceeds" and not lines and found.offload is None:
        lines.append("nothing short of a smaller model would fit")
    if found.offload is not None:
        offload = found.offload
        lines.append(
            f"llama.cpp {' '.join(offload.options)} would keep {offload.text} on the host: "
            f"{format_gib(offload.device_bytes)} on the card, {format_gib(offload.host_bytes)} in "
            "the host's memory, at the host's speed"
        )
    if found.compare is not None:
        lines.append(f"other machines and other ways for it: {found.compare}")
    return lines


def paging_line(paging: Paging) -> str:
    """What pages hold of the requests, and what contiguous reservation would."""
    holding = paging.holding
    return (
        f"{paging.sequences} sequences of these requests: pages hold "
        f"{format_gib(paging.paged_bytes)} on average ({100 * holding.paged_waste:.1f} % unused), "
        f"contiguous reservation {format_gib(paging.contiguous_bytes)} "
        f"({100 * holding.contiguous_waste:.1f} % unused)"
    )


def traced_lines(traced: Any) -> list[str]:
    """What a trace found, and on which backend with which stand-ins."""
    caches = traced.cache_bytes + traced.state_bytes
    stand_ins = ", ".join(traced.stand_ins) or "none"
    return [
        f"traced on {traced.backend}, {traced.num_operations:,} operations, nothing evaluated: "
        f"weights {format_gib(traced.weights_bytes)} ({traced.weights_bytes:,} B), caches "
        f"{format_gib(caches)} ({caches:,} B)",
        f"  liveness peak: prefill {format_gib(traced.prefill_peak_bytes)}, decode "
        f"{format_gib(traced.decode_peak_bytes)}; running ahead of frees at most "
        f"{format_gib(traced.prefill_peak_ahead_bytes)} and "
        f"{format_gib(traced.decode_peak_ahead_bytes)}",
        f"  stand-ins for fused operations: {stand_ins}",
    ]


def estimate_json(found: Findings, model: dict[str, Any], speeds: "Speeds") -> dict[str, Any]:
    """The document of ``uma estimate --json``."""
    from uma.report.plan import machine_json

    estimate, ledger = found.estimate, found.estimate.ledger
    offload = None if found.offload is None else asdict(found.offload)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model
        | {
            "format": estimate.format,
            "stored": estimate.stored or estimate.format,
            "bits_per_weight": round(estimate.bits_per_weight, 4),
            "cache_type": estimate.cache_type,
        },
        "machine": machine_json(estimate.machine),
        "workload": asdict(estimate.workload)
        | {"engine": estimate.engine, "settings": list(estimate.settings)},
        "terms": [_term_json(term) for term in ledger.terms],
        "phases": {f"{p}_bytes": size for p, size in phases(ledger.terms).items()},
        "basis": {f"{name}_bytes": size for name, size in bases(ledger).items()},
        "binding_phase": peak(ledger.terms)[0],
        **_sized("total", ledger.predicted_peak_bytes),
        **_sized("budget", estimate.budget.budget_bytes),
        "budget_source": estimate.budget.winner,
        **_sized("limit", estimate.budget.limit_bytes),
        **_sized("headroom", estimate.headroom_bytes),
        "verdict": ledger.verdict,
        "max_context_tokens": found.max_context_tokens,
        "tight_context_tokens": found.tight_context_tokens,
        "max_batch_size": found.max_batch_size,
        "best_format": found.best_format,
        **_sized("largest_buffer", estimate.largest_buffer_bytes),
        "advice": [_advice_json(one) for one in found.advice],
        "offload": offload,
        "compare": found.compare,
        "paging": None if found.paging is None else _paging_json(found.paging),
        "exact": None if found.traced is None else asdict(found.traced),
        **_rate_json("decode_tps", speeds.decode),
        **_rate_json("prompt_tps", speeds.prompt),
        "notes": list(estimate.notes),
    }


def _rate_json(name: str, found: "Rate | NotKnown") -> dict[str, float | str | None]:
    """A rate with its interval, or null with the reason."""
    best, low, high = (getattr(found, key, None) for key in ("best", "low", "high"))
    reason = getattr(found, "reason", None)
    return {name: best, f"{name}_low": low, f"{name}_high": high, f"{name}_reason": reason}


def _sized(name: str, size_bytes: int | None) -> dict[str, int | float | None]:
    """A size exactly, and as it is shown."""
    shown = None if size_bytes is None else round(size_bytes / GIB, 3)
    return {f"{name}_bytes": size_bytes, f"{name}_gib": shown}


def _term_json(term: MemoryTerm) -> dict[str, Any]:
    return {
        "name": term.name,
        **_sized("size", term.size_bytes),
        "basis": term.basis,
        "source": term.source,
        "phase": term.phase,
    }


def _advice_json(advice: "Advice") -> dict[str, Any]:
    return asdict(advice) | {"options": list(advice.options)}


def _paging_json(paging: Paging) -> dict[str, Any]:
    return {
        "sequences": paging.sequences,
        "paged_bytes": paging.paged_bytes,
        "contiguous_bytes": paging.contiguous_bytes,
        "paged_waste": paging.holding.paged_waste,
        "contiguous_waste": paging.holding.contiguous_waste,
    }
