"""How fast an estimated model would answer: decode at the asked context, and its prompt."""

from uma.frozen import dataclass
from uma.memory.reads import evenly_stored, weight_reads
from uma.plan.estimate import Estimate
from uma.quantization import GGUF_TYPES
from uma.speed.decode import decode_tps
from uma.speed.prefill import prompt_tps
from uma.speed.processor import processors_of
from uma.speed.rate import NotKnown, Rate


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of each sequence and of one prompt, or why they are not known."""

    decode: Rate | NotKnown
    prompt: Rate | NotKnown


def speeds_of(estimate: Estimate) -> Speeds:
    """The rates of an estimate that runs.

    Every weight is taken as stored in the same bits: a few percent off where they are not.
    """
    if estimate.ledger.verdict == "exceeds":
        none = NotKnown("it does not fit")
        return Speeds(none, none)
    architecture, workload = estimate.architecture, estimate.workload
    size = sum(term.size_bytes for term in estimate.ledger.terms if term.name == "weights")
    reads = weight_reads(architecture, evenly_stored(architecture, size))
    asked = (architecture, reads, processors_of(estimate.machine), estimate.engine)
    passes = workload.prefill_step_size if estimate.engine == "mlx" else None
    decode = decode_tps(
        *asked,
        workload.context_tokens,
        batch_size=workload.batch_size,
        kv_bits=_cache_bits(estimate),
    )
    if isinstance(decode, Rate):
        number = workload.batch_size
        each = (decode.low / number, decode.best / number, decode.high / number)
        decode = Rate(*each, decode.basis, decode.source, decode.notes)
    return Speeds(
        decode,
        prompt_tps(
            *asked,
            max(1, workload.longest_prompt_tokens),
            pass_tokens=passes,
            quantized=estimate.bits_per_weight < 16,
        ),
    )


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
