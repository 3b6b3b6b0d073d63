"""What a training asks of layers and of a step under PyTorch, as they are laid out."""

from dataclasses import replace
from math import ceil

from uma.engines.torch_deepspeed import first_gradient_terms
from uma.engines.torch_layers import Batch
from uma.engines.torch_model import COPIED, Model
from uma.engines.torch_ops import AttentionKernel, LayerSettings, Linear, Linears
from uma.engines.torch_roles import ALL, roles_of
from uma.engines.torch_step import StepPeaks, StepSettings, step_peaks
from uma.memory.adapters import is_target
from uma.memory.loss import Copies, sliced
from uma.quantization import FLOAT32

# Models with a bound for their logits, and for attention's scores (transformers 5.24,
# configuration_gemma2.py, configuration_gemma3n.py; the published configurations of Gemma 4).
CAPPED_LOGITS = frozenset({"gemma2", "gemma3n", "gemma4"})
CAPPED_SCORES = frozenset({"gemma2"})


def layer_settings(model: Model) -> LayerSettings:
    """How the layers run."""
    settings, workload = model.settings, model.workload
    copies = workload.quantized in COPIED
    compute = workload.dtype_bytes
    full = model.trains_all
    wide = model.weight_width > compute and not workload.quantized
    casts = wide and settings.autocast and not model.mixes_precision

    plain = Linear(
        trained=full or model.grades_frozen,
        temporary_width=compute if copies or workload.quantized == "fp8" else 0,
        clones=bool(workload.quantized),
        fused=settings.fused_adapters,
        saved_width=compute if casts else 0,
        keeps_input=copies and settings.keeps_quantized_inputs,
    )
    adapted = replace(plain, rank=workload.rank, dora=workload.method == "dora")
    return LayerSettings(
        linear=Linears(_roles(model), plain if full else adapted, plain),
        compute_width=compute,
        adapter_width=settings.adapter_width,
        autocast=settings.autocast,
        kernel=_kernel(model),
        fused_norms=settings.fused_kernels,
        fused_gates=settings.fused_gates,
        norms_trained=plain.trained,
        gradient_width=gradient_width(model),
        repeats_kv=settings.repeats_kv,
        query_norms=any(
            p.name.endswith("q_norm") for p in model.architecture.layers[-1].parameters
        ),
        dropout=settings.dropout,
        sorted_experts=settings.sorted_experts,
        adds_gradients=adds_gradients(model),
        expert_devices=settings.expert_devices or 1,
        caps_scores=model.architecture.model_type in CAPPED_SCORES,
        experts=None if settings.expert_modules else _experts(model, plain),
        tensor=model.workload.sharding.tensor,
    )


def _experts(model: Model, plain: Linear) -> Linears:
    """How stacked experts are held: adapted only if their names are given."""
    if model.leaves_experts:
        plain = replace(plain, temporary_width=0, clones=False, keeps_input=False)
    named = _roles(model) if model.workload.targets else frozenset()
    adapted = plain if model.trains_all else replace(plain, rank=model.workload.rank)
    return Linears(named, adapted, plain)


def adds_gradients(model: Model) -> bool:
    """Whether the device keeps whole gradients of the batches before; DeepSpeed's are its own."""
    settings, spread = model.settings, model.workload.sharding
    elsewhere = settings.deepspeed or settings.optimizer_in_backward
    return model.workload.grad_accumulation_steps > 1 and spread.pipeline == 1 and not elsewhere


def gradient_width(model: Model) -> int:
    if not model.trains_all:
        return model.settings.adapter_width
    return model.workload.dtype_bytes if model.mixes_precision else model.weight_width


def _roles(model: Model) -> frozenset[str]:
    """Roles of a layer whose matrices get an adapter."""
    targets = model.workload.targets
    if not targets:
        return frozenset(ALL)
    kinds = {id(kind): kind for kind in model.architecture.kinds}.values()
    named = (p for kind in kinds for p in kind.parameters if is_target(p, targets))
    return frozenset(role for parameter in named for role in roles_of(parameter))


def step_settings(model: Model) -> StepSettings:
    """How a step runs."""
    settings, workload = model.settings, model.workload
    full = model.trains_all
    spread = workload.sharding
    # FSDP without DeepSpeed keeps whole gradients between batches (torch, FSDP.no_sync), on the
    # device (torch 2.13, fsdp/_runtime_utils.py, _post_backward_hook: nothing is reduced).
    whole = workload.grad_accumulation_steps > 1 and not settings.deepspeed
    sharded = spread.zero_stage >= 2 and not whole
    # DeepSpeed has a buffer for them, which is counted apart; offloaded ones leave the device.
    moved = settings.deepspeed or (bool(spread.offload_optimizer) and not whole)
    elsewhere = spread.zero_stage >= 2 and moved
    ends = full and workload.num_layers is None
    return StepSettings(
        stream_width=_stream_width(model),
        head_width=model.weight_width if _is_float32_head(model) else workload.dtype_bytes,
        checkpoint_every=workload.grad_checkpoint,
        reentrant=settings.reentrant,
        inputs_need_gradients=settings.inputs_need_gradients
        or ends
        or (not full and bool(workload.grad_checkpoint)),
        frozen_layers=_frozen_layers(model),
        keeps_inputs=settings.fsdp_hooks and spread.zero_stage == 3 and not full,
        head_trained=ends,
        embedding_trained=ends and spread.pipeline == 1,  # a stage has one of both
        gradient_shards=(spread.shards if sharded else 1) * _under_way(model),
        drops_gradients=settings.optimizer_in_backward or elsewhere,
        first_gradient_bytes=sum(term.size_bytes for term in first_gradient_terms(model)),
        selective=settings.selective,
        offloads_inputs=settings.offloads_inputs,
        holds_last_graph=settings.holds_last_graph,
        copies=replace(_copies(model), caps=model.architecture.model_type in CAPPED_LOGITS),
    )


def _frozen_layers(model: Model) -> int:
    """Layers before those that are trained; of a pipeline all are taken to be."""
    trained = model.workload.num_layers
    if trained is None or model.workload.sharding.pipeline > 1:
        return 0
    return len(model.architecture.layers) - trained


def _copies(model: Model) -> Copies:
    """The loss: the program's own, one kernel that writes over the logits, or slices of tokens."""
    asked = model.workload.loss
    if asked == "fused":
        return replace(model.settings.copies, in_place=True, slices=1)
    if asked == "sliced":
        return sliced(model.architecture)
    return model.settings.copies


def _kernel(model: Model) -> AttentionKernel:
    asked = model.workload.attention
    if asked is None:
        return model.settings.kernel
    return "flash" if asked == "fused" else "eager"


def _stream_width(model: Model) -> int:
    """The residual stream: that of the embeddings."""
    if model.prepares_kbit:
        return FLOAT32
    return model.workload.dtype_bytes if model.mixes_precision else model.weight_width


def _is_float32_head(model: Model) -> bool:
    """A float32 head computes in float32, unless autocast narrows it."""
    return model.weight_width == FLOAT32 and not (model.settings.autocast or model.mixes_precision)


def step(model: Model) -> StepPeaks:
    """The step of one micro-batch."""
    architecture, stages = model.architecture, model.workload.sharding.pipeline
    alive = ceil(len(architecture.layers) * _under_way(model) / stages)
    asked = (batch_of(model), layer_settings(model), step_settings(model))
    return step_peaks(architecture, *asked, alive)


def _under_way(model: Model) -> int:
    """Micro-batches whose activations the first stage of a pipeline keeps.

    As many as there are stages (1F1B; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1), if
    there are as many: they are laid out as layers, whose gradients are those of one stage.
    """
    workload = model.workload
    return min(workload.sharding.pipeline, workload.grad_accumulation_steps)


def batch_of(model: Model) -> Batch:
    workload, spread = model.workload, model.workload.sharding
    parts = spread.tensor * spread.sequence
    return Batch(workload.batch_size, ceil(workload.max_seq_length / parts), parts)
