"""Tokens per second of training, on one device or on several that share the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uma.architecture.layers import Architecture
from uma.engines.schemes import scheme_named
from uma.memory.reads import WeightReads
from uma.speed.fitted import Coefficients, seconds
from uma.speed.processor import Processor
from uma.speed.rate import Calibration, NotKnown, Rate, fit_of, rate
from uma.speed.work import attention_elements
from uma.workload import TrainingWorkload

# FLOPs of fused attention's backward pass over those of the forward one: it computes the scores
# again, then five products for two (Dao 2023, FlashAttention-2, arXiv:2307.08691).
ATTENTION_BACKWARD = 2.5
LOGIT_BYTES = 4  # the loss is computed in float32
# Bytes of a trained number that AdamW reads and writes on the device, with all in 16 bits: weight,
# gradient and two states, then weight and states; the same in 32 on the host (ZeRO-Offload, Ren et
# al. 2021, arXiv:2101.06840).
ADAM_BYTES = 14
HOST_ADAM_BYTES = 28


# Two public logs name the machine: 82 tokens/s of Qwen3-8B in 4 bits on an M4, 113 to 137 of Llama
# 3.1 8B with up to 8,192 tokens on an M3 Max (truth/training.csv, mlx-085 and mlx-008). They are a
# half and a quarter of the rate of prompts with as many FLOPs, and count targets alone.
FROM_PROMPTS = (
    "not fitted to training, for hardly any public log of mlx_lm.lora names its machine: from a "
    "quarter of the rate of MLX's prompts to all of it"
)


# Mixtures of experts in Trainer took 1.6 to 13 times as long as their FLOPs say (Granite 3.0 and
# 4.0, 47 logs of one source: github.com/foundation-model-stack/fms-acceleration).
EXPERTS = "mixtures of experts took up to eight times as long in the public logs of transformers"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's part in training with offload: its memory, and the link to each device."""

    bandwidth_bytes_per_s: float
    link_bytes_per_s: float


def training_tps(
    architecture: Architecture,
    reads: WeightReads,
    processors: Sequence[Processor],
    engine: str,
    workload: TrainingWorkload,
    *,
    trained_elements: float,
    host: HostMemory | None = None,
    calibration: Calibration | None = None,
) -> Rate | NotKnown:
    """Tokens per second of all devices together, padding included.

    Each of ``workload.sharding.data`` devices has a batch of its own. What they exchange is hidden
    behind their computing where that takes longer. Tensor, pipeline and sequence parallelism are
    taken to divide the work without a loss.

    Args:
        engine (str): ``torch`` or ``mlx``.
        trained_elements (float): Of the weights or the adapters.
        host (HostMemory, optional): Needed where the workload offloads something to it.
    """
    first = processors[0]
    fit = _from_prompts(first) if engine == "mlx" else fit_of("training", engine, first)
    if isinstance(fit, NotKnown):
        return fit
    spread = workload.sharding
    if (spread.offload_optimizer or spread.offload_parameters) and host is None:
        return NotKnown("how fast the host's memory and its link are is not told")
    split = spread.tensor * spread.pipeline * spread.sequence
    computing = seconds(fit, _units(architecture, reads, first, workload)) / split
    moving = _exchange_s(reads, first, workload, trained_elements, host)
    if isinstance(moving, NotKnown):
        return moving
    steps = workload.grad_accumulation_steps
    total = steps * max(computing, moving)
    total += _optimizer_s(fit, first, workload, trained_elements, host)
    found = rate(steps * workload.tokens * spread.data, total, fit, calibration, first.notes)
    if calibration is not None or isinstance(found, NotKnown):
        return found
    if engine != "mlx":
        if not reads.experts:
            return found
        return replace(found, low=found.best / 8, basis="bound", notes=(*found.notes, EXPERTS))
    return replace(found, basis="bound", notes=(*found.notes, FROM_PROMPTS))


def _from_prompts(processor: Processor) -> Coefficients | NotKnown:
    """MLX's coefficients: twice the time that its prompts take for as many FLOPs."""
    prompts = fit_of("prefill", "mlx", processor)
    if isinstance(prompts, NotKnown):
        return prompts
    matrix = 2 * prompts.terms["matrix"]
    terms = {"matrix": matrix, "attention": matrix}
    return replace(prompts, quantity="training", terms=terms, low=0.5, high=2.0)


def passes(workload: TrainingWorkload, layers: int) -> float:
    """How often each weight is multiplied with each token, by what the method needs.

    Forward, again where a layer's inputs alone were kept, and backward: for the gradients of its
    inputs, from the last layer down to the first that is trained, and for its own if it is trained.
    """
    trained = min(1.0, (workload.num_layers or layers) / layers)
    again = 1.0 if workload.grad_checkpoint else 0.0
    return 1 + again + trained * (2 if workload.method == "full" else 1)


def _units(
    architecture: Architecture,
    reads: WeightReads,
    processor: Processor,
    workload: TrainingWorkload,
) -> dict[str, float]:
    """What each coefficient is multiplied with, for one batch of one device."""
    bandwidth, flops = processor.bandwidth_bytes_per_s, processor.training_flops_per_s
    assert bandwidth is not None
    assert flops is not None
    layers, tokens = len(architecture.layers), workload.tokens
    again = 1 if workload.grad_checkpoint else 0
    often = passes(workload, layers)
    products = reads.active_elements * often - reads.head_elements * again
    scored = attention_elements(architecture, "transformers", workload.max_seq_length / 2)
    return {
        "matrix": 2 * products * tokens / flops,
        "attention": 2 * scored * tokens * (1 + again + ATTENTION_BACKWARD) / flops,
        "activations": 2 * tokens * architecture.hidden_size * layers * (2 + again) / bandwidth,
        "logits": LOGIT_BYTES * tokens * architecture.vocab_size / bandwidth,
        "dequantize": 2 * reads.all_elements * (2 + again) / bandwidth if workload.quantized else 0,
        "layers": layers * (2 + again),
    }


def _exchange_s(
    reads: WeightReads,
    processor: Processor,
    workload: TrainingWorkload,
    trained_elements: float,
    host: HostMemory | None,
) -> float | NotKnown:
    """What devices send each other for one batch: sharded weights for each pass, and gradients."""
    spread = workload.sharding
    others = (spread.data - 1) / spread.data
    width = workload.dtype_bytes
    weights = 0.0
    if spread.zero_stage == 3:  # FSDP runs layers again within the backward pass's gathering
        often = 3 if workload.grad_checkpoint and not spread.fsdp else 2
        weights = _weight_width(workload) * reads.all_elements * often
    if host is not None and spread.offload_parameters:
        return (weights / spread.shards + width * trained_elements) / host.link_bytes_per_s
    sent = (weights + 2 * width * trained_elements) * others
    if not sent:
        return 0.0
    if processor.link_bytes_per_s is None:
        return NotKnown(f"how fast several {processor.name} are joined is not known")
    return sent / processor.link_bytes_per_s


def _weight_width(workload: TrainingWorkload) -> float:
    """Bytes of a weight of the base, as it is held and sent."""
    if not workload.quantized:
        return workload.dtype_bytes
    side = 1024  # of a matrix in which all groups are whole
    return scheme_named(workload.quantized).bytes_of(side, side) / side**2


def _optimizer_s(
    fit: Coefficients,
    processor: Processor,
    workload: TrainingWorkload,
    trained_elements: float,
    host: HostMemory | None,
) -> float:
    """The step of the optimizer, on the device or on the host."""
    spread = workload.sharding
    own = trained_elements / (spread.shards if spread.zero_stage else 1)
    if host is None or not spread.offload_optimizer:
        assert processor.bandwidth_bytes_per_s is not None
        memory = fit.terms.get("memory", 1.0)
        return memory * ADAM_BYTES * own / processor.bandwidth_bytes_per_s
    over_link = 2 * workload.dtype_bytes * own / host.link_bytes_per_s
    on_host = own * (spread.shards if spread.zero_stage else 1)  # all shards share one memory
    return over_link + HOST_ADAM_BYTES * on_host / host.bandwidth_bytes_per_s
