"""A model as it is asked for under MLX: the plan that ``uma run`` would make, as an estimate."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from uma.architecture import architecture_from_config
from uma.architecture.layers import Architecture
from uma.checkpoint.source import ModelSource, locate
from uma.engines.mlx_cache import layer_caches
from uma.errors import UmaError, UnsupportedModel, UsageError
from uma.frozen import dataclass
from uma.ledger import phase_totals
from uma.machine import Budget, Machine, budget_of
from uma.memory.kv_cache import TokenCache
from uma.plan.estimate import Change, Estimate, bits_per_weight
from uma.plan.forms import asked_format, bits_of, forms_of
from uma.plan.inference import (
    NOTHING_BESIDE,
    Beside,
    Case,
    InferencePlan,
    Request,
    halvings,
    plan_cases,
    wanted,
)
from uma.workload import Engine, Inference

WIDTHS = (16, 8, 6, 5, 4, 3, 2)


@dataclass(frozen=True, slots=True)
class MlxCase:
    """``cases`` are the forms to try, the preferred first, with what is known of their needs."""

    source: ModelSource
    cases: tuple[Case, ...]
    request: Request
    machine: Machine
    engine: Engine = "mlx"

    @property
    def model(self) -> str | None:
        return self.source.name

    @property
    def architecture(self) -> Architecture:
        return self.cases[-1].architecture

    @property
    def budget(self) -> Budget:
        return budget_of(
            self.machine,
            user_budget_bytes=self.request.budget_bytes,
            reserve_bytes=self.request.reserve_bytes,
        )

    @property
    def workload(self) -> Inference:
        return wanted(self.architecture, self.request)

    @property
    def bits(self) -> int:
        return bits_of(self.cases[-1].form, self.source)

    @property
    def format(self) -> str:
        return format_name(self.bits, self.architecture.dtype)

    @property
    def widths(self) -> Sequence[int]:
        return WIDTHS

    def on(self, machine: Machine) -> "MlxCase":
        """The same on another machine of the same backend: what is known of its needs is kept."""
        return replace(self, machine=machine)

    def like(self, other: "MlxCase") -> "MlxCase":
        """The same with what is known of ``other``, the same model in another format.

        On Metal alone, where a format has one form and activations of one width.
        """
        if self.machine.backend != "metal" or other.machine.backend != "metal":
            return self
        known = other.cases[-1]
        cases = (replace(own, outputs=known.outputs, shared=known.shared) for own in self.cases)
        return replace(self, cases=tuple(cases))

    def plan(self) -> InferencePlan:
        return plan_cases(self.cases, self.request, self.machine)

    def estimate(self) -> Estimate:
        plan = self.plan()
        workload = plan.workload
        cache = plan.architecture.dtype if plan.form.activation_bytes == 2 else "float32"
        if workload.kv_bits is not None:
            cache = f"{workload.kv_bits}-bit, groups of {workload.kv_group_size}"
        return Estimate(
            architecture=plan.architecture,
            machine=plan.machine,
            engine="mlx",
            format="fp32" if plan.form.kind == "float32" else self.format,
            workload=workload,
            budget=plan.budget,
            ledger=plan.ledger,
            bits_per_weight=bits_per_weight(plan.form.weights, plan.architecture),
            cache_type=cache,
            settings=(f"--prefill-step-size {workload.prefill_step_size}",),
            stored=plan.form.name,
            largest_buffer_bytes=plan.largest_buffer_bytes,
            notes=(
                *plan.notes,
                *plan.architecture.notes,
                *_quantized_caches(plan.architecture, workload),
                *_left_out(plan),
            ),
        )

    def excess_bytes(self, workload: Inference, limit_bytes: int) -> int:
        """With the smallest prefill step, to which the plan may go, else the one that needs least.

        Where what comes after the prompt is too much, no step helps.
        """
        case, (*larger, smallest) = self.cases[-1], halvings(workload.prefill_step_size)
        least = replace(workload, prefill_step_size=smallest)
        excess = self._excess_bytes(least, limit_bytes)
        after = phase_totals(case.terms(least))["decode"] + self.machine.overhead_bytes
        if excess <= 0 or after > limit_bytes:
            return excess
        others = (replace(workload, prefill_step_size=step) for step in larger)
        return min([excess, *(self._excess_bytes(other, limit_bytes) for other in others)])

    def _excess_bytes(self, workload: Inference, limit_bytes: int) -> int:
        case, most = self.cases[-1], self.machine.max_buffer_bytes
        excess = case.peak_bytes(workload) + self.machine.overhead_bytes - limit_bytes
        if most is None or excess > 0:
            return excess
        return max(excess, case.largest_buffer_bytes(workload) - most)

    def changed(self, change: Change) -> "MlxCase | None":
        workload = self.workload
        request = replace(
            self.request,
            context_tokens=change.context_tokens or workload.context_tokens,
            batch_size=change.batch_size or workload.batch_size,
            kv_bits=8 if change.eight_bit_cache else workload.kv_bits,
        )
        if change.bits is None or (change.bits == self.bits and not change.requantize):
            return replace(self, request=request)
        source = self.source
        if source.kind in ("gguf", "default"):
            return None  # converted as it is read: which bits it can have is decided there
        try:
            if source.kind == "catalog":  # perhaps another repository holds these bits
                source = locate(source.name, bits=change.bits)
            return mlx_case(
                source,
                self.machine,
                request,
                asked={"bits": change.bits},
                architecture=self.architecture,
                beside=self.cases[-1].beside,
            ).like(self)
        except UsageError:
            return None

    def options(self, change: Change) -> tuple[str, ...]:
        found: list[str] = []
        if change.bits is not None:
            found += ["--bits", str(change.bits)]
        if change.eight_bit_cache:
            found += ["--kv-bits", "8"]
        if change.context_tokens is not None:
            found += ["--context", str(change.context_tokens)]
        if change.batch_size is not None:
            found += ["--batch-size", str(change.batch_size)]
        return tuple(found)

    def of_model(self, name: str) -> "MlxCase | None":
        try:
            source = locate(name, bits=self.bits)
            request = replace(self.request, context_tokens=self.workload.context_tokens)
            return mlx_case(source, self.machine, request, beside=self.cases[-1].beside)
        except UmaError:
            return None


def mlx_case(
    source: ModelSource,
    machine: Machine,
    request: Request,
    *,
    asked: dict[str, Any] | None = None,
    architecture: Architecture | None = None,
    beside: Beside = NOTHING_BESIDE,
) -> MlxCase:
    """A source whose config is known, in the format ``asked``, else in that of its name.

    Raises:
        UnsupportedModel: If its configuration or architecture is not known.
        UsageError: If the asked bits cannot be had from the stored weights.
    """
    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    architecture = architecture or architecture_from_config(source.config)
    if asked is None:
        asked = asked_format(source)
    forms = forms_of(source, architecture, backend=machine.backend, **asked)
    cases = tuple(Case(architecture, form, machine.backend, beside) for form in forms)
    return MlxCase(source, cases, request, machine)


def _quantized_caches(architecture: Architecture, workload: Inference) -> tuple[str, ...]:
    """In how many layers ``--kv-bits`` is done, where that is not all of them."""
    if workload.kv_bits is None:
        return ()
    layers = layer_caches(
        architecture, kv_bits=workload.kv_bits, kv_group_size=workload.kv_group_size
    )
    caches = [[c for c in layer.caches if isinstance(c, TokenCache)] for layer in layers]
    kept = [any(cache.kv_bits for cache in found) for found in caches if found]
    if all(kept):
        return ()
    return (
        f"--kv-bits {workload.kv_bits} quantizes the caches of {sum(kept)} of {len(kept)} layers: "
        "those of sliding windows stay as they are (mlx_lm.generate itself raises "
        "NotImplementedError there)",
    )


def _left_out(plan: InferencePlan) -> tuple[str, ...]:
    """What no term counts, and where macOS says why it ended a run all the same."""
    measured = bool(plan.machine.overhead)
    if plan.machine.backend != "metal":
        return () if measured else ("the process itself is not counted",)
    notes = []
    if not measured:
        notes.append(
            "the process and Metal's own context are not counted: the reserve has room for them"
        )
    if plan.verdict in ("tight", "exceeds"):
        notes.append(
            "if macOS ends it, this says why: log show --last 10m --predicate "
            "'eventMessage CONTAINS \"IOGPU\"'"
        )
    return tuple(notes)


def format_name(bits: int, dtype: str) -> str:
    """A width in mlx-lm's words.

    >>> format_name(4, "bfloat16"), format_name(16, "bfloat16"), format_name(16, "float32")
    ('4bit', 'bf16', 'fp32')
    """
    return f"{bits}bit" if bits < 16 else {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
