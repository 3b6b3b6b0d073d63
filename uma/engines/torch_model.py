"""A model as it is trained with PyTorch: options of the stack, and what lies there for good.

Facts are of torch 2.4 to 2.13, transformers 4.45 to 5.24, peft 0.13 to 0.20, bitsandbytes 0.43 to
0.50.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil, prod

from uma.architecture.layers import Architecture, Layer, Parameter
from uma.engines import schemes
from uma.engines.torch_ops import AttentionKernel
from uma.frozen import dataclass
from uma.memory.adapters import Adapter, adapter_elements, layer_adapters, trained_layers
from uma.memory.loss import TRANSFORMERS, Copies
from uma.memory.optimizer_states import States, torch_states
from uma.quantization import FLOAT32
from uma.workload import TrainingWorkload

# Formats whose matrices are multiplied as a 16-bit copy; GPTQ's and AWQ's kernels read them packed,
# and FP8's do so forward (transformers 5.24, integrations/finegrained_fp8.py, FP8LinearFunction).
COPIED = frozenset({"nf4", "nf4-double", "int8"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the stack that trains; ``uma.plan.training.stacks`` says those of each program.

    ``prepare_kbit`` is PEFT's ``prepare_model_for_kbit_training``: everything that is not
    quantized in float32; ``casts_head_back`` is TRL's ``peft_module_casting_to_bf16``, which brings
    embeddings and head back to 16 bits and leaves the norms. ``weight_width`` is 4 where parameters
    are float32 and computed in 16 bits. ``adapter_width`` is 4 unless a stack makes adapters in 16
    bits (torchtune, litgpt). ``fused_kernels`` are those for norms and rotary embeddings,
    ``fused_gates`` Liger's for gated layers, ``fused_adapters`` Unsloth's for adapters.
    ``foreach`` is torch's default variant of AdamW on CUDA.
    ``expert_modules`` are experts of a layer each, as before transformers 5: bitsandbytes and
    PEFT's ``all-linear`` leave out stacked ones (transformers, ``integrations/bitsandbytes.py``,
    ``replace_with_bnb_linear``; peft 0.21, ``tuners/tuners_utils.py``,
    ``_maybe_include_all_linear_layers``). ``sorted_experts`` is ``LayerSettings.sorted_experts``.
    ``fsdp_hooks`` is FSDP 1, see ``StepSettings.keeps_inputs``; ``mixes_frozen`` is that with
    frozen and trained parameters in one unit, where all of them get gradients (torch 2.4,
    ``distributed/fsdp/wrap.py``, ``_validate_frozen_params``). ``deepspeed`` is
    ``torch_deepspeed``'s copies and buffers. ``offloads_inputs`` is Unsloth's checkpointing,
    ``holds_last_graph`` is ``StepSettings.holds_last_graph``. ``variable_lengths`` are batches of
    ever other sizes, whose blocks torch's allocator cannot use again.

    No option asks for the others, from ``repeats_kv`` on: they are of old versions and of single
    programs that were measured (``scripts/scoring``). ``keeps_quantized_inputs`` is
    ``Linear.keeps_input``, ``modules_to_save`` are trained copies of embeddings and head,
    ``empties_cache`` a program that calls ``empty_cache``, ``whole_at_load`` one that makes the
    whole model on each device before it is sharded. ``expert_devices`` have a part of the experts
    each that FSDP leaves alone. ``splits_root`` makes units of embeddings and head.
    ``quantizes_whole`` is torchao 0.1: ``quantizing_bytes``.
    """

    autocast: bool = True
    prepare_kbit: bool = True
    casts_head_back: bool = False
    weight_width: int = 0
    adapter_width: int = FLOAT32
    kernel: AttentionKernel = "flash"
    fused_kernels: bool = False
    fused_gates: bool = False
    fused_adapters: bool = False
    dropout: bool = False
    foreach: bool = True
    reentrant: bool = True
    copies: Copies = TRANSFORMERS
    expert_modules: bool = True
    sorted_experts: bool = False
    fsdp_hooks: bool = True
    mixes_frozen: bool = False
    deepspeed: bool = False
    offloads_inputs: bool = False
    inputs_need_gradients: bool = True
    optimizer_in_backward: bool = False
    holds_last_graph: bool = False
    variable_lengths: bool = False

    repeats_kv: bool = False
    keeps_quantized_inputs: bool = False
    selective: bool = False
    modules_to_save: bool = False
    empties_cache: bool = False
    whole_at_load: bool = False
    expert_devices: int = 0
    splits_root: bool = False
    quantizes_whole: bool = False


DEFAULTS = Settings()


@dataclass(frozen=True)
class Model:
    """A model as it is trained: what its parameters take, and which are trained."""

    architecture: Architecture
    workload: TrainingWorkload
    settings: Settings

    @property
    def weight_width(self) -> int:
        """Bytes of a parameter that is not quantized."""
        if self.workload.quantized:
            wide = self.prepares_kbit and not self.settings.casts_head_back
            return FLOAT32 if wide else 2
        return self.settings.weight_width or self.workload.dtype_bytes

    @property
    def prepares_kbit(self) -> bool:
        return self.settings.prepare_kbit and self.workload.quantized in COPIED

    @property
    def leaves_experts(self) -> bool:
        """Whether stacked experts are in 16 bits beside bitsandbytes' matrices."""
        return self.workload.quantized in COPIED and not self.settings.expert_modules

    @property
    def mixes_precision(self) -> bool:
        """Float32 shards that are gathered and computed in 16 bits (FSDP's MixedPrecision)."""
        return self.workload.sharding.zero_stage == 3 and self.weight_width == FLOAT32

    @property
    def trains_all(self) -> bool:
        return self.workload.method == "full"

    @property
    def trained_width(self) -> int:
        """Bytes of a trained weight."""
        return self.weight_width if self.trains_all else self.settings.adapter_width

    @property
    def grades_frozen(self) -> bool:
        """Whether frozen parameters of the layers get gradients too."""
        return self.settings.mixes_frozen and self.workload.sharding.zero_stage == 3

    def part(self, size: int, shards: int) -> int:
        """What one device has of all parameters' ``size``, spread over ``shards``."""
        spread, devices = self.workload.sharding, self.settings.expert_devices
        split = spread.tensor * spread.pipeline
        if not devices:
            return ceil(size / shards / split)
        experts = size * expert_elements(self.architecture) // self.architecture.num_parameters
        return ceil(((size - experts) / shards + experts / devices) / split)

    def staged(self, size: int, *, weights: bool = False) -> int:
        """``size`` of what is trained, or of all weights, as if all stages had as much as one end.

        Stages of a pipeline have as many layers each, the first one the embeddings too, and the
        last one the head, or the same embeddings (Megatron, arXiv:2104.04473, section 2.2).
        """
        stages, architecture = self.workload.sharding.pipeline, self.architecture
        if stages == 1:
            return size
        ends = sum(p.size for p in architecture.parameters)
        if weights:
            ends *= self.weight_width
        elif self.trains_all and self.workload.num_layers is None:
            ends = size * ends // architecture.num_parameters
        else:
            ends = 0
        layers = len(architecture.layers)
        inside = (size - ends) * ceil(layers / stages) / layers
        return stages * ceil(inside + ends / (1 if architecture.tie_word_embeddings else 2))

    @cached_property
    def shapes(self) -> Counter[tuple[int, ...]]:
        """How many arrays of each shape are trained.

        Raises:
            UsageError: If the targets name none.
        """
        found: Counter[tuple[int, ...]] = Counter()
        for shape, count in _shapes(self):
            found[shape] += count
        if not found:
            adapter_elements(self.architecture, self.workload)  # says which names there are
        return found


def expert_elements(architecture: Architecture) -> int:
    """Elements of all stacks of experts."""
    return sum(
        count * p.size
        for some, count in architecture.counted_parameters
        for p in some
        if p.kind == "matrix" and len(p.shape) == 3
    )


def weights_bytes(model: Model) -> int:
    """All parameters as they lie on the device."""
    architecture, workload = model.architecture, model.workload
    if not workload.quantized:
        return architecture.num_parameters * model.weight_width
    scheme = schemes.scheme_named(workload.quantized)
    scheme = replace(scheme, rest_bytes=model.weight_width)
    return schemes.weight_bytes(architecture, scheme, experts=not model.leaves_experts)


def _shapes(model: Model) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shapes of all that is trained, each with the number of its arrays."""
    architecture, workload = model.architecture, model.workload
    whole = workload.num_layers is None
    if model.trains_all and whole:
        yield from ((p.shape, 1) for p in architecture.parameters)
    layers = trained_layers(architecture, workload)
    own = list(zip(architecture.kinds, architecture.alike, architecture.layers, strict=True))
    counts = Counter((id(kind), id(alike)) for kind, alike, _ in own[-len(layers) :])
    first = {(id(kind), id(alike)): layer for kind, alike, layer in reversed(own)}
    for key, count in counts.items():
        for shape, number in _layer_shapes(first[key], model):
            yield shape, number * count


def _layer_shapes(layer: Layer, model: Model) -> Iterator[tuple[tuple[int, ...], int]]:
    if model.trains_all:
        yield from ((p.shape, 1) for p in layer.parameters)
    for adapter in adapters_of(layer, model):
        yield (adapter.rank, adapter.columns), adapter.count
        yield (adapter.rows, adapter.rank), adapter.count
        if adapter.magnitude:
            yield (adapter.rows,), 1


def adapters_of(layer: Layer, model: Model) -> Iterator[Adapter]:
    """Those of one layer: of stacked experts only where their names are given."""
    if not (model.settings.expert_modules or model.workload.targets):
        layer = replace(layer, parameters=tuple(_linears(layer)))
    return layer_adapters(layer, model.workload)


def _linears(layer: Layer) -> Iterator[Parameter]:
    """The weights of linear layers: without stacked experts, and routers, which are bare ones."""
    for parameter in layer.parameters:
        matrix = schemes.matrix_of(parameter, layer)
        if matrix is not None and matrix.part == "linear":
            yield parameter


def trained_elements(model: Model) -> int:
    """Elements of everything that is trained."""
    return sum(prod(shape) * count for shape, count in model.shapes.items())


def graded_elements(model: Model) -> int:
    """Elements that have a gradient after the backward pass."""
    if not model.grades_frozen:
        return trained_elements(model)
    architecture = model.architecture
    outside = sum(p.size for p in architecture.parameters)
    return trained_elements(model) + architecture.num_parameters - outside


def _optimizer_of(shape: tuple[int, ...], model: Model) -> str:
    """Muon takes hidden matrices alone, AdamW the rest (torch 2.13, ``optim/_muon.py``)."""
    optimizer = model.workload.optimizer
    hidden = len(shape) == 2 and shape[0] != model.architecture.vocab_size
    return "adamw" if optimizer == "muon" and not hidden else optimizer


def optimizer_states(model: Model) -> States:
    """States of all trained arrays.

    DeepSpeed's optimizer has flat float32 copies instead, which Adafactor cannot factor
    (0.19.8, ``stage_1_and_2.py``, ``single_partition_of_fp32_groups``; ``stage3.py``,
    ``fp32_partitioned_groups_flat``).
    """
    if model.settings.deepspeed:
        return torch_states(model.workload.optimizer, (trained_elements(model),), FLOAT32)
    total = States(0)
    for shape, count in model.shapes.items():
        one = torch_states(_optimizer_of(shape, model), shape, model.trained_width)
        total += States(one.device_bytes * count, one.paged_bytes * count)
    return total
