"""From the options of a command to a plan: what the model is, what it needs, whether it fits."""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from uma.cli.progress import say
from uma.errors import DoesNotFit, UnsupportedModel, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from uma.architecture.layers import Architecture
    from uma.checkpoint.source import ModelSource
    from uma.cli.run import RunOptions
    from uma.machine import Machine
    from uma.memory.term import MemoryTerm
    from uma.plan.emit import Server
    from uma.plan.inference import Beside, Form, InferencePlan, Request
    from uma.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Planned:
    """A source and its plan, before or after the files are here."""

    source: "ModelSource"
    plan: "InferencePlan"


def print_plan(chosen: "RunOptions", emit: "Server | None") -> int:
    """``--dry-run`` and ``--emit``: nothing is loaded and nothing is fetched but headers."""
    from uma.machine import read_machine

    machine = read_machine()
    source = described(chosen, located(chosen))
    draft = None
    if chosen.draft_model is not None:
        asked = of_draft(chosen)
        draft = described(asked, located(asked))
    planned = plan_of(chosen, source, machine, beside_of(chosen, draft, machine))
    if emit is not None:
        from uma.plan.emit import server_command

        print(server_command(emit, planned.source, planned.plan))
    elif chosen.json:
        from uma.report.plan import plan_json

        print(json.dumps(plan_json(planned.plan, model_json(planned.source)), indent=2))
    else:
        from uma.report.plan import plan_text

        print(plan_text(planned.plan, source.name))
    if planned.plan.verdict != "exceeds" or chosen.force:
        return 0
    say(f"uma: {does_not_fit(planned).args[0]}")
    return DoesNotFit.exit_code


def described(chosen: "RunOptions", source: "ModelSource") -> "ModelSource":
    """The source with its config: from the hub's headers, or a GGUF file's, where it has none."""
    from uma.checkpoint.source import probe

    if source.config is None and not source.gguf_headers:
        source = probe(source)
    if not source.gguf_headers:
        return source
    from uma.runtime.gguf.convert import planned_config

    # Described as the folder that the file would be converted to.
    config, _ = planned_config(source.gguf_headers[0], asked_quantization(chosen))
    return replace(source, config=config)


def asked_quantization(chosen: "RunOptions") -> "Quantization | None":
    """The format to convert a GGUF file to; ``Quantization(16)`` is full precision."""
    from uma.quantization import Quantization, quantization_for

    asked = asked_format(chosen, None)
    if not asked:
        return None
    return quantization_for(**asked) or Quantization(16)


def asked_format(chosen: "RunOptions", source: "ModelSource | None") -> dict[str, Any]:
    """Bits, mode and group size as the options name them, else as the model's name does."""
    from uma.checkpoint.names import parse_quant
    from uma.quantization import quantization_of_config

    bits, mode = chosen.bits, chosen.mode
    if chosen.quant is not None and (bits, mode) == (None, None):
        bits, mode = parse_quant(chosen.quant)
    asked = {"bits": bits, "mode": mode, "group_size": chosen.group_size}
    if any(value is not None for value in asked.values()):
        return asked
    if source is None or source.kind != "catalog" or source.resolution is None:
        return {}
    if quantization_of_config(source.config or {}) is not None:
        return {}
    return asked | {"bits": source.resolution.bits, "mode": source.resolution.mode}


def beside_of(
    chosen: "RunOptions", draft: "ModelSource | None", machine: "Machine", timed: bool = False
) -> "Beside":
    """The draft model, in the form that is fast here whatever room is left, and the adapter."""
    from uma.plan.inference import Beside, Draft

    planned = None
    if draft is not None:
        plan = plan_of(of_draft(chosen), draft, machine, timed=timed).plan
        planned = Draft(plan.architecture, plan.form)
    adapters = None if chosen.adapter_path is None else adapter_term(chosen.adapter_path)
    return Beside(planned, adapters, chosen.num_draft_tokens)


def of_draft(chosen: "RunOptions") -> "RunOptions":
    """The options as they hold for the draft model: it is read as it is stored."""
    return replace(
        chosen,
        model=chosen.draft_model,
        draft_model=None,
        adapter_path=None,
        revision=None,
        bits=None,
        mode=None,
        group_size=None,
        quant=None,
        context=None,
        kv_bits=None,
        budget_bytes=None,
    )


def adapter_term(folder: "Path") -> "MemoryTerm":
    """The bytes of an adapter, from the header of its file.

    Raises:
        CheckpointError: If there is none, or it is malformed.
    """
    from uma.checkpoint.safetensors import read_header
    from uma.memory.term import MemoryTerm

    header = read_header(folder / "adapters.safetensors")
    return MemoryTerm("adapters", header.size_bytes, "exact", "safetensors header")


def located(chosen: "RunOptions") -> "ModelSource":
    """What the model is, from this disk alone; a name without a format means the default one."""
    from uma.checkpoint.source import locate
    from uma.plan.forms import DEFAULT_BITS

    find = partial(locate, chosen.model, quant=chosen.quant, revision=chosen.revision)
    source = find(bits=chosen.bits)
    named = source.resolution
    if chosen.mode is None and named is not None and (named.bits, named.mode) == (None, None):
        return find(bits=DEFAULT_BITS)
    return source


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
    asked = {} if is_gguf(source) else asked_format(chosen, source)
    forms = forms_of(source, architecture, backend=machine.backend, **asked)
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
    from uma.quantization import MODES

    if chosen.kv_bits is None:
        return
    if chosen.kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits {chosen.kv_bits}: allowed are {', '.join(map(str, KV_BITS))}")
    _, _, group_sizes = MODES["affine"]
    if chosen.kv_group_size not in group_sizes:
        sizes = ", ".join(map(str, group_sizes))
        raise UsageError(f"--kv-group-size {chosen.kv_group_size}: allowed are {sizes}")
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
        f"{planned.source.name} needs {format_gib(plan.ledger.predicted_peak_bytes)} for "
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
