"""The memory of training with PyTorch: transformers' Trainer, PEFT and bitsandbytes, and others.

What one device holds, by phase. ``Settings`` are the options of the stack.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod

from uma.architecture.layers import Architecture, Parameter
from uma.engines import schemes
from uma.engines.torch_deepspeed import deepspeed_terms
from uma.engines.torch_layers import Batch
from uma.engines.torch_model import (
    COPIED,
    DEFAULTS,
    Model,
    Settings,
    graded_elements,
    optimizer_states,
    trained_elements,
    weights_bytes,
)
from uma.engines.torch_ops import FLOAT32, AttentionKernel, LayerSettings, Linear, Linears
from uma.engines.torch_step import StepPeaks, StepSettings, step_peaks, validation_bytes
from uma.ledger import phase_totals
from uma.memory.adapters import is_target
from uma.memory.loss import Copies
from uma.memory.optimizer_states import adafactor_temporary_bytes, step_temporary_bytes
from uma.memory.term import MemoryTerm
from uma.workload import TrainingWorkload

# What torch's allocator holds of freed blocks: a share of all that is not there from the start, and
# of the logits, whose blocks fit nothing else. Runs bound by the update have a pool too: what their
# backward pass freed. Fitted by scripts/fit_training.py.
SLACK = 0.24
LOGITS_SLACK = 0.31
VARIABLE_SLACK = 2.38  # of the logits, where batches differ in length
FSDP_SLACK = 0.93  # of all that is not there from the start, full training under FSDP 1

HALF, NF4_LEVELS = 2, 16
EACH_GRADIENT = "one for each element that has one"

# Names of the same matrices in other families, by the roles that a layer is laid out in.
ROLES = {
    "q_proj": ("q_proj", "qkv_proj", "c_attn", "query_key_value", "query", "wq", "q_a_proj"),
    "k_proj": ("k_proj", "qkv_proj", "c_attn", "query_key_value", "key", "wk"),
    "v_proj": ("v_proj", "qkv_proj", "c_attn", "query_key_value", "value", "wv"),
    "o_proj": ("o_proj", "c_proj", "dense", "projection", "wo", "out_proj"),
    "gate_proj": ("gate_proj", "gate_up_proj", "w1", "mlp"),
    "up_proj": ("up_proj", "gate_up_proj", "w2", "c_fc", "mlp"),
    "down_proj": ("down_proj", "c_proj", "w3", "mlp"),
}
# Models with a bound for their logits, and for attention's scores (transformers 5.24,
# configuration_gemma2.py, configuration_gemma3n.py; the published configurations of Gemma 4).
CAPPED_LOGITS = frozenset({"gemma2", "gemma3n", "gemma4"})
CAPPED_SCORES = frozenset({"gemma2"})

OTHER_ROLES = frozenset({"kv_a_proj_with_mqa", "kv_b_proj", "in_proj", "in_proj_z"})


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
        norms_trained=plain.trained,
        gradient_width=_gradient_width(model),
        repeats_kv=settings.repeats_kv,
        query_norms=any(
            p.name.endswith("q_norm") for p in model.architecture.layers[-1].parameters
        ),
        dropout=settings.dropout,
        sorted_experts=settings.sorted_experts,
        adds_gradients=_adds_gradients(model),
        expert_devices=settings.expert_devices or 1,
        caps_scores=model.architecture.model_type in CAPPED_SCORES,
        experts=None if settings.expert_modules else _experts(model, plain),
    )


def _experts(model: Model, plain: Linear) -> Linears:
    """How stacked experts are held: adapted only if their names are given."""
    if model.leaves_experts:
        plain = replace(plain, temporary_width=0, clones=False, keeps_input=False)
    named = _roles(model) if model.workload.targets else frozenset()
    adapted = plain if model.trains_all else replace(plain, rank=model.workload.rank)
    return Linears(named, adapted, plain)


def _adds_gradients(model: Model) -> bool:
    """Whether the device keeps whole gradients of the batches before; DeepSpeed's are its own."""
    settings, spread = model.settings, model.workload.sharding
    elsewhere = settings.deepspeed or settings.optimizer_in_backward or spread.offload_optimizer
    return model.workload.grad_accumulation_steps > 1 and spread.pipeline == 1 and not elsewhere


def _gradient_width(model: Model) -> int:
    if not model.trains_all:
        return model.settings.adapter_width
    return model.workload.dtype_bytes if model.mixes_precision else model.weight_width


def _roles(model: Model) -> frozenset[str]:
    """Roles of a layer whose matrices get an adapter."""
    targets = model.workload.targets
    if not targets:
        return frozenset(ROLES) | OTHER_ROLES
    return frozenset(
        role
        for role, names in [*ROLES.items(), *((name, (name,)) for name in OTHER_ROLES)]
        if any(is_target(Parameter(name, (1, 1), "matrix"), targets) for name in names)
    )


def step_settings(model: Model) -> StepSettings:
    """How a step runs."""
    settings, workload = model.settings, model.workload
    full = model.trains_all
    spread = workload.sharding
    # FSDP without DeepSpeed keeps whole gradients between batches (torch, FSDP.no_sync).
    whole = workload.grad_accumulation_steps > 1 and not settings.deepspeed
    sharded = spread.zero_stage >= 2 and not whole
    # DeepSpeed has a buffer for them, which is counted apart; offloaded ones leave the device.
    elsewhere = spread.zero_stage >= 2 and (settings.deepspeed or bool(spread.offload_optimizer))
    return StepSettings(
        stream_width=_stream_width(model),
        head_width=model.weight_width if _is_float32_head(model) else workload.dtype_bytes,
        checkpoint_every=workload.grad_checkpoint,
        reentrant=settings.reentrant,
        inputs_need_gradients=not full
        and (settings.inputs_need_gradients or bool(workload.grad_checkpoint)),
        frozen_layers=_frozen_layers(model),
        keeps_inputs=settings.fsdp_hooks and spread.zero_stage == 3 and not full,
        head_trained=full and workload.num_layers is None,
        embedding_trained=full and workload.num_layers is None,
        gradient_shards=(spread.shards if sharded else 1) * spread.tensor * _under_way(model),
        drops_gradients=settings.optimizer_in_backward or elsewhere,
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
    asked, architecture = model.workload.loss, model.architecture
    if asked == "fused":
        return replace(model.settings.copies, in_place=True)
    if asked == "sliced":
        return Copies(slices=ceil(architecture.vocab_size / architecture.hidden_size))
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
    asked = (_batch(model), layer_settings(model), step_settings(model))
    return step_peaks(architecture, *asked, alive)


def _under_way(model: Model) -> int:
    """Micro-batches whose activations the first stage of a pipeline keeps.

    As many as there are stages (1F1B; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1), if
    there are as many: they are laid out as layers, whose gradients are those of one stage.
    """
    workload = model.workload
    return min(workload.sharding.pipeline, workload.grad_accumulation_steps)


def _batch(model: Model) -> Batch:
    workload, spread = model.workload, model.workload.sharding
    parts = spread.tensor * spread.sequence
    return Batch(workload.batch_size, ceil(workload.max_seq_length / parts), parts)


def _later_terms(model: Model) -> list[MemoryTerm]:
    """Validation on a batch of the same size, and saving, which copies from the device."""
    plain = replace(step_settings(model), checkpoint_every=0)  # without gradients none is made
    size = validation_bytes(model.architecture, _batch(model), layer_settings(model), plain)
    return [
        MemoryTerm("activations", size, "bound", "one batch without gradients", "validation"),
        MemoryTerm("other", 0, "exact", "tensors are copied to the host", "save"),
    ]


def training_terms(
    architecture: Architecture, workload: TrainingWorkload, settings: Settings = DEFAULTS
) -> tuple[MemoryTerm, ...]:
    """Every term of one step on one device, by phase.

    Without ``runtime_context`` and ``buffer_pool`` they are what torch counts as allocated.
    """
    model = Model(architecture, workload, settings)
    spread, found = workload.sharding, step(model)
    terms = [*_state_terms(model)]
    gathered = _gathered_bytes(model)
    if gathered:
        terms.append(MemoryTerm("weights", gathered, "bound", "units gathered at once", "forward"))
        terms.append(MemoryTerm("weights", gathered, "bound", "units gathered at once", "backward"))
    source = "values that autograd and the modelling files keep"
    logits = min(found.logits_bytes, found.forward_bytes)
    rest = found.forward_bytes - logits
    terms.append(MemoryTerm("activations", rest, "bound", source, "forward"))
    terms.append(MemoryTerm("logits", logits, "bound", "copies of the loss", "forward"))
    held = _gradient_bytes(model, _gradient_width(model))
    gradients = min(held, found.backward_bytes) if found.gradient_bytes else 0  # dropped, or summed
    rest = found.backward_bytes - gradients
    terms.append(MemoryTerm("gradients", gradients, "exact", EACH_GRADIENT, "backward"))
    terms.append(MemoryTerm("activations", rest, "bound", source, "backward"))
    if _adds_gradients(model):
        held = model.part(graded_elements(model) * _gradient_width(model), 1)
        source = "the sum of earlier batches"
        terms.append(MemoryTerm("gradients", held, "exact", source, "forward"))
        terms.append(MemoryTerm("gradients", held, "exact", source, "backward"))
    terms += _optimizer_terms(model)
    terms += _later_terms(model)
    if settings.whole_at_load and spread.zero_stage == 3:
        whole = weights_bytes(model)
        terms.append(MemoryTerm("weights", whole, "exact", "the model before sharding", "load"))
    if settings.quantizes_whole and workload.quantized:
        source = "a matrix beside all levels of nf4"
        size = quantizing_bytes(architecture)
        terms.append(MemoryTerm("activations", size, "bound", source, "load"))
    return (*terms, *_device_terms(workload, settings, terms))


def quantizing_bytes(architecture: Architecture) -> int:
    """What torchao 0.1 makes of the largest matrix while it quantizes it.

    ``dtypes/nf4tensor.py``, ``quantize_tensor_nearest``: the differences of each number to all
    levels, and their absolutes; beside them the matrix and its scaled copy. Since 0.2 in chunks.
    """
    largest = max(
        p.size for layer in architecture.layers for p in layer.parameters if p.kind == "matrix"
    )
    return largest * HALF * (2 * NF4_LEVELS + 2)


def _device_terms(
    workload: TrainingWorkload, settings: Settings, terms: Sequence[MemoryTerm]
) -> list[MemoryTerm]:
    """What the allocator holds beyond what is allocated, and what the device counts beside it."""
    if workload.mem_kind == "allocated":
        return []
    slack = 0 if settings.empties_cache else _slack_bytes(workload, settings, terms)
    found = [MemoryTerm("buffer_pool", slack, "fitted", "scripts/fit_training.py")]
    if workload.mem_kind == "device":
        context = settings.cuda_context_bytes
        source = "vLLM's logs of non-torch memory"
        found.append(MemoryTerm("runtime_context", context, "fitted", source))
    return found


def _slack_bytes(
    workload: TrainingWorkload, settings: Settings, terms: Sequence[MemoryTerm]
) -> int:
    """Freed blocks that the allocator holds at the peak.

    An update that needs more than the backward pass fills blocks of the logits.
    """
    held = sum(t.size_bytes for t in terms if t.phase == "always")
    totals = phase_totals(terms)
    above = max(totals.values()) - held
    update = totals.get("optimizer", 0)
    filled = max(0, update - max(totals["forward"], totals["backward"]))
    logits = sum(t.size_bytes for t in terms if t.name == "logits")
    fsdp = settings.fsdp_hooks and workload.sharding.zero_stage == 3 and not settings.deepspeed
    if fsdp and workload.method == "full":
        return round(FSDP_SLACK * above)
    share = VARIABLE_SLACK if settings.variable_lengths else LOGITS_SLACK
    return round(SLACK * above + max(0, share * logits - filled))


def _state_terms(model: Model) -> list[MemoryTerm]:
    workload, settings = model.workload, model.settings
    spread = workload.sharding
    parameter_shards = spread.shards if spread.zero_stage == 3 else 1
    state_shards = spread.shards if spread.zero_stage else 1
    split = spread.tensor * spread.pipeline
    terms = []
    if not spread.offload_parameters:
        weights = model.part(model.staged(weights_bytes(model), weights=True), parameter_shards)
        dtype = "float32" if model.weight_width == FLOAT32 else workload.dtype
        source = f"shapes x {workload.quantized or dtype}"
        terms.append(MemoryTerm("weights", weights, "exact", source))
        for tower in schemes.tower_terms(model.architecture, workload.dtype_bytes):
            size = model.part(tower.size_bytes, parameter_shards)
            terms.append(replace(tower, size_bytes=size))
    if not model.trains_all and not spread.offload_parameters:
        size = model.staged(trained_elements(model) * settings.adapter_width)
        terms.append(
            MemoryTerm("adapters", ceil(size / parameter_shards / split), "exact", "peft, shapes")
        )
    if not spread.offload_optimizer:
        states = model.part(model.staged(optimizer_states(model).device_bytes), state_shards)
        source = f"{workload.optimizer}, by shape"
        terms.append(MemoryTerm("optimizer_states", states, "exact", source))
    if settings.deepspeed:
        terms += deepspeed_terms(model)
    elif spread.data > 1 and not spread.zero_stage:
        terms.append(_bucket_term(model))
    if settings.modules_to_save:
        terms.append(_saved_modules_term(model))
    terms.append(MemoryTerm("other", settings.cublas_workspace_bytes, "exact", "cuBLAS workspace"))
    return terms


def _bucket_term(model: Model) -> MemoryTerm:
    """The buckets that gradients are copied to before they are sent, all of them.

    torch 2.13, ``nn/parallel/distributed.py``: ``gradient_as_bucket_view=False``.
    """
    size = model.part(model.staged(trained_elements(model) * _gradient_width(model)), 1)
    return MemoryTerm("other", size, "exact", "buckets of data parallelism")


def _saved_modules_term(model: Model) -> MemoryTerm:
    """Trained copies of embeddings and head, their gradients and states (``modules_to_save``)."""
    architecture = model.architecture
    elements = sum(p.size for p in architecture.parameters if len(p.shape) == 2)
    if architecture.tie_word_embeddings:
        elements *= 2  # a copy of each
    size = 4 * elements * model.workload.dtype_bytes
    return MemoryTerm("adapters", size, "exact", "peft, modules_to_save, with states")


def _gathered_bytes(model: Model) -> int:
    """FSDP's root unit, which stays whole, or the largest part of it, and one layer."""
    spread, architecture = model.workload.sharding, model.architecture
    if spread.zero_stage != 3:
        return 0
    width, experts = model.workload.dtype_bytes, not model.settings.expert_devices
    outside, *sizes = (
        sum(p.size for p in some if experts or len(p.shape) < 3)
        for some, _ in architecture.counted_parameters
    )
    if spread.pipeline > 1:  # a stage stays whole between its micro-batches, its gradients too
        inside = architecture.num_parameters - outside
        return ceil(inside * (width + FLOAT32) / spread.tensor / spread.pipeline)
    if model.settings.splits_root:
        outside = max(p.size for p in architecture.parameters)
    scheme = schemes.scheme_named(model.workload.quantized or "bf16")
    layer = max(sizes) * (scheme.bits if model.workload.quantized else 8 * width) // 8
    return ceil((outside * width + layer) / spread.tensor)


def _gradient_bytes(model: Model, width: int) -> int:
    """What one device has of all gradients once the backward pass is over."""
    spread = model.workload.sharding
    held = model.staged(graded_elements(model) * width)
    return model.part(held, spread.shards if spread.zero_stage >= 2 else 1)


def _optimizer_terms(model: Model) -> list[MemoryTerm]:
    spread, settings = model.workload.sharding, model.settings
    if spread.offload_optimizer or settings.optimizer_in_backward or settings.deepspeed:
        return []
    width = model.weight_width if model.trains_all else settings.adapter_width
    optimizer, shards = model.workload.optimizer, spread.shards if spread.zero_stage else 1
    if optimizer == "adafactor":
        largest = adafactor_temporary_bytes(max(map(prod, model.shapes)), width)
        temporary = ceil(largest / shards / spread.tensor)
    else:
        foreach = settings.foreach and optimizer in ("adam", "adamw")
        temporary = step_temporary_bytes(trained_elements(model), width, foreach=foreach)
        temporary = model.part(model.staged(temporary), shards)
    held = _gradient_bytes(model, width)
    return [
        MemoryTerm("gradients", held, "exact", EACH_GRADIENT, "optimizer"),
        MemoryTerm("other", temporary, "bound", f"the update of {optimizer}", "optimizer"),
    ]
