"""The memory of training with PyTorch: transformers' Trainer, PEFT and bitsandbytes, and others.

What one device holds, by phase. ``Settings`` are the options of the stack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod

from uma.architecture.layers import Architecture
from uma.engines import schemes
from uma.engines.cuda import CUBLAS_WORKSPACE, CUDA_CONTEXT
from uma.engines.torch_asked import (
    adds_gradients,
    batch_of,
    gradient_width,
    layer_settings,
    step,
    step_settings,
)
from uma.engines.torch_deepspeed import deepspeed_terms, first_gradient_terms
from uma.engines.torch_model import (
    DEFAULTS,
    Model,
    Settings,
    graded_elements,
    optimizer_states,
    trained_elements,
    weights_bytes,
)
from uma.engines.torch_step import validation_bytes
from uma.ledger import phase_totals
from uma.memory.optimizer_states import adafactor_temporary_bytes, step_temporary_bytes
from uma.memory.term import MemoryTerm
from uma.quantization import FLOAT32
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


def _later_terms(model: Model) -> list[MemoryTerm]:
    """Validation on a batch of the same size, and saving, which copies from the device."""
    plain = replace(step_settings(model), checkpoint_every=0)  # without gradients none is made
    size = validation_bytes(model.architecture, batch_of(model), layer_settings(model), plain)
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
    found, terms = step(model), _state_terms(model)
    gathered = _gathered_bytes(model)
    if gathered:
        terms += _both_ways(MemoryTerm("weights", gathered, "bound", "units gathered at once"))
    source = "values that autograd and the modelling files keep"
    logits = min(found.logits_bytes, found.forward_bytes)
    rest = found.forward_bytes - logits
    terms.append(MemoryTerm("activations", rest, "bound", source, "forward"))
    terms.append(MemoryTerm("logits", logits, "bound", "copies of the loss", "forward"))
    made = [] if found.loss_binds else first_gradient_terms(model)
    terms += [*made, _graded_term(model, found.graded_bytes)]
    rest = found.backward_bytes - found.graded_bytes - sum(term.size_bytes for term in made)
    terms.append(MemoryTerm("activations", rest, "bound", source, "backward"))
    if adds_gradients(model):
        held = model.part(graded_elements(model) * gradient_width(model), 1)
        terms += _both_ways(MemoryTerm("gradients", held, "exact", "the sum of earlier batches"))
    terms += _optimizer_terms(model)
    terms += _later_terms(model)
    terms += _load_terms(model)
    return (*terms, *_device_terms(workload, settings, terms))


def _both_ways(term: MemoryTerm) -> list[MemoryTerm]:
    """What is there while layers run, forward and backward."""
    return [replace(term, phase="forward"), replace(term, phase="backward")]


def _graded_term(model: Model, graded_bytes: int) -> MemoryTerm:
    """Gradients that are there when the backward pass needs most: all of them, or the first."""
    if graded_bytes == _gradient_bytes(model, gradient_width(model)):
        return MemoryTerm("gradients", graded_bytes, "exact", EACH_GRADIENT, "backward")
    source = "those that are there at the peak"
    return MemoryTerm("gradients", graded_bytes, "bound", source, "backward")


def _load_terms(model: Model) -> Iterator[MemoryTerm]:
    """What programs make at loading beside what stays."""
    settings, workload = model.settings, model.workload
    if settings.whole_at_load and workload.sharding.zero_stage == 3:
        whole = weights_bytes(model)
        yield MemoryTerm("weights", whole, "exact", "the model before sharding", "load")
    if settings.quantizes_whole and workload.quantized:
        source = "a matrix beside all levels of nf4"
        yield MemoryTerm(
            "activations", quantizing_bytes(model.architecture), "bound", source, "load"
        )


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
        source = "vLLM's logs of non-torch memory"
        found.append(MemoryTerm("runtime_context", CUDA_CONTEXT, "fitted", source))
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
    terms.append(MemoryTerm("other", CUBLAS_WORKSPACE, "exact", "cuBLAS workspace"))
    return terms


def _bucket_term(model: Model) -> MemoryTerm:
    """The buckets that gradients are copied to before they are sent, all of them.

    torch 2.13, ``nn/parallel/distributed.py``: ``gradient_as_bucket_view=False``.
    """
    size = model.part(model.staged(trained_elements(model) * gradient_width(model)), 1)
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
    width = model.trained_width
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
