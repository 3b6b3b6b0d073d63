"""How fast an estimated model would answer: decode at the asked context, and its prompt."""

from uma.architecture.layers import Architecture
from uma.frozen import dataclass
from uma.memory.reads import WeightReads, evenly_stored, weight_reads
from uma.plan.estimate import Estimate
from uma.quantization import GGUF_TYPES
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.processor import Processor, processors_of
from uma.speed.rate import NotKnown, Rate
from uma.workload import Engine


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of each sequence and of one prompt, or why they are not known."""

    decode: Rate | NotKnown
    prompt: Rate | NotKnown


def speeds_of(estimate: Estimate) -> Speeds:
    """The rates of an estimate that runs."""
    if estimate.ledger.verdict == "exceeds":
        none = NotKnown("it does not fit")
        return Speeds(none, none)
    workload = estimate.workload
    prompt = prompt_tps(
        *_asked(estimate),
        max(1, workload.longest_prompt_tokens),
        pass_tokens=workload.prefill_step_size if estimate.engine == "mlx" else None,
        quantized=estimate.bits_per_weight < 16,
    )
    return Speeds(decode_of(estimate), prompt)


def decode_of(estimate: Estimate) -> Rate | NotKnown:
    """Tokens per second of each sequence at the asked context."""
    workload, number = estimate.workload, estimate.workload.batch_size
    found = decode_tps(
        *_asked(estimate),
        workload.context_tokens,
        batch_size=number,
        kv_bits=_cache_bits(estimate),
    )
    if isinstance(found, NotKnown):
        return found
    each = (found.low / number, found.best / number, found.high / number)
    return Rate(*each, found.basis, found.source, found.notes)


def _asked(
    estimate: Estimate,
) -> tuple[Architecture, WeightReads, tuple[Processor, ...], Engine]:
    """Every weight is taken as stored in the same bits: a few percent off where they are not."""
    architecture = estimate.architecture
    size = sum(term.size_bytes for term in estimate.ledger.terms if term.name == "weights")
    reads = weight_reads(architecture, evenly_stored(architecture, size))
    return architecture, reads, processors_of(estimate.machine), estimate.engine


def _cache_bits(estimate: Estimate) -> float:
    """Bits of a number in the cache, with its part of scales."""
    workload = estimate.workload
    if workload.kv_bits is not None:  # a scale and a bias of 16 bits for each group
        return workload.kv_bits + 32 / workload.kv_group_size
    names = [name.upper() for name in estimate.cache_type.split(" / ")]
    blocks = [GGUF_TYPES[name] for name in names if name in GGUF_TYPES]
    if blocks:
        return sum(8 * size / numbers for numbers, size in blocks) / len(blocks)
    return 8 if estimate.cache_type.startswith("fp8") else 16
