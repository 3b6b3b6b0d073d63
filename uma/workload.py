"""What is asked of a model: a generation, or a step of training."""

from typing import Literal

from uma.errors import UsageError
from uma.frozen import dataclass

DEFAULT_PREFILL_STEP_SIZE = 2048  # mlx-lm 0.32.2, generate.py, DEFAULT_PREFILL_STEP_SIZE
DEFAULT_KV_GROUP_SIZE = 64  # mlx-lm 0.32.2, generate.py, --kv-group-size

Backend = Literal["metal", "cpu"]
Engine = Literal["mlx", "llama.cpp", "transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class Inference:
    """One generation: a prompt, then tokens one by one, within ``context_tokens``.

    ``prompt_tokens`` defaults to the whole context: the prompt that needs most memory.
    ``kv_bits`` of ``None`` keeps the cache in the model's activation dtype. Of a batch only
    ``prefill_batch_size`` prompts run together, all of them without it: mlx-lm takes 8
    (mlx-lm 0.32.2, generate.py, ``BatchGenerator``).
    """

    context_tokens: int = 8192
    prompt_tokens: int | None = None
    batch_size: int = 1
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    kv_bits: int | None = None
    kv_group_size: int = DEFAULT_KV_GROUP_SIZE
    prefill_batch_size: int | None = None

    @property
    def longest_prompt_tokens(self) -> int:
        return self.context_tokens if self.prompt_tokens is None else self.prompt_tokens


Method = Literal["lora", "dora", "full"]
Loss = Literal["naive", "fused", "sliced"]
TrainingAttention = Literal["fused", "materialised"]
MemoryKind = Literal["allocated", "reserved", "device"]
TrainingEngine = Literal["mlx", "torch"]
Trainer = Literal["mlx_lm", "uma"]
StackName = Literal["trainer", "trainer-2024", "torchtune", "litgpt", "unsloth"]
Precision = Literal["16-bit", "mixed", "pure"]
Kernels = Literal["liger", "unsloth"]
Place = Literal["", "host", "disk"]
"""Where state of a training goes; empty is the device."""

METHODS = ("lora", "dora", "full")
OPTIMIZERS = (
    "adam",
    "adamw",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "adafactor",
    "sgd",
    "sgd-momentum",
    "lion",
    "muon",
)
DEFAULT_RANK = 8  # mlx-lm 0.32.2, lora.py, CONFIG_DEFAULTS: this and the next three
DEFAULT_NUM_LAYERS = 16
DEFAULT_TRAINING_BATCH = 4
DEFAULT_MAX_SEQ_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one training is spread: 1 everywhere is one device.

    ``zero_stage`` 1 shards the optimizer states over ``data`` devices, 2 also the gradients, 3 also
    the parameters; FSDP's full shard is 3, and its hybrid shard is 3 over ``shard_group`` devices
    (0: all of them), replicated beyond. ``sequence`` splits rows over devices that share the
    sharded state as those of ``data`` do. ``offload_optimizer`` and ``offload_parameters`` move
    that state to ``"host"`` or ``"disk"``. ``fsdp`` is PyTorch's or MLX's own sharding rather than
    DeepSpeed's.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    zero_stage: int = 0
    shard_group: int = 0
    offload_optimizer: Place = ""
    offload_parameters: Place = ""
    fsdp: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def replicas(self) -> int:
        """Devices that would hold the same state without ZeRO."""
        return self.data * self.sequence

    @property
    def shards(self) -> int:
        """Devices that one copy of the sharded state is split over."""
        return self.shard_group or self.replicas


def bits_word(bits: int) -> str:
    """How ``TrainingWorkload.quantized`` says MLX's formats.

    >>> bits_word(4), bits_word(16)
    ('4 bits', '')
    """
    return "" if bits >= 16 else f"{bits} bits"


def bits_named(word: str) -> int:
    """The bits of a ``bits_word``.

    >>> bits_named("4 bits"), bits_named("")
    (4, 16)

    Raises:
        UsageError: If it is something else.
    """
    found = {bits_word(bits): bits for bits in (2, 3, 4, 5, 6, 8, 16)}
    if word not in found:
        known = ", ".join(map(repr, found))
        raise UsageError(f"{word!r} is no format of weights on MLX; known are {known}")
    return found[word]


@dataclass(frozen=True, slots=True)
class TrainingWorkload:
    """One step of training on the longest batch: ``batch_size`` rows of ``max_seq_length`` tokens.

    ``targets`` are the last parts of the names of matrices that get an adapter; empty is every
    matrix of the trained layers. ``num_layers`` counts the trained layers from the last, ``None``
    is all. ``grad_checkpoint`` is the number of layers between saved inputs, 0 for none.
    ``quantized`` is the format of a frozen base in the engine's words, empty for 16 bits.
    ``attention`` of ``None`` is the engine's own: fused with PyTorch, all pairs of tokens on MLX.
    ``mem_kind`` is what the prediction is compared with: allocated, reserved by the allocator, or
    all that the device reports.

    Raises:
        UsageError: If the combination means nothing.
    """

    method: Method = "lora"
    rank: int = DEFAULT_RANK
    targets: tuple[str, ...] = ()
    num_layers: int | None = DEFAULT_NUM_LAYERS
    batch_size: int = DEFAULT_TRAINING_BATCH
    max_seq_length: int = DEFAULT_MAX_SEQ_LENGTH
    grad_checkpoint: int = 0
    optimizer: str = "adam"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantized: str = ""
    grad_accumulation_steps: int = 1
    loss: Loss = "naive"
    attention: TrainingAttention | None = None
    mem_kind: MemoryKind = "allocated"
    sharding: Sharding = Sharding()

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_method(self)
        _check_sharding(self)

    @property
    def tokens(self) -> int:
        """Tokens of one batch of one device."""
        return self.batch_size * self.max_seq_length

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


def _check_numbers(asked: TrainingWorkload) -> None:
    for name in ("batch_size", "max_seq_length", "grad_accumulation_steps"):
        if getattr(asked, name) < 1:
            raise UsageError(f"{name} is {getattr(asked, name)}; it must be at least 1")
    if asked.grad_checkpoint < 0:
        raise UsageError(f"grad_checkpoint is {asked.grad_checkpoint}; 0 is none, 1 every layer")
    if asked.num_layers is not None and asked.num_layers < 1:
        raise UsageError(
            f"num_layers is {asked.num_layers}: nothing would be trained, and {asked.optimizer} "
            "would have no states; leave it out to train all layers"
        )
    if asked.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"optimizer {asked.optimizer!r} is not known; known are {', '.join(OPTIMIZERS)}"
        )


def _check_method(asked: TrainingWorkload) -> None:
    if asked.method not in METHODS:
        raise UsageError(f"method {asked.method!r} is not one of {', '.join(METHODS)}")
    if asked.method == "full" and asked.quantized:
        raise UsageError(
            f"full fine-tuning of {asked.quantized} weights: quantized weights have no gradient, "
            "so only norms and biases would be trained; train adapters (--train lora), or a base "
            "in 16 bits"
        )
    if asked.method == "full" and asked.targets:
        raise UsageError("targets are the matrices that adapters are for; full training has none")
    if asked.method != "full" and asked.rank < 1:
        raise UsageError(
            f"rank {asked.rank} has no adapter, so nothing would be trained and the optimizer "
            "would have no state; the rank must be at least 1"
        )


def _check_sharding(asked: TrainingWorkload) -> None:
    spread = asked.sharding
    for name in ("data", "tensor", "pipeline", "sequence"):
        if getattr(spread, name) < 1:
            raise UsageError(f"{name} parallelism of {getattr(spread, name)}; 1 is none")
    if spread.zero_stage not in (0, 1, 2, 3):
        raise UsageError(f"ZeRO stage {spread.zero_stage} is not one of 0, 1, 2, 3")
    if spread.zero_stage and spread.replicas == 1 and not _offloads(spread):
        raise UsageError(
            f"{_stage(spread)} on one device shards nothing: each part would be the whole; add "
            "devices, or offload the optimizer"
        )
    if spread.shard_group and (spread.zero_stage != 3 or spread.replicas % spread.shard_group):
        raise UsageError(
            f"a shard group of {spread.shard_group} needs ZeRO stage 3 (FSDP) and a number of data "
            f"devices that it divides, not {spread.replicas}"
        )
    _check_offloading(asked)


def _check_offloading(asked: TrainingWorkload) -> None:
    spread = asked.sharding
    if spread.offload_parameters and spread.zero_stage != 3:
        raise UsageError("parameters can be offloaded with ZeRO stage 3 only, which gathers them")
    if "disk" in (spread.offload_optimizer, spread.offload_parameters) and spread.zero_stage != 3:
        raise UsageError(
            "only ZeRO stage 3 (ZeRO-Infinity) moves state to a disk; with a lower stage offload "
            "to the host"
        )
    if spread.offload_optimizer and asked.optimizer.startswith("paged"):
        raise UsageError("a paged optimizer moves its states by itself; offload or page, not both")
    if not spread.fsdp:
        return
    if spread.offload_optimizer != spread.offload_parameters:
        raise UsageError(
            "FSDP offloads parameters, gradients and optimizer states together (CPUOffload): "
            "offload both, or use ZeRO stage 3, which offloads each by itself"
        )
    if spread.offload_parameters == "disk":
        raise UsageError("FSDP offloads to the host alone; ZeRO stage 3 offloads to a disk")


def _stage(spread: Sharding) -> str:
    return "FSDP" if spread.fsdp else f"ZeRO stage {spread.zero_stage}"


def _offloads(spread: Sharding) -> bool:
    return bool(spread.offload_optimizer or spread.offload_parameters)
