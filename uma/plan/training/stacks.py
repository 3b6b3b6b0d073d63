"""What trains under torch: from here alone a training has the settings of the engine.

``PROGRAMS`` is what a program does of itself, ``Stack`` adds what its user chooses, and
``settings_for`` what follows from the workload: how it is sharded, and which model it is.
"""

from dataclasses import replace
from typing import Any

from uma.architecture.layers import Architecture
from uma.engines.eager import EAGER_BY_DEFAULT
from uma.engines.torch_model import Settings
from uma.memory.loss import TRANSFORMERS_46, Copies, sliced
from uma.plan.training.stack import Stack
from uma.quantization import FLOAT32
from uma.workload import StackName, TrainingWorkload

# trainer: transformers 5.24: AdamW in one kernel (training_args.py, default_optim), checkpoints
#   that are not reentrant (modeling_utils.py, _activation_checkpointing_enable); experts in two
#   stacks, on rows sorted by expert (get_correct_experts_implementation: grouped_mm); PEFT 0.21:
#   adapters in float32 (tuners/tuners_utils.py, _cast_adapter_dtype). Neither they nor TRL 1.10
#   (sft_trainer.py) call prepare_model_for_kbit_training: a script does, --prepare-kbit.
# trainer-2024: transformers 4.46 to 4.48: optim="adamw_torch", on CUDA torch's foreach form; the
#   loss of shifted logits; reentrant checkpoints (Trainer.train). TRL 0.8 to 0.12
#   (peft_module_casting_to_bf16) brings a prepared model's head back to 16 bits.
# torchtune: 0.6, recipes/configs/llama3_1: dtype bf16, fused AdamW, the loss in chunks
#   (modules/loss); adapters in the model's type (modules/peft/lora.py).
# litgpt: 0.5, finetune/lora.py: bf16-true, foreach AdamW; a head whose logits are in chunks; fit
#   binds loss and logits again after the next batch has run; Fabric's FSDPStrategy puts frozen
#   and trained parameters of a Block in one unit (use_orig_params).
# unsloth: since November 2024: its kernels for norms, adapters without dropout, and a loss without
#   logits (cut cross-entropy; unsloth_zoo, fused_losses: in slices); checkpoints that lie on the
#   host (use_gradient_checkpointing="unsloth"); adapters alone in float32
#   (unsloth_zoo/training_utils.py, prepare_model_for_training).
_UNPREPARED = Settings(prepare_kbit=False, inputs_need_gradients=False)
_ONE_KERNEL = replace(_UNPREPARED, foreach=False, reentrant=False)
_PURE: dict[str, Any] = {
    "autocast": False,
    "adapter_width": 2,
    "copies": Copies(chunks=8),
    "fsdp_hooks": False,
}
PROGRAMS: dict[StackName, Settings] = {
    "trainer": replace(_ONE_KERNEL, expert_modules=False, sorted_experts=True),
    "trainer-2024": replace(_UNPREPARED, casts_head_back=True, copies=TRANSFORMERS_46),
    "torchtune": replace(_ONE_KERNEL, **_PURE),
    "litgpt": replace(
        _UNPREPARED, reentrant=False, mixes_frozen=True, holds_last_graph=True, **_PURE
    ),
    "unsloth": Settings(
        prepare_kbit=False,
        offloads_inputs=True,
        fused_kernels=True,
        fused_adapters=True,
        foreach=False,
        fsdp_hooks=False,
    ),
}


def settings_for(stack: Stack, workload: TrainingWorkload, architecture: Architecture) -> Settings:
    """The engine's settings of ``workload`` under ``stack``.

    DeepSpeed casts every parameter to 16 bits, adapters too, and needs no autocast (0.19.8,
    ``runtime/engine.py``, ``_cast_module_mixed_precision``). What PEFT's
    ``prepare_model_for_kbit_training`` (0.21, ``utils/other.py``) makes float32, all that is not
    quantized, it undoes, and FSDP refuses: the flat arrays of its units have one type. FSDP makes
    float32 of trained 16-bit weights unless nothing is mixed (accelerate 1.15, ``accelerator.py``,
    ``prepare_model``; ``fsdp_utils.py``, ``fsdp2_prepare_model``). FSDP 1, which
    PEFT documents for adapters, is accelerate's default; Trainer's is FSDP 2 (transformers 5.24,
    ``training_args.py``, ``_process_fsdp_args``), with which all of a model is trained.
    """
    spread, program, full = workload.sharding, PROGRAMS[stack.name], workload.method == "full"
    mixed = stack.precision == "mixed"
    deepspeed = spread.zero_stage > 0 and not spread.fsdp
    pure = stack.precision == "pure" or deepspeed or (spread.fsdp and full)
    eager = stack.name != "unsloth" and architecture.model_type in EAGER_BY_DEFAULT
    prepares = program.prepare_kbit or stack.prepare_kbit
    adapter_width = FLOAT32 if mixed else program.adapter_width
    return replace(
        program,
        autocast=mixed or (program.autocast and not pure),
        prepare_kbit=prepares and not spread.zero_stage,
        # peft_model.py, PeftModel.__init__: for checkpointing alone, which the engine knows.
        inputs_need_gradients=program.inputs_need_gradients or prepares,
        weight_width=FLOAT32 if mixed else 0,
        adapter_width=workload.dtype_bytes if deepspeed else adapter_width,
        kernel="eager" if eager else program.kernel,
        dropout=stack.lora_dropout and not full,
        fused_kernels=program.fused_kernels or stack.fused_kernels is not None,
        fused_gates=stack.fused_kernels == "liger",
        fused_adapters=_fuses_adapters(stack) and workload.method != "dora",  # which is PEFT's
        copies=_copies(stack, architecture),
        deepspeed=deepspeed,
        fsdp_hooks=program.fsdp_hooks and spread.fsdp and not (full and stack.name == "trainer"),
        mixes_frozen=program.mixes_frozen and not full,
        optimizer_in_backward=stack.optimizer_in_backward,
        variable_lengths=stack.variable_lengths,
    )


def _fuses_adapters(stack: Stack) -> bool:
    own = PROGRAMS[stack.name].fused_adapters and not stack.lora_dropout
    return own or stack.fused_kernels == "unsloth"


def _copies(stack: Stack, architecture: Architecture) -> Copies:
    """The loss, which Unsloth and Liger compute in slices."""
    if stack.name == "unsloth" or stack.fused_kernels == "liger":
        return sliced(architecture)
    return PROGRAMS[stack.name].copies
