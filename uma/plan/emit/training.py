"""Configurations that train a planned workload with PyTorch: a script, DeepSpeed's or FSDP's file.

FSDP's keys: accelerate 1.15 (``commands/config/config_args.py``, ``utils/dataclasses.py``,
``FullyShardedDataParallelPlugin``).
"""

from collections.abc import Callable, Iterator
from typing import Literal

from uma.errors import UsageError
from uma.plan.emit.deepspeed import deepspeed_json
from uma.plan.emit.peft import LEARNING_RATES, MIXED, Training, check_trainer, peft_script
from uma.units import printable
from uma.workload import Sharding

TrainingTarget = Literal["peft", "deepspeed", "fsdp"]


def training_configuration(target: TrainingTarget, training: Training) -> str:
    """A file that runs the plan.

    Raises:
        UsageError: If the programs cannot run such a workload.
    """
    check_trainer(training)
    if target == "deepspeed":
        return deepspeed_json(training.workload, LEARNING_RATES[training.workload.method])
    emit: dict[str, Callable[[Training], Iterator[str]]] = {"peft": peft_script, "fsdp": _fsdp}
    title = [f"# {printable(training.title, kept='')}"] if training.title else []
    return "\n".join([*title, *emit[target](training)])


def _fsdp(training: Training) -> Iterator[str]:
    """accelerate's file: FSDP 2, which shards each parameter by itself, and FSDP 1 for adapters.

    Both make float32 of trained weights where they mix precision (``utils/fsdp_utils.py``,
    ``fsdp2_prepare_model``). For adapters it is what PEFT documents and the plan counts with
    (``docs/source/accelerate/fsdp.md``).
    """
    asked = training.workload
    spread = asked.sharding
    _check_fsdp(spread)
    if spread.data == 1 and asked.method != "full":
        # torch 2.13, fsdp/_state_dict_utils.py: NO_SHARD's hooks drop offload_to_cpu.
        raise UsageError(
            "--emit fsdp: on one card FSDP 1 does not shard, and Trainer's saving of adapters "
            "would copy the whole base there; plan for several"
        )
    flag = {True: "true", False: "false"}
    yield "# accelerate launch --config_file THIS_FILE train.py, the script of --emit peft-fsdp"
    yield "compute_environment: LOCAL_MACHINE"
    yield "distributed_type: FSDP"
    if training.mixes:
        yield f"mixed_precision: {MIXED[asked.dtype]}  # trained weights are held in float32"
    else:
        yield "mixed_precision: 'no'  # else trained weights would be made float32"
    yield "num_machines: 1"
    yield f"num_processes: {spread.data}  # one for each device"
    yield "fsdp_config:"
    full = asked.method == "full"
    yield f"  fsdp_version: {2 if full else 1}"
    yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP  # a layer is gathered at a time"
    if full:
        whole = "gathered again for the backward pass" if spread.zero_stage == 3 else "kept whole"
        reshard = flag[spread.zero_stage == 3]
        yield f"  fsdp_reshard_after_forward: {reshard}  # parameters are {whole}"
    else:
        strategy = "FULL_SHARD" if spread.zero_stage == 3 else "SHARD_GRAD_OP"
        yield f"  fsdp_sharding_strategy: {strategy}"
        yield "  fsdp_use_orig_params: false"
        yield "  fsdp_sync_module_states: true"
    yield f"  fsdp_offload_params: {flag[bool(spread.offload_parameters)]}  # with states"
    yield f"  fsdp_activation_checkpointing: {flag[bool(asked.grad_checkpoint)]}"
    yield "  fsdp_cpu_ram_efficient_loading: true  # one process reads the file for all"
    yield "  fsdp_state_dict_type: FULL_STATE_DICT"


def _check_fsdp(spread: Sharding) -> None:
    """Refuse what FSDP does not shard.

    Raises:
        UsageError: With what to do instead.
    """
    if spread.zero_stage not in (2, 3) or (spread.data == 1 and not spread.offload_parameters):
        raise UsageError(
            "--emit fsdp: FSDP shards over several devices as ZeRO stages 2 and 3 do, or offloads; "
            "plan with --devices and --zero-stage 3, or --emit peft for one device"
        )
    if spread.offload_optimizer != spread.offload_parameters or "disk" in spread.offload_parameters:
        raise UsageError(
            "--emit fsdp: FSDP offloads parameters, gradients and states together, to the host; "
            "--emit deepspeed offloads each by itself"
        )
