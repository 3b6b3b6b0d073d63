"""What to change so that a plan would fit, the cheapest change first; each is tried before told."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from uma.catalog import Model, models, short_name
from uma.checkpoint.names import resolve
from uma.checkpoint.source import ModelSource
from uma.errors import UsageError
from uma.ledger import Verdict
from uma.plan.estimate import Asked, Change, Estimate
from uma.plan.inference import Case, InferencePlan, Request
from uma.plan.inverses import largest_batch, largest_context
from uma.plan.limits import smallest_wired_limit_mb, wired_limit_advice
from uma.plan.mlx_case import MlxCase
from uma.units import format_gib

FEWEST_BITS = 4  # below it the answers suffer more than a smaller model's would
MODELS_TRIED = 4
OTHERS_LINE = "memory that other programs leave now"

Kind = Literal["programs", "context", "batch", "cache", "bits", "together", "model", "wired_limit"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and the estimate with it; ``options`` are those to give in addition.

    ``model`` is another model's name. ``text`` says it in a sentence.
    """

    kind: Kind
    text: str
    options: tuple[str, ...] = ()
    model: str | None = None
    needed_bytes: int | None = None
    verdict: Verdict | None = None


def advice(plan: InferencePlan, source: ModelSource) -> list[str]:
    """Sentences for a plan of ``uma run`` that exceeds; none of them is untried."""
    workload = plan.workload
    request = Request(
        context_tokens=workload.context_tokens,
        batch_size=workload.batch_size,
        kv_bits=workload.kv_bits,
        kv_group_size=workload.kv_group_size,
        budget_bytes=plan.budget.user_bytes,
        reserve_bytes=plan.budget.reserve_bytes,
    )
    case = Case(plan.architecture, plan.form, plan.machine.backend, plan.beside)
    found = remedies(MlxCase(source, (case,), request, plan.machine))
    return [one.text for one in found] or ["nothing short of a smaller model would fit"]


def remedies(asked: Asked) -> list[Advice]:
    """What to change, in the order of what it costs; nothing where the workload fits.

    Where it is tight only what makes it fit is told.
    """
    now = asked.estimate()
    if now.ledger.verdict == "fits":
        return []
    search = _Search(asked, now)
    found = list(search.programs())
    found += list(search.singly()) or list(islice(search.together(), 1))
    return [*found, *search.smaller_model(), *search.wired_limit()]


@dataclass(frozen=True, slots=True)
class _Search:
    """What is asked, and the estimate ``now`` that does not fit."""

    asked: Asked
    now: Estimate

    def programs(self) -> Iterator[Advice]:
        """Where what other programs leave is the lowest line, and the next one would do."""
        budget = self.now.budget
        others = [line for line in budget.lines if line[0] != OTHERS_LINE]
        if budget.winner != OTHERS_LINE or not others:
            return
        name, free_bytes = min(others, key=lambda line: line[1])
        if self.asked.excess_bytes(self.asked.workload, free_bytes) <= 0:
            text = (
                f"close other programs: they leave {format_gib(budget.budget_bytes)}, and without "
                f"them the budget is {format_gib(free_bytes)} ({name})"
            )
            needed = self.now.ledger.predicted_peak_bytes
            yield Advice("programs", text, needed_bytes=needed, verdict="fits")

    def singly(self) -> Iterator[Advice]:
        """One change alone: less context, fewer sequences, a cache of 8 bits, narrower weights."""
        shorter = self._longest(self.asked)
        if shorter is not None:
            yield from self._tried("context", Change(context_tokens=shorter))
        fewer_sequences = largest_batch(self.asked) if self.asked.workload.batch_size > 1 else None
        if fewer_sequences is not None:
            yield from self._tried("batch", Change(batch_size=fewer_sequences))
        yield from self._tried("cache", Change(eight_bit_cache=True))
        narrower = [Change(bits=bits) for bits in self._fewer_bits()]
        if self.asked.bits >= FEWEST_BITS:
            narrower.insert(0, Change(bits=self.asked.bits, requantize=True))
        for change in narrower:
            fewer = list(self._tried("bits", change))
            if fewer:
                yield fewer[0]
                return

    def together(self) -> Iterator[Advice]:
        """Several changes, where none alone is enough: as few as it takes."""
        fewest = min(self._fewer_bits(), default=None)
        both = Change(eight_bit_cache=True, bits=fewest)
        changes = [both] if fewest is None else [Change(bits=fewest), both]
        if fewest is not None:
            yield from self._tried("together", both)
        for change in changes:
            case = self.asked.changed(change)
            shorter = None if case is None else self._longest(case)
            if shorter is not None:
                yield from self._tried("together", replace(change, context_tokens=shorter))

    def smaller_model(self) -> Iterator[Advice]:
        """The largest model of the same family, not older, that would run as it is asked."""
        model = None if self.asked.model is None else _row(self.asked.model)
        if model is None:
            return
        most = 8 * self.now.budget.ceiling_bytes / self.asked.bits
        for smaller in _smaller(model, most)[:MODELS_TRIED]:
            name = short_name(smaller)
            case = self.asked.of_model(name)
            found = None if case is None else case.estimate()
            if found is not None and found.ledger.verdict in self._enough:
                what = f"a smaller model, {name} at {found.format},"
                yield _advice("model", what, found, model=name)
                return

    def wired_limit(self) -> Iterator[Advice]:
        """A higher limit of the GPU's memory on a Mac, where the system keeps its reserve."""
        machine, budget = self.now.machine, self.now.budget
        largest = self.now.largest_buffer_bytes or 0
        if budget.user_bytes is not None or largest > (machine.max_buffer_bytes or largest):
            return  # which a higher limit would not change
        limit = budget.limit_bytes
        needed = limit + self.asked.excess_bytes(self.asked.workload, limit)
        text = wired_limit_advice(needed, machine, reserve_bytes=budget.reserve_bytes)
        if text is not None:
            advised = "sysctl" in text
            options = ("--gpu-limit", f"{smallest_wired_limit_mb(needed)}MiB") if advised else ()
            yield Advice("wired_limit", text, options, needed_bytes=needed)

    @property
    def _enough(self) -> tuple[Verdict, ...]:
        return ("fits",) if self.now.ledger.verdict == "tight" else ("fits", "tight")

    def _longest(self, asked: Asked) -> int | None:
        """A context shorter than the asked one, within the budget, else within the ceiling."""
        found = largest_context(asked)
        if found is None and "tight" in self._enough:
            found = largest_context(asked, self.now.budget.ceiling_bytes)
        return found if found and found < self.asked.workload.context_tokens else None

    def _fewer_bits(self) -> list[int]:
        return [bits for bits in self.asked.widths if FEWEST_BITS <= bits < self.asked.bits]

    def _tried(self, kind: Kind, change: Change) -> Iterator[Advice]:
        """The advice of ``change``, if that is enough."""
        case = self.asked.changed(change)
        found = None if case is None else case.estimate()
        if found is not None and found.ledger.verdict in self._enough:
            options = self.asked.options(change)
            said = [note for note in found.notes if note.startswith("--kv-bits")]
            told = _advice(kind, " ".join(options), found, options=options)
            yield replace(told, text="; ".join([told.text, *said]))


def _advice(
    kind: Kind,
    what: str,
    found: Estimate,
    options: tuple[str, ...] = (),
    model: str | None = None,
) -> Advice:
    needed, result = found.ledger.predicted_peak_bytes, found.ledger.verdict
    text = f"{what} would need {format_gib(needed)}: {result}"
    return Advice(kind, text, options, model, needed, result)


def _row(name: str) -> Model | None:
    """The catalog's row of a model's name; ``None`` if it has none."""
    try:
        return resolve(name).model
    except UsageError:
        return None


def _smaller(model: Model, most_parameters: float) -> list[Model]:
    """Models of a family that are not older, of at most so many parameters, the largest first."""
    parameters = min(model.parameters or 0, most_parameters)
    known = [
        other
        for other in models()
        if other.family == model.family
        and other.release_date >= model.release_date
        and other.parameters is not None
        and other.parameters < parameters
    ]
    return sorted(known, key=lambda other: -(other.parameters or 0))
