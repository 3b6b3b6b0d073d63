"""A model as it is trained with PyTorch: options of the stack, and what lies there for good.

Facts are of torch 2.4 to 2.13, transformers 4.45 to 5.24, peft 0.13 to 0.20, bitsandbytes 0.43 to
0.50.
"""

from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture, Parameter, parameters
from uma.engines import schemes
from uma.engines.torch_ops import FLOAT32, AttentionKernel
from uma.engines.transformers import CUBLAS_WORKSPACE, CUDA_CONTEXT
from uma.memory.adapters import adapters, trained_layers
from uma.memory.loss import TRANSFORMERS, Copies
from uma.memory.optimizer_states import States, torch_states
from uma.workload import TrainingWorkload

# Formats whose matrices are multiplied as a 16-bit copy; GPTQ's and AWQ's kernels read them packed.
COPIED = frozenset({"nf4", "nf4-double", "int8"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the stack that trains, with the defaults of Trainer and PEFT.

    ``prepare_kbit`` is PEFT's ``prepare_model_for_kbit_training``: everything that is not
    quantized in float32; ``casts_head_back`` is TRL's ``peft_module_casting_to_bf16``, which brings
    embeddings and head back to 16 bits and leaves the norms. ``weight_width`` is 4 where parameters
    are float32 and computed in 16 bits. ``adapter_width`` is 4 unless a stack makes adapters in 16
    bits (torchtune, litgpt). ``fused_kernels`` are Unsloth's for norms and rotary embeddings,
    ``fused_adapters`` those for adapters. ``foreach`` is torch's default variant of AdamW on CUDA.
    ``quantizes_experts`` holds before transformers 5. ``fsdp_hooks`` is FSDP 1, see
    ``StepSettings.keeps_inputs``. ``deepspeed`` keeps float32 copies, gradients in both widths and
    two buckets. ``offloads_inputs`` is Unsloth's checkpointing, ``modules_to_save`` are trained
    copies of embeddings and head, ``empties_cache`` a program that calls ``empty_cache``;
    ``whole_at_load`` one that makes the whole model on each device before it is sharded.
    """

    autocast: bool = True
    prepare_kbit: bool = True
    casts_head_back: bool = False
    weight_width: int = 0
    adapter_width: int = FLOAT32
    kernel: AttentionKernel = "flash"
    fused_kernels: bool = False
    fused_adapters: bool = False
    dropout: bool = False
    foreach: bool = True
    reentrant: bool = True
    copies: Copies = TRANSFORMERS
    repeats_kv: bool = False
    quantizes_experts: bool = True
    fsdp_hooks: bool = True
    optimizer_in_backward: bool = False
    selective: bool = False
    deepspeed: bool = False
    offloads_inputs: bool = False
    inputs_need_gradients: bool = True
    modules_to_save: bool = False
    whole_at_load: bool = False
    cublas_workspace_bytes: int = CUBLAS_WORKSPACE
    cuda_context_bytes: int = CUDA_CONTEXT
    empties_cache: bool = False


DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
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
    def mixes_precision(self) -> bool:
        """Float32 shards that are gathered and computed in 16 bits (FSDP's MixedPrecision)."""
        return self.workload.sharding.zero_stage == 3 and self.weight_width == FLOAT32

    @property
    def trains_all(self) -> bool:
        return self.workload.method == "full"


def weights_bytes(model: Model) -> int:
    """All parameters as they lie on the device."""
    architecture, workload = model.architecture, model.workload
    if not workload.quantized:
        return architecture.num_parameters * model.weight_width
    scheme = schemes.scheme_named(workload.quantized)
    scheme = replace(scheme, rest_bytes=model.weight_width)
    return schemes.weight_bytes(architecture, scheme, experts=model.settings.quantizes_experts)


def trained_parameters(model: Model) -> list[Parameter]:
    """The parameters that full fine-tuning trains."""
    if model.workload.num_layers is None:
        return list(parameters(model.architecture))
    return [
        p for layer in trained_layers(model.architecture, model.workload) for p in layer.parameters
    ]


def trained_elements(model: Model) -> int:
    """Elements of everything that gets a gradient."""
    if model.trains_all:
        return sum(p.size for p in trained_parameters(model))
    return sum(a.size for a in adapters(model.architecture, model.workload))


def optimizer_states(model: Model) -> States:
    """States of all trained arrays."""
    workload = model.workload
    total = States(0)
    if model.trains_all:
        for parameter in trained_parameters(model):
            total += torch_states(workload.optimizer, parameter.shape, model.weight_width)
        return total
    width = model.settings.adapter_width
    for adapter in adapters(model.architecture, workload):
        for shape in ((adapter.rank, adapter.columns), (adapter.rows, adapter.rank)):
            for _ in range(adapter.count):
                total += torch_states(workload.optimizer, shape, width)
        if adapter.magnitude:
            total += torch_states(workload.optimizer, (adapter.rows,), width)
    return total
