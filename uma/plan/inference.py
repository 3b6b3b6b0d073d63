"""The plan of one run: form of the weights, context, prefill step, ledger, verdict."""

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path

from uma.architecture.layers import Architecture
from uma.engines import mlx
from uma.engines.mlx_phases import Shared
from uma.frozen import dataclass
from uma.ledger import Ledger, Verdict, peak
from uma.machine import Budget, Machine, budget_of, verdict
from uma.memory.kv_cache import STEP
from uma.memory.term import MemoryTerm
from uma.plan.forms import Form
from uma.plan.limits import cache_limit_bytes
from uma.workload import (
    DEFAULT_KV_GROUP_SIZE,
    DEFAULT_PREFILL_STEP_SIZE,
    Backend,
    Inference,
)

DEFAULT_CONTEXT_TOKENS = 32_768
SMALLEST_PREFILL_STEP = 64  # a smaller chunk saves little: what one token needs dominates
SMALLEST_POOL = 8 << 20  # small arrays of all sizes: half of this was seen with tiny models


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model for speculative decoding, and the form that its weights are held in."""

    architecture: Architecture
    form: Form


@dataclass(frozen=True, slots=True)
class Beside:
    """What is held beside the model: a draft model, an adapter."""

    draft: Draft | None = None
    adapters: MemoryTerm | None = None
    num_draft_tokens: int = mlx.NUM_DRAFT_TOKENS

    def terms(self, workload: Inference) -> tuple[MemoryTerm, ...]:
        terms = () if self.adapters is None else (self.adapters,)
        if self.draft is None:
            return terms
        form = self.draft.form
        draft = mlx.draft_terms(
            self.draft.architecture,
            form.weights,
            workload,
            activation_bytes=form.activation_bytes,
            num_draft_tokens=self.num_draft_tokens,
        )
        return (*terms, *draft)


NOTHING_BESIDE = Beside()


def beside_of(
    draft: "InferencePlan | None", adapter_path: Path | None, num_draft_tokens: int
) -> Beside:
    """What a draft model, as it was planned, and the adapter in a folder hold.

    Raises:
        CheckpointError: If there is no adapter, or it is malformed.
    """
    adapters = None
    if adapter_path is not None:
        from uma.checkpoint.adapter import adapter_header

        size_bytes = adapter_header(adapter_path).size_bytes
        adapters = MemoryTerm("adapters", size_bytes, "exact", "safetensors header")
    planned = None if draft is None else Draft(draft.architecture, draft.form)
    return Beside(planned, adapters, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked; ``None`` leaves a choice to the plan."""

    context_tokens: int | None = None
    prompt_tokens: int | None = None
    batch_size: int = 1
    prefill_step_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = DEFAULT_KV_GROUP_SIZE
    budget_bytes: int | None = None
    reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """A decided run. ``active_peak_bytes`` is the peak without MLX's pool of freed buffers."""

    architecture: Architecture
    machine: Machine
    form: Form
    workload: Inference
    budget: Budget
    ledger: Ledger
    active_peak_bytes: int
    largest_buffer_bytes: int
    largest_output_bytes: int
    beside: Beside = NOTHING_BESIDE
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return self.ledger.verdict


@dataclass(frozen=True, slots=True)
class Case:
    """A model in one form on one backend; what each workload needs is computed once.

    It stays the same while context, prefill step and machine are searched. ``outputs`` and
    ``shared`` hold for every form with activations as wide, and may be shared between them.
    """

    architecture: Architecture
    form: Form
    backend: Backend
    beside: Beside = NOTHING_BESIDE
    known: dict[Inference, tuple[tuple[MemoryTerm, ...], int]] = field(default_factory=dict)
    moments: mlx.Known = field(default_factory=dict)
    outputs: dict[Inference, int] = field(default_factory=dict)
    shared: Shared = field(default_factory=dict)

    def terms(self, workload: Inference) -> tuple[MemoryTerm, ...]:
        return self._known(workload)[0]

    def peak_bytes(self, workload: Inference) -> int:
        """The peak without MLX's pool of freed buffers."""
        return self._known(workload)[1]

    def largest_buffer_bytes(self, workload: Inference) -> int:
        matrix = mlx.largest_matrix_bytes(self.architecture, self.form.weights)
        return max(matrix, self.largest_output_bytes(workload))

    def largest_output_bytes(self, workload: Inference) -> int:
        if workload not in self.outputs:
            self.outputs[workload] = mlx.largest_output_bytes(
                self.architecture,
                self.form.weights,
                workload,
                backend=self.backend,
                activation_bytes=self.form.activation_bytes,
            )
        return self.outputs[workload]

    def fits(self, workload: Inference, limit_bytes: int, machine: Machine) -> bool:
        """Whether the peak is within ``limit_bytes``, and no array above the device's maximum."""
        most = machine.max_buffer_bytes
        if self.peak_bytes(workload) + machine.overhead_bytes > limit_bytes:
            return False
        return most is None or self.largest_buffer_bytes(workload) <= most

    def _known(self, workload: Inference) -> tuple[tuple[MemoryTerm, ...], int]:
        if workload not in self.known:
            terms = self._terms(workload)
            self.known[workload] = terms, peak(terms)[1]
        return self.known[workload]

    def _terms(self, workload: Inference) -> tuple[MemoryTerm, ...]:
        terms = mlx.inference_terms(
            self.architecture,
            self.form.weights,
            workload,
            backend=self.backend,
            activation_bytes=self.form.activation_bytes,
            known=self.moments,
            shared=self.shared,
        )
        return (*terms, *self.form.load_terms, *self.beside.terms(workload))


def plan_inference(
    architecture: Architecture,
    forms: Sequence[Form],
    request: Request,
    machine: Machine,
    beside: Beside = NOTHING_BESIDE,
) -> InferencePlan:
    """The plan with the first of ``forms`` that fits the budget as asked, else with the last.

    The context is the asked one, else the smallest of the model's maximum, 32,768, and the largest
    that fits. The prefill step is the asked one or 2,048, halved as often as it takes to fit. A
    preferred form may shorten neither: the speed of a form is no reason to read less.
    """
    return plan_cases(
        [Case(architecture, form, machine.backend, beside) for form in forms], request, machine
    )


def plan_cases(cases: Sequence[Case], request: Request, machine: Machine) -> InferencePlan:
    """``plan_inference`` of forms whose needs may be known already, for many machines."""
    budget = budget_of(
        machine, user_budget_bytes=request.budget_bytes, reserve_bytes=request.reserve_bytes
    )
    *preferred, last = cases
    for case in preferred:
        if case.fits(wanted(case.architecture, request), budget.budget_bytes, machine):
            return _plan(case, request, budget, machine)
    return _plan(last, request, budget, machine)


def with_tokens(plan: InferencePlan, prompt_tokens: int, context_tokens: int) -> InferencePlan:
    """The same plan for the tokens that a run really used."""
    case = Case(plan.architecture, plan.form, plan.machine.backend, plan.beside)
    workload = replace(plan.workload, prompt_tokens=prompt_tokens, context_tokens=context_tokens)
    limit_bytes = next(t.size_bytes for t in plan.ledger.terms if t.name == "buffer_pool")
    return _finished(case, workload, plan.budget, plan.machine, plan.notes, limit_bytes)


def _plan(case: Case, request: Request, budget: Budget, machine: Machine) -> InferencePlan:
    workload = _decided(case, request, budget, machine)
    notes = [*case.form.notes, *mlx.notes(case.architecture)]
    asked_step = request.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE
    if workload.prefill_step_size < min(asked_step, workload.longest_prompt_tokens):
        fits = case.fits(workload, budget.ceiling_bytes, machine)
        notes.append(
            f"prefill step lowered from {asked_step:,} to {workload.prefill_step_size:,} tokens "
            + ("to fit" if fits else "to come closest")
        )
    longest = case.architecture.max_position_embeddings
    if longest is not None and workload.context_tokens > longest:
        notes.append(f"the model was made for {longest:,} tokens of context")
    return _finished(case, workload, budget, machine, tuple(notes))


def _finished(
    case: Case,
    workload: Inference,
    budget: Budget,
    machine: Machine,
    notes: tuple[str, ...],
    cache_limit: int | None = None,
) -> InferencePlan:
    terms = case.terms(workload)
    active_peak_bytes = case.peak_bytes(workload)
    if cache_limit is None:
        cache_limit = cache_limit_bytes(active_peak_bytes, budget, machine)
    pool_bytes = min(cache_limit, _freed_bytes(terms))
    pool = MemoryTerm("buffer_pool", pool_bytes, "bound", "freed temporaries, within a limit set")
    largest_buffer_bytes = case.largest_buffer_bytes(workload)
    # The pool is what the budget has left over: it never decides whether a run fits.
    found = verdict(active_peak_bytes + machine.overhead_bytes, budget)
    if largest_buffer_bytes > (machine.max_buffer_bytes or largest_buffer_bytes):
        found = "exceeds"
    return InferencePlan(
        architecture=case.architecture,
        machine=machine,
        form=case.form,
        workload=workload,
        budget=budget,
        ledger=Ledger(
            (*terms, pool, *machine.overhead), budget.budget_bytes, budget.limit_bytes, found
        ),
        active_peak_bytes=active_peak_bytes,
        largest_buffer_bytes=largest_buffer_bytes,
        largest_output_bytes=case.largest_output_bytes(workload),
        beside=case.beside,
        notes=notes,
    )


def _freed_bytes(terms: Sequence[MemoryTerm]) -> int:
    """What the pool can come to hold: temporaries freed in one phase, and a little of any other."""
    transient: dict[str, int] = {}
    for term in terms:
        if term.name in ("activations", "attention", "logits"):
            transient[term.phase] = transient.get(term.phase, 0) + term.size_bytes
    return max(SMALLEST_POOL, *transient.values())


def _decided(case: Case, request: Request, budget: Budget, machine: Machine) -> Inference:
    """Context and prefill step: the most that fits the budget, else the limit, else as asked.

    Steps below a quarter of the asked one slow prefill down: they are only for contexts that the
    user insists on.
    """
    asked = wanted(case.architecture, request)
    steps = halvings(asked.prefill_step_size)
    if request.context_tokens is None:
        steps = steps[:3]
    smallest = replace(asked, prefill_step_size=steps[-1])
    ceiling = budget.ceiling_bytes
    for limit_bytes in (budget.budget_bytes, ceiling):
        if case.form.weights.size_bytes > limit_bytes:
            continue
        for step in steps:
            workload = asked if step == steps[0] else replace(asked, prefill_step_size=step)
            if case.fits(workload, limit_bytes, machine):
                return workload
        if request.context_tokens is None:
            shorter = _shorter(case, smallest, limit_bytes, machine)
            if shorter is not None:
                return shorter
    # Nothing fits: shown as it was asked, unless a smaller step brings it closest.
    return asked if case.form.weights.size_bytes > ceiling else smallest


def wanted(architecture: Architecture, request: Request) -> Inference:
    """What is asked, its open choices as generous as they come."""
    longest = architecture.max_position_embeddings or DEFAULT_CONTEXT_TOKENS
    return Inference(
        context_tokens=request.context_tokens or min(longest, DEFAULT_CONTEXT_TOKENS),
        prompt_tokens=request.prompt_tokens,
        batch_size=request.batch_size,
        prefill_step_size=request.prefill_step_size or DEFAULT_PREFILL_STEP_SIZE,
        kv_bits=request.kv_bits,
        kv_group_size=request.kv_group_size,
    )


def halvings(step: int) -> list[int]:
    """``step``, its half, and so on down to 64: the steps that a plan may take.

    >>> halvings(300)
    [300, 150, 75]
    """
    steps = [step]
    while steps[-1] // 2 >= SMALLEST_PREFILL_STEP:
        steps.append(steps[-1] // 2)
    return steps


def _shorter(
    case: Case, workload: Inference, limit_bytes: int, machine: Machine
) -> Inference | None:
    """``workload`` with the longest context within ``limit_bytes``; ``None`` if there is none."""
    low, high = 0, workload.context_tokens // STEP
    while low < high:
        middle = (low + high + 1) // 2
        trial = replace(workload, context_tokens=middle * STEP)
        if case.fits(trial, limit_bytes, machine):
            low = middle
        else:
            high = middle - 1
    return replace(workload, context_tokens=low * STEP) if low else None
