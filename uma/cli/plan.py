"""From the options of a command to a plan: what the model is, what it needs, whether it fits."""

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from uma.cli.progress import say
from uma.errors import DoesNotFit, UnsupportedModel, UsageError
from uma.frozen import dataclass

if TYPE_CHECKING:
    from uma.architecture.layers import Architecture
    from uma.checkpoint.source import ModelSource
    from uma.cli.options import RunOptions
    from uma.machine import Machine
    from uma.plan.emit import Server
    from uma.plan.inference import Beside, InferencePlan, Request
    from uma.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Planned:
    """A source and its plan, before or after the files are here."""

    source: "ModelSource"
    plan: "InferencePlan"


def print_plan(chosen: "RunOptions", emit: "Server | None") -> int:
    """``--dry-run`` and ``--emit``: nothing is loaded and nothing is fetched but headers."""
    from uma.cli.calibrated import calibrated
    from uma.machine import read_machine

    machine = calibrated(read_machine())
    source = described(chosen, located(chosen))
    draft = None
    if chosen.draft_model is not None:
        asked = of_draft(chosen)
        draft = described(asked, located(asked))
    planned = plan_of(chosen, source, machine, planned_beside(chosen, draft, machine))
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
    say(f"uma: {exceeded(planned).args[0]}")
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
    from uma.plan.forms import asked_format

    return asked_format(
        source,
        bits=chosen.bits,
        mode=chosen.mode,
        group_size=chosen.group_size,
        quant=chosen.quant,
    )


def planned_beside(
    chosen: "RunOptions", draft: "ModelSource | None", machine: "Machine", timed: bool = False
) -> "Beside":
    """The draft model, in the form that is fast here whatever room is left, and the adapter."""
    from uma.plan.inference import beside_of

    plan = None
    if draft is not None:
        plan = plan_of(of_draft(chosen), draft, machine, timed=timed).plan
    return beside_of(plan, chosen.adapter_path, chosen.num_draft_tokens)


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
    from uma.plan.forms import by_speed, forms_of
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
        from uma.runtime.backend import form_rates

        forms = by_speed(forms, architecture, source.config, form_rates)
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


def exceeded(planned: Planned) -> DoesNotFit:
    """The error that says what is missing, and what would fit."""
    from uma.report.plan import exceeds_text

    return DoesNotFit(exceeds_text(planned.plan, planned.source))


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
