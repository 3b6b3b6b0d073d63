"""What to change so that a plan would fit, the cheapest change first; each is tried before told."""

from collections.abc import Iterator
from dataclasses import replace

from uma.checkpoint.source import ModelSource
from uma.ledger import peak
from uma.machine import default_reserve_bytes
from uma.plan.forms import forms_of
from uma.plan.inference import Form, InferencePlan, Request, plan_inference
from uma.plan.limits import wired_limit_advice
from uma.quantization import quantization_of_config
from uma.units import format_gib

FEW_BITS = 4  # below it the answers suffer more than a smaller model's would


def advice(plan: InferencePlan, source: ModelSource) -> list[str]:
    """Sentences that name an option and what the plan needs with it; none if nothing helps."""
    remedies = list(_remedies(plan, source))
    raised = wired_limit_advice(
        plan.active_peak_bytes,
        plan.machine,
        reserve_bytes=plan.budget.reserve_bytes or default_reserve_bytes(plan.machine),
    )
    if raised is not None and plan.budget.user_bytes is None:
        remedies.append(raised)
    return remedies or ["nothing short of a smaller model would fit"]


def _remedies(plan: InferencePlan, source: ModelSource) -> Iterator[str]:
    form, workload = plan.form, plan.workload
    shorter = _tried(plan, [form], Request(kv_bits=workload.kv_bits))
    if shorter is not None and shorter.workload.context_tokens < workload.context_tokens:
        yield _sentence(f"--context {shorter.workload.context_tokens}", shorter)
    asked = Request(context_tokens=workload.context_tokens)
    if workload.kv_bits is None:
        cache = _tried(plan, [form], replace(asked, kv_bits=8))
        if cache is not None:
            yield _sentence("--kv-bits 8", cache)
    for bits in _fewer_bits(plan, source):
        fewer = _tried(
            plan,
            forms_of(source, plan.architecture, bits=bits, backend=plan.machine.backend),
            asked,
        )
        if fewer is not None:
            worse = "" if bits >= FEW_BITS else "; answers suffer below 4 bits"
            yield _sentence(f"--bits {bits}", fewer) + worse
            return


def _fewer_bits(plan: InferencePlan, source: ModelSource) -> list[int]:
    """Widths below the planned one that the stored weights can be quantized to."""
    held = plan.form.quantization
    stored = quantization_of_config(source.config or {})
    most = min(
        held.bits if held is not None else 16, stored.default.bits if stored is not None else 16
    )
    return [bits for bits in (8, 6, 5, 4, 3, 2) if bits < most]


def _tried(
    plan: InferencePlan, forms: "list[Form] | tuple[Form, ...]", request: Request
) -> InferencePlan | None:
    """The plan with ``request`` on the same machine and budget, if it would run."""
    ceiling = min(plan.budget.limit_bytes, plan.budget.user_bytes or plan.budget.limit_bytes)
    if all(form.weights.size_bytes > ceiling for form in forms):
        return None
    asked = replace(
        request,
        budget_bytes=plan.budget.user_bytes,
        reserve_bytes=plan.budget.reserve_bytes,
    )
    tried = plan_inference(plan.architecture, forms, asked, plan.machine)
    return tried if tried.verdict in ("fits", "tight") else None


def _sentence(option: str, plan: InferencePlan) -> str:
    return f"{option} would need {format_gib(peak(plan.ledger.terms)[1])}: {plan.verdict}"
