"""From the options of a command to a plan: what the model is, what it needs, whether it fits."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uma.cli.progress import say
from uma.errors import DoesNotFit, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from uma.architecture.layers import Architecture
    from uma.checkpoint.source import ModelSource
    from uma.cli.run import RunOptions, Server
    from uma.machine import Machine
    from uma.plan.inference import Beside, Form, InferencePlan, Request
    from uma.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Planned:
    """A source and its plan, before or after the files are here."""

    source: "ModelSource"
    plan: "InferencePlan"


def print_plan(chosen: "RunOptions", emit: "Server | None") -> int:
    """``--dry-run`` and ``--emit``: nothing is loaded and nothing is fetched but headers."""
    from uma.checkpoint.source import probe
    from uma.machine import read_machine

    source = located(chosen)
    if source.config is None and not source.gguf_headers:
        source = probe(source)
    if source.gguf_headers:
        source = as_converted(chosen, source)
    planned = plan_of(chosen, source, read_machine())
    if emit is not None:
        from uma.plan.emit import server_command

        print(server_command(emit, planned.source, planned.plan))
        return 0
    if chosen.json:
        from uma.report.plan import plan_json

        print(json.dumps(plan_json(planned.plan, model_json(planned.source)), indent=2))
    else:
        from uma.report.plan import plan_text

        print(plan_text(planned.plan, source.name))
    return _fit_code(chosen, planned)


def _fit_code(chosen: "RunOptions", planned: Planned) -> int:
    if planned.plan.verdict != "exceeds" or chosen.force:
        return 0
    say(f"uma: {does_not_fit(planned).args[0]}")
    return DoesNotFit.exit_code


def as_converted(chosen: "RunOptions", source: "ModelSource") -> "ModelSource":
    """A GGUF source described as the folder that it would be converted to."""
    from uma.runtime.gguf.convert import planned_config

    config, _ = planned_config(source.gguf_headers[0], asked_quantization(chosen))
    return replace(source, config=config)


def asked_quantization(chosen: "RunOptions") -> "Quantization | None":
    """The format that the options name; ``Quantization(16)`` for full precision, for GGUF files."""
    from uma.quantization import Quantization, quantization_for

    if chosen.bits == 16:
        return Quantization(16)
    if (chosen.bits, chosen.mode, chosen.group_size) == (None, None, None):
        return None
    return quantization_for(chosen.bits, chosen.mode, chosen.group_size)


def located(chosen: "RunOptions") -> "ModelSource":
    from uma.checkpoint.source import locate
    from uma.plan.forms import DEFAULT_BITS

    bits = chosen.bits
    if bits is None and chosen.quant is None and chosen.mode is None:
        bits = DEFAULT_BITS
    return locate(chosen.model, bits=bits, quant=chosen.quant, revision=chosen.revision)


def request_of(chosen: "RunOptions") -> "Request":
    from uma.plan.inference import Request

    return Request(
        context_tokens=chosen.context,
        prompt_tokens=chosen.prompt_tokens,
        batch_size=chosen.batch_size,
        prefill_step_size=chosen.prefill_step_size,
        kv_bits=chosen.kv_bits,
        kv_group_size=chosen.kv_group_size,
        budget_bytes=chosen.budget_bytes,
        reserve_bytes=chosen.reserve_bytes,
    )


def plan_of(
    chosen: "RunOptions",
    source: "ModelSource",
    machine: "Machine",
    beside: "Beside | None" = None,
    timed: bool = False,
) -> Planned:
    """The plan for a source whose config is known.

    ``timed`` orders the forms of the weights by what MLX's CPU backend does fastest, for which
    MLX is loaded; else they are in the order that is usual.
    """
    from uma.architecture import architecture_from_config
    from uma.plan.forms import forms_of
    from uma.plan.inference import NOTHING_BESIDE, plan_inference

    if source.config is None:
        raise UnsupportedModel(f"{source.name}: its configuration is not known")
    architecture = architecture_from_config(source.config)
    # What was asked of a GGUF file was done when it was converted.
    asked = replace(chosen, bits=None, mode=None, group_size=None) if is_gguf(source) else chosen
    forms = forms_of(
        source,
        architecture,
        bits=asked.bits,
        mode=asked.mode,
        group_size=asked.group_size,
        backend=machine.backend,
    )
    if chosen.dequantize == "never":
        forms = forms[-1:]
    elif chosen.dequantize == "always":
        forms = forms[:1]
    elif timed and len(forms) > 1:
        forms = by_speed(forms, architecture, source.config)
    require_kv_bits(chosen, architecture)
    plan = plan_inference(
        architecture, forms, request_of(chosen), machine, beside or NOTHING_BESIDE
    )
    return Planned(source, plan)


def require_kv_bits(chosen: "RunOptions", architecture: "Architecture") -> None:
    """Refuse ``--kv-bits`` that no layer's cache can have, before anything is loaded.

    Raises:
        UsageError: If the width is none that packs, or the group divides no head.
    """
    from uma.engines.mlx_cache import KV_BITS, kv_quantization

    if chosen.kv_bits is None:
        return
    if chosen.kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits {chosen.kv_bits}: allowed are {', '.join(map(str, KV_BITS))}")
    able = kv_quantization(architecture, chosen.kv_group_size)
    if not able.layers:
        reasons = "; ".join(sorted(set(able.kept.values())))
        raise UsageError(f"--kv-bits: no layer of this model can be quantized ({reasons})")


def is_gguf(source: "ModelSource") -> bool:
    return source.kind in ("gguf", "default")


def by_speed(
    forms: "tuple[Form, ...]", architecture: "Architecture", config: dict[str, Any]
) -> "tuple[Form, ...]":
    """The forms that this backend can run, the fastest first."""
    from uma.architecture.layers import Experts
    from uma.quantization import quantization_of_config
    from uma.runtime.backend import fastest_form, form_rates

    parts = [part for layer in architecture.layers for part in layer.feed_forward]
    experts = any(isinstance(part, Experts) for part in parts)
    stored = quantization_of_config(config)
    packed = forms[-1].quantization or (stored.default if stored else None)
    rates = form_rates(packed, architecture.dtype, experts=experts)
    left = {form.kind: form for form in forms if form.kind in rates}
    ordered = []
    while left:
        ordered.append(left.pop(fastest_form(rates, left.keys())))
    return tuple(ordered)


def does_not_fit(planned: Planned) -> DoesNotFit:
    """What is missing, and what would fit, in the order in which it costs least."""
    from uma.plan.advice import advice
    from uma.units import format_gib

    plan = planned.plan
    line = (
        f"{planned.source.name} needs {format_gib(plan.active_peak_bytes)} for "
        f"{plan.workload.context_tokens:,} tokens of context; "
    )
    most = plan.machine.max_buffer_bytes
    if most is not None and plan.largest_buffer_bytes > most:
        line += (
            f"its largest array takes {format_gib(plan.largest_buffer_bytes)}, and the device "
            f"allows {format_gib(most)}"
        )
    elif plan.budget.user_bytes is not None and plan.active_peak_bytes > plan.budget.user_bytes:
        line += f"your budget is {format_gib(plan.budget.user_bytes)}"
    else:
        line += f"the limit is {format_gib(plan.budget.limit_bytes)} ({plan.machine.limit_source})"
    remedies = [*advice(plan, planned.source), "--force goes on anyway"]
    return DoesNotFit("\n  ".join([line, *remedies]))


def model_json(source: "ModelSource") -> dict[str, Any]:
    """What the JSON documents say of a model."""
    return {
        "name": source.name,
        "kind": source.kind,
        "repo": source.repo,
        "revision": source.revision if source.repo else None,
        "model_type": (source.config or {}).get("model_type"),
        "config_basis": source.config_basis,
        "stored_bytes": source.weight_bytes,
    }
